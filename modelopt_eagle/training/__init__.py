"""Training a head: the K-step rollout, the distillation loss, the loop around them."""

from .loss import LossOutput, distillation_loss
from .rollout import RolloutOutput, rollout

__all__ = ["LossOutput", "RolloutOutput", "TrainingResult", "distillation_loss", "rollout", "train"]


def train(recipe):
    """Train a head as a recipe says, see :func:`modelopt_eagle.training.main.train`."""
    from .main import train as run

    return run(recipe)


def __getattr__(name: str):
    if name == "TrainingResult":
        from .trainer import TrainingResult

        return TrainingResult
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
