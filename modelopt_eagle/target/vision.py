"""The processor of a vision-language target: images to what its forward takes, placeholders to image tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from modelopt_eagle.common.package import require_extra
from modelopt_eagle.common.text import first_line
from modelopt_eagle.errors import ImageError, TargetError

_CONFIG_FILES = ("processor_config.json", "preprocessor_config.json")
_NOT_INPUTS = ("text_replacement_offsets", "input_ids", "attention_mask")


class VisionProcessor:
    """The processor that lies beside a target's tokenizer; it is loaded when the first image is met.

    Args:
        tokenizer: the target's.
        place: local folder or hub id of the target.
        config: the target's config, with its vision part.
        revision, trust_remote_code: as for ``load_target``.
        processor: one that is loaded already; then ``place`` and ``config`` are not read.
    """

    def __init__(
        self,
        tokenizer,
        place: Path | str | None = None,
        config=None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        *,
        processor=None,
    ):
        self._tokenizer, self._place, self._config = tokenizer, place, config
        self._revision, self._trust_remote_code, self._processor = revision, trust_remote_code, processor

    def __getstate__(self) -> dict:
        """For another process, which loads the processor itself."""
        return self.__dict__ | ({} if self._place is None else {"_processor": None})

    @property
    def processor(self):
        """The processor of transformers.

        Raises:
            MissingExtraError: Pillow is not installed.
            TargetError: there is none beside the tokenizer, or it cannot be loaded.
        """
        if self._processor is None:
            require_extra("PIL.Image", "vision")
            self._processor = load_processor(self._place, self._config, self._revision, self._trust_remote_code)
        return self._processor

    @property
    def image_token(self) -> str:
        """What the chat template writes for an image."""
        token = getattr(self.processor, "image_token", None)
        if not isinstance(token, str):
            raise TargetError(
                f"{type(self.processor).__name__} does not say which token stands for an image, so rows with images "
                "cannot be tokenised for this target; give rows of text"
            )
        return token

    @property
    def image_token_ids(self) -> frozenset[int]:
        """Ids at whose positions the target sees an image."""
        ids = getattr(self.processor, "image_token_ids", None) or [getattr(self.processor, "image_token_id", None)]
        return frozenset(token for token in ids if token is not None)

    def expand(self, text: str, pictures: Sequence) -> tuple[list[str], list[int]]:
        """What the processor puts in place of each placeholder, and the ids of the whole text.

        Args:
            text: a rendered conversation with one placeholder an image.
            pictures: RGB pictures of Pillow.

        Raises:
            ImageError: the processor does not take them, in its own words.
            TargetError: a processor that does not say what it put in.
        """
        output = self._run(text, pictures)
        offsets = output.get("text_replacement_offsets")
        if not offsets:
            raise TargetError(
                f"{type(self.processor).__name__} does not say what it puts in place of an image, so the answers "
                "could not be found behind it; use a newer transformers, or rows of text"
            )
        return [entry["replacement"] for entry in offsets[0]], output["input_ids"][0].tolist()

    def inputs(self, text: str, pictures: Sequence, length: int | None = None) -> tuple[list[int], dict[str, Tensor]]:
        """Ids of the whole text, and what the target's forward takes beside its first ``length`` ids.

        Args:
            text, pictures: as for :meth:`expand`.
            length: tokens of the row, which may have been cut behind its last image; None: all.

        Raises:
            ImageError: as for :meth:`expand`.
        """
        output = self._run(text, pictures)
        ids = output["input_ids"][0].tolist()
        tensors = {}
        for name, value in output.items():
            if name in _NOT_INPUTS or not isinstance(value, Tensor):
                continue
            by_token = value.dim() == 2 and tuple(value.shape) == (1, len(ids)) and name.endswith("type_ids")
            tensors[name] = value[:, :length] if by_token else value
        return ids, tensors

    def _run(self, text: str, pictures: Sequence):
        processor = self.processor
        try:
            return processor(
                text=[text],
                images=list(pictures),
                return_tensors="pt",
                add_special_tokens=False,
                return_text_replacement_offsets=True,
            )
        except Exception as error:  # processors raise many kinds for pictures and texts that they cannot take
            raise ImageError(f"the target's processor refused its images: {error}") from error


def vision_of(
    tokenizer, place: Path | str, config, revision: str | None = None, trust_remote_code: bool = False
) -> VisionProcessor | None:
    """The processor of a target whose config has a part for images beside its text config; ``None`` for the others."""
    if config.get_text_config(decoder=True) is config or getattr(config, "vision_config", None) is None:
        return None
    return VisionProcessor(tokenizer, place, config, revision, trust_remote_code)


def load_processor(place: Path | str, config, revision: str | None = None, trust_remote_code: bool = False):
    """The processor beside a target's tokenizer.

    Some processors (Qwen-VL's) have a part for videos that needs torchvision. Without torchvision it is left out.

    Raises:
        TargetError: there is none, or it cannot be loaded.
    """
    from transformers import AutoProcessor

    arguments = {"revision": revision or "main", "trust_remote_code": trust_remote_code}
    try:
        processor = AutoProcessor.from_pretrained(str(place), **arguments)
    except Exception as error:  # as for models: each kind means that it cannot be loaded
        without_videos = _images_only(config)
        if without_videos is None:
            raise _missing(place, error) from error
        try:
            processor = without_videos.from_pretrained(str(place), **arguments)
        except Exception as second:
            raise _missing(place, second) from error
    if not hasattr(processor, "image_processor"):
        raise _missing(place, f"{type(processor).__name__} reads no images")
    return processor


def _missing(place, error) -> TargetError:
    return TargetError(
        f"{place}: rows with images need the target's processor, and it cannot be loaded ({first_line(error)}). Put "
        f"{' or '.join(_CONFIG_FILES)} beside the tokenizer (processor.save_pretrained), or give rows of text"
    )


def _images_only(config):
    """The target's processor class without its part for videos; ``None`` if it has none or torchvision is there."""
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
    from transformers.utils import is_torchvision_available

    if is_torchvision_available() or type(config) not in PROCESSOR_MAPPING:
        return None
    whole = PROCESSOR_MAPPING[type(config)]
    if "video_processor" not in whole.get_attributes():
        return None

    class ImagesOnly(whole):
        """The processor as it is, for images."""

        def __init__(self, image_processor=None, tokenizer=None, chat_template=None, **options):
            super().__init__(image_processor, tokenizer, None, chat_template=chat_template, **options)

        @classmethod
        def get_attributes(cls):
            return ["image_processor", "tokenizer"]

    return ImagesOnly
