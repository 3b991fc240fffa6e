"""Which layers of a target feed a head: the default three, and checks of named ones."""

from __future__ import annotations

from collections.abc import Sequence

from modelopt_eagle.errors import TargetError

MIN_LAYERS_FOR_DEFAULT = 6


def default_layer_ids(num_layers: int) -> tuple[int, int, int]:
    """EAGLE-3's layers ``(1, n//2 − 1, n − 4)``: low, middle, high (output of layer k, 0-based).

    Source: EAGLE-3 release and the serving engines' own defaults, which name the same tensors as layer inputs
    ``2, n//2, n − 3``. At n = 6 the last two would be the same layer, which vLLM captures only once; there the third
    id is one higher.

    Raises:
        TargetError: fewer than six layers, where the three would coincide or fall outside.
    """
    if num_layers < MIN_LAYERS_FOR_DEFAULT:
        raise TargetError(
            f"the default auxiliary layers need a target of at least {MIN_LAYERS_FOR_DEFAULT} layers, found "
            f"{num_layers}; set eagle.aux_layer_ids, for example "
            f"[{', '.join(str(i) for i in range(min(3, num_layers)))}] (output of layer k, 0-based)"
        )
    middle = num_layers // 2 - 1
    return (1, middle, max(num_layers - 4, middle + 1))


def check_layer_ids(layer_ids: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Layer ids ascending, after checking that they are distinct and in range (0-based outputs).

    Raises:
        TargetError: empty, repeated, or outside ``0 .. num_layers − 1``.
    """
    ids = tuple(sorted(int(i) for i in layer_ids))
    outside = [i for i in ids if not 0 <= i < num_layers]
    if not ids or outside or len(set(ids)) != len(ids):
        beyond = f" ({outside} lie outside the target's layers)" if outside else ""
        raise TargetError(
            f"expected distinct layer ids from 0 to {num_layers - 1} (output of layer k, 0-based; an engine's list of "
            f"layer inputs is one higher), found {list(layer_ids)}{beyond}; set "
            "eagle.aux_layer_ids"
        )
    return ids
