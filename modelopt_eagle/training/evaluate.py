"""The acceptance walk over held-out rows, on all processes together."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from modelopt_eagle.features import FeatureSource
from modelopt_eagle.training.acceptance import WalkResult, walk
from modelopt_eagle.training.step import TrainingStep


@dataclass(frozen=True)
class EvaluationFiles:
    """Held-out rows by the file that they come from, for a number each besides the pooled one."""

    sources: dict[str, FeatureSource]


def evaluate_files(step: TrainingStep, held_out: FeatureSource | EvaluationFiles, accelerator, **options):
    """:func:`evaluate` on all held-out rows.

    Args:
        held_out: a source, or several by file.

    Returns:
        the pooled :class:`WalkResult`, and one by file (empty for a single source).
    """
    if not isinstance(held_out, EvaluationFiles):
        return evaluate(step, held_out, accelerator, **options), {}
    walks = {name: evaluate(step, source, accelerator, **options) for name, source in held_out.sources.items()}
    pooled = WalkResult(options["num_steps"])
    for part in walks.values():
        pooled.extend(part)
    return pooled, walks


@torch.no_grad()
def evaluate(step: TrainingStep, source, accelerator, *, batch_size: int, num_steps: int) -> WalkResult:
    """Acceptance length of the head on a feature source.

    The head's mode (``training``) and the random state are left as they were.

    Args:
        step: the training step, without wrappers.
        source: a :class:`~modelopt_eagle.features.FeatureSource` of rows that the target answered greedily.
        accelerator: whose processes share the rows.
        batch_size: rows of a batch.
        num_steps: K, drafted tokens a step.
    """
    from accelerate.utils import gather_object

    was_training = step.training
    step.eval()
    walked = WalkResult(num_steps)
    try:
        with torch.random.fork_rng(enabled=True):
            for batch in source.batches(
                0, batch_size=batch_size, seed=0, rank=accelerator.process_index, world_size=accelerator.num_processes
            ):
                if batch is None:
                    continue
                batch = step.place(batch, accelerator.device)
                with torch.autocast(accelerator.device.type, dtype=torch.bfloat16, enabled=step.bf16):
                    walked.extend(walk(step.module, step.view(batch), batch.target_top1[0], num_steps))
    finally:
        step.train(was_training)
    if accelerator.num_processes > 1:
        walked = WalkResult(num_steps, gather_object(walked.accepted))
    return walked
