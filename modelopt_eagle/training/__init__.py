"""Training a head: the K-step rollout, the distillation loss, the loop around them."""

from typing import TYPE_CHECKING, Any

from modelopt_eagle.draft.eagle3.rollout import RolloutOutput, rollout
from modelopt_eagle.training.distillation import distillation_loss
from modelopt_eagle.training.loss import LossOutput

if TYPE_CHECKING:
    from modelopt_eagle.training.main import train
    from modelopt_eagle.training.trainer import TrainingResult

__all__ = ["LossOutput", "RolloutOutput", "TrainingResult", "distillation_loss", "rollout", "train"]


def __getattr__(name: str) -> Any:
    if name == "train":
        from modelopt_eagle.training.main import train

        return train
    if name == "TrainingResult":
        from modelopt_eagle.training.trainer import TrainingResult

        return TrainingResult
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
