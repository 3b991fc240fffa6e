"""A drafter of its own, outside of the package: a bigram table. It shows that the seam is one."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from modelopt_eagle.draft import DraftConfig, DraftVocab
from modelopt_eagle.draft.algorithm import Algorithm, Cost, register
from modelopt_eagle.draft.base import DraftModule
from modelopt_eagle.draft.predictions import BatchView, Predictions
from modelopt_eagle.draft.trees import TreeHistory, build_round_tree

NAME = "bigram"


@dataclass
class BigramConfig(DraftConfig):
    """Nothing of its own but the name."""

    algorithm: str = NAME


class BigramModule(DraftModule):
    """The next token from the last one alone: a row of a table, and an output layer over the draft vocabulary."""

    def __init__(self, config: BigramConfig, vocab: DraftVocab | None = None):
        super().__init__(config, vocab)
        self.table = nn.Embedding(config.vocab_size, config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)


def plan(view: BatchView, settings: Any, generator: torch.Generator | None) -> Predictions:
    """Depth k of anchor i reads token ``i+1+k``, where the token behind it is to be learned."""
    return _all(view, settings.ttt_steps)


def _all(view: BatchView, steps: int) -> Predictions:
    everyone, last = torch.arange(len(view.input_ids)), len(view.input_ids) - 1
    masks = [
        view.documents.exists(everyone, k + 2) & view.supervised[(everyone + k + 2).clamp(max=last)]
        for k in range(steps)
    ]
    depth, anchor = torch.stack(masks).nonzero(as_tuple=True)
    return Predictions(anchor, depth, anchor + 1 + depth, steps)


def states(module: BigramModule, view: BatchView, predictions: Predictions, settings: Any, generator: Any) -> Tensor:
    """``[n, H]``."""
    return module.table(view.input_ids[predictions.teacher])


def drafts(module: BigramModule, view: BatchView, steps: int) -> tuple[Predictions, Tensor]:
    """Every draft within the answers."""
    predictions = _all(view, steps)
    return predictions, states(module, view, predictions, None, None)


class BigramLoop:
    """Chains and trees from the last token; nothing of the target's features is read, nothing is kept."""

    def __init__(self, module: BigramModule, plan: Any):
        self.module, self.plan = module, plan

    def loop(self, batch: int, capacity: int) -> BigramLoop:
        return self

    def commit(self, tokens: Tensor, aux_hidden: Tensor, starts: list[int], counts: list[int]) -> None:
        assert aux_hidden.shape[:2] == tokens.shape and len(starts) == len(counts) == len(tokens)

    def keep(self, rows: Tensor) -> None:
        """Nothing is kept."""

    def _log_probabilities(self, tokens: Tensor) -> Tensor:
        return self.module.lm_head(self.module.table(tokens)).log_softmax(-1)

    def draft(self, lengths: list[int], roots: Tensor) -> Any:
        ids = self.module.target_ids
        if not self.plan.is_tree:
            drafted = [roots]
            for _ in range(self.plan.depth):
                drafted.append(ids[self._log_probabilities(drafted[-1]).argmax(-1)])
            return torch.stack(drafted[1:], 1)
        topk = self.plan.topk
        scores, index = self._log_probabilities(roots).topk(topk)  # depth-1 trees are all it draws
        parents = torch.full((len(roots), 1), -1)
        return build_round_tree(TreeHistory(scores, ids[index], parents), self.plan, roots)


class BigramLayout:
    """A folder with the table, the output layer and the map."""

    engines = ()

    def write(self, module: BigramModule, dtype: torch.dtype) -> tuple[dict, dict]:
        tensors = {
            name: tensor.to(dtype) if tensor.is_floating_point() else tensor
            for name, tensor in module.state_dict().items()
        }
        config = {key: value for key, value in module.config.to_dict().items() if value is not None}
        return tensors, {"architectures": ["BigramDraft"], "torch_dtype": str(dtype)[6:], "bigram": config}

    def recognises(self, config: dict, tensors: dict) -> bool:
        return config.get("architectures") == ["BigramDraft"]

    def read(self, config: dict, tensors: dict, where: str) -> tuple[BigramConfig, dict]:
        return BigramConfig.from_dict(config["bigram"]), tensors

    def faults(self, config: BigramConfig) -> dict[str, list[str]]:
        return {}

    def serve_lines(self, config: BigramConfig, data: dict) -> list[str]:
        return ["No engine serves a table of bigrams; this toolkit's generator does."]


def head_config(recipe: Any, target_config: Any, size: int | None, ids: Any, **fields: Any) -> BigramConfig:
    made = DraftConfig.from_target(target_config, size, ids, **fields)
    return BigramConfig(**{**{f.name: getattr(made, f.name) for f in dataclasses.fields(made)}, "algorithm": NAME})


@torch.no_grad()
def probe(module: BigramModule) -> Tensor:
    return module.lm_head.float()(module.table.float()(torch.arange(module.config.vocab_size)))


ALGORITHM = register(
    Algorithm(
        name=NAME,
        title="bigram",
        config=BigramConfig,
        module=BigramModule,
        head_config=head_config,
        settings=lambda recipe: recipe.eagle,
        depths=lambda settings: settings.ttt_steps,
        plan=plan,
        states=states,
        drafts=drafts,
        drafter=lambda module, embedding, plan, recorder: BigramLoop(module, plan),
        cost=lambda config: Cost(0, 0, config.hidden_size * config.draft_vocab_size),
        recipe="eagle3",
        probe=probe,
        layout=BigramLayout(),
        shares_context=False,
    )
)
