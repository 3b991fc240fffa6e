"""Training a head: the K-step rollout, the distillation loss, the loop around them."""

from modelopt_eagle.draft.eagle3.rollout import RolloutOutput, rollout
from modelopt_eagle.training.distillation import distillation_loss
from modelopt_eagle.training.loss import LossOutput

__all__ = ["LossOutput", "RolloutOutput", "TrainingResult", "distillation_loss", "rollout", "train"]


def train(recipe):
    """Train a head as a recipe says, see :func:`modelopt_eagle.training.main.train`."""
    from modelopt_eagle.training.main import train as run

    return run(recipe)


def __getattr__(name: str):
    if name == "TrainingResult":
        from modelopt_eagle.training.trainer import TrainingResult

        return TrainingResult
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
