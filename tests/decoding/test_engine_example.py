"""The engine step of ``docs/kernels.md``, taken from the page, decodes the target's own text with trees in slots."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import torch
from oracle import known_history

from modelopt_eagle.decoding.masks import attention_kinds, kind_masks
from modelopt_eagle.decoding.row_cache import RowCache

PAGE = Path(__file__).parents[2] / "docs" / "kernels.md"
T, D, N, GRAPH = 2, 3, 8, 4


@dataclass
class Request:
    """A request of the little engine: its row in the cache is its place in the batch."""

    row: int
    prompt: list[int]
    answer: list[int]
    tokens: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    slot: int = -1
    read: int = 0  # tokens in the cache


class Engine:
    """A model, a cache of GRAPH rows and the code of the page."""

    def __init__(self, target):
        self.target, self.cache = target, RowCache(target.num_layers, 64)
        self.page = {"N": N, "T": T, "D": D, "num_layers": target.num_layers, "hidden_size": target.hidden_size}
        exec(re.search(r"## In an engine.*?```python\n(.*?)```", PAGE.read_text(), re.S)[1], self.page)
        with self.cache.writing([0] * GRAPH, 1, target.device):  # allocate all rows
            target.model(torch.zeros(GRAPH, 1, dtype=torch.int64), past_key_values=self.cache)

    def prefill(self, request):
        """Read a prompt into the request's row and emit the first token."""
        alone, ids = RowCache(self.target.num_layers, 64), torch.tensor([request.prompt])
        with alone.writing([0], len(request.prompt), self.target.device):
            logits = self.target.model(ids, past_key_values=alone).logits
        for mine, theirs in zip(self.cache.tensors(), alone.tensors(), strict=True):
            mine[request.row] = theirs[0]
        request.tokens, request.read = [int(logits[0, -1].argmax())], len(request.prompt)
        self.page["start"](request)

    def draft(self, batch):
        """Candidates from the known answers: right for two tokens, then wrong."""
        columns = []
        for request in batch:
            done = len(request.tokens)
            path = (request.answer[done : done + 2] + [0] * D)[:D]
            columns.append(known_history(path, T, self.target.vocab_size))
        scores, tokens, parents = (torch.tensor(column) for column in zip(*columns, strict=True))
        history = SimpleNamespace(scores=scores.float(), tokens=tokens, parent_list=parents)
        self.page["draft"](batch, history, torch.tensor([request.tokens[-1] for request in batch]))

    def step(self, batch):
        """One captured graph's worth of work: GRAPH rows, of which the batch is real."""
        lengths = [request.read for request in batch] + [0] * (GRAPH - len(batch))
        roots = torch.tensor([request.tokens[-1] for request in batch] + [7] * (GRAPH - len(batch)))

        def run_target(tokens, sees, depths, buffer, rows):
            masks = kind_masks(attention_kinds(self.target.config), lengths, sees, depths.long(), self.target.dtype)
            handles = [
                self.target.layers[k].register_forward_hook(
                    lambda module, args, out, k=k: buffer.write(k, out.flatten(0, 1), rows)
                )
                for k in buffer.layer_ids
            ]
            with self.cache.writing(lengths, N, self.target.device):
                positions = depths.long() + torch.tensor(lengths)[:, None]
                logits = self.target.model(
                    tokens, attention_mask=masks, position_ids=positions, past_key_values=self.cache
                ).logits
            for handle in handles:
                handle.remove()
            return logits.argmax(-1)

        accepted, taken = self.page["step"](
            batch, roots, GRAPH, run_target, self.cache.tensors(), torch.tensor(lengths)
        )
        assert taken.shape[:2] == (len(batch), D + 1) and accepted.nodes.shape == (GRAPH, D + 1)
        for place, request in enumerate(batch):
            count = int(accepted.num_accepted[place])
            request.tokens += accepted.tokens[place, : count + 1].tolist()
            request.accepted.append(count)
            request.read += count + 1
        return taken


@torch.inference_mode()
def test_the_pages_engine_decodes_the_targets_text(target, prompts, greedy):
    engine = Engine(target)
    waiting = [Request(row, prompts[row], greedy[row]) for row in range(3)]
    batch, address = [], engine.page["buffer"].data.data_ptr()
    for turn in range(12):
        if turn in (0, 2, 3):  # requests arrive one after the other
            batch.append(waiting.pop(0))
            engine.prefill(batch[-1])
        taken = engine.step(batch)
        for request, rows in zip(batch, taken, strict=True):  # the features are those of the text that was accepted
            text = torch.tensor([request.prompt + request.tokens])
            true = target.features(text, None, engine.page["buffer"].layer_ids).aux_hidden[0]
            count, first = request.accepted[-1] + 1, request.read - request.accepted[-1] - 1
            torch.testing.assert_close(rows[:count], true[first : first + count], atol=2e-4, rtol=1e-4)
        engine.draft(batch)
    for request, expected in zip(batch, greedy, strict=False):
        assert request.tokens[:20] == expected[:20]
        assert request.accepted[0] == 0 and min(request.accepted[1:6]) == 2  # no tree in the first step
        engine.page["finish"](request)
    assert engine.page["slots"].free == 8 and engine.page["buffer"].data.data_ptr() == address
    assert not engine.page["slots"].has_tree[:8].any()
