"""Features of rows with images: the target's own forward over text and pictures, one row at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from modelopt_eagle.errors import FeatureError


def has_images(row) -> bool:
    """Whether a tokenised row holds images."""
    return getattr(row, "images", None) is not None


def refuse_images(rows: Sequence, where: str) -> None:
    """Stop where features cannot be made of rows with images.

    Raises:
        FeatureError: names the first of them.
    """
    first = next((row for row in rows if has_images(row)), None)
    if first is not None:
        raise FeatureError(
            f"row {first.id!r} has images, and {where} reads text only: make its features with the target in this "
            "process (training without servers, or modelopt-eagle dump), or leave such rows out"
        )


def picture_states(target, row, aux_layer_ids: Sequence[int], gradient: bool = False) -> tuple[Tensor, Tensor]:
    """States of one row with images.

    Args:
        target: a loaded vision-language :class:`~modelopt_eagle.target.Target`.
        row: the tokenised row with ``images``.
        aux_layer_ids: canonical ids.
        gradient: keep the graph.

    Returns:
        aux [s, A·Ht] and final [s, Ht] post-norm, on the target's device.

    Raises:
        FeatureError: the target reads no images, or its processor gives other tokens than the row has.
        DataError: an image is gone or has changed.
    """
    if getattr(target, "vision", None) is None:
        raise FeatureError(f"row {row.id!r} has images, and {target.name} reads text only")
    length = len(row.input_ids)
    ids, inputs = target.vision.inputs(row.images.text, row.images.read(), length)
    if ids[:length] != list(row.input_ids):
        raise FeatureError(f"row {row.id!r}: the target's processor makes other tokens of it now than when it was read")
    output = target.features(torch.tensor([ids[:length]]), None, aux_layer_ids, gradient=gradient, images=inputs)
    return output.aux_hidden[0], output.final_hidden[0]  # [s,A·Ht], [s,Ht]
