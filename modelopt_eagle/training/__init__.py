"""Training a head: the K-step rollout, the distillation loss, the loop around them."""

from .loss import LossOutput, distillation_loss
from .rollout import RolloutOutput, rollout

__all__ = ["LossOutput", "RolloutOutput", "distillation_loss", "rollout"]
