"""Heads trained for a minute on the quick-start target, by the ordinary recipe, from features made once for all.

Four heads cover every value that an engine must honour: the default captured layers and others (the last layer among
them, two instead of three), a reduced and the full vocabulary, one and two draft layers, and each flag that vLLM knows.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from modelopt_eagle.export import export_checkpoint, load_draft
from modelopt_eagle.features.dump import TargetBackEnd, dump
from modelopt_eagle.recipe import load_recipe
from modelopt_eagle.training import train
from modelopt_eagle.training.data import read_data

ROOT = Path(__file__).parents[2]
CONVERSATIONS = 64
DEFAULT, OTHERS, TWO = (1, 14, 26), (4, 20, 29), (9, 27)

HEADS = {
    "plain": (DEFAULT, ["eagle.draft_vocab_size=4096"]),
    "deep": (OTHERS, ["eagle.draft_vocab_size=4096", "eagle.num_layers=2"]),
    "full": (
        DEFAULT,
        [
            "eagle.draft_vocab_size=null", "training.batch_size=4", "training.epochs=2", "eagle.ttt_steps=1",
            "eagle.ttt_warmup=0",
        ],
    ),
    "flags": (
        TWO,
        [
            "eagle.draft_vocab_size=4096", "eagle.init=random", "eagle.norm_before_residual=true",
            "eagle.norm_before_fc=true", "eagle.fc_norm=true", "eagle.norm_output=true", "eagle.attention_bias=true",
        ],
    ),
}  # fmt: skip
"""Name to captured layers and what else differs from the quick-start recipe."""


@dataclass
class Trained:
    """A head's folders: ``checkpoint`` as trained, ``export`` as engines load it."""

    checkpoint: Path
    export: Path


def head_recipe(name: str, output: Path):
    """The quick-start recipe for a minute."""
    layers, overrides = HEADS[name]
    return load_recipe(
        ROOT / "recipes" / "quickstart.yaml",
        [
            f"training.output_dir={output}",
            f"eagle.aux_layer_ids={list(layers)}",
            f"data.max_rows={CONVERSATIONS}",
            "training.epochs=4",
            "training.time_budget_minutes=null",
            "training.report_to=none",
            *overrides,
        ],
    )


class Slices:
    """A feature back end that takes some of the layers of rows made before."""

    def __init__(self, made: list, every: tuple[int, ...], contract, back_end: TargetBackEnd, layers: tuple[int, ...]):
        self._made, self._places = made, [every.index(layer) for layer in layers]
        self._count, self.contract = len(every), replace(contract, aux_layer_ids=layers)
        self.tokenizer, self.end_token_ids = back_end.tokenizer, back_end.end_token_ids

    def features(self, rows) -> Iterator:
        """See ``features.dump.BackEnd``."""
        for number, row in enumerate(self._made):
            aux = row.aux_hidden.unflatten(-1, (self._count, -1))[:, self._places].flatten(-2)  # [s, A·Ht]
            yield number, replace(row, aux_hidden=aux.contiguous())


def make_stores(target, folder: Path) -> dict[tuple[int, ...], Path]:
    """Run the target once over the conversations; a store for each set of layers that a head reads."""
    rows = read_data(head_recipe("plain", folder), target, "quickstart").rows
    every = tuple(sorted({*DEFAULT, *OTHERS, *TWO}))
    back_end = TargetBackEnd(target, every)
    made = [row for _, row in sorted(back_end.features(rows), key=lambda pair: pair[0])]
    stores = {}
    for layers in sorted({layers for layers, _ in HEADS.values()}):
        stores[layers] = folder / "-".join(map(str, layers))
        slices = Slices(made, every, back_end.contract, back_end, layers)
        dump(slices, rows, stores[layers], dtype=back_end.contract.dtype)
    return stores


def train_head(name: str, target, stores: dict[tuple[int, ...], Path], output: Path) -> Trained:
    """Train and export one of :data:`HEADS`; its features are there already, as after an interrupted run."""
    output.mkdir(parents=True)
    (output / "features").symlink_to(stores[HEADS[name][0]])
    torch.manual_seed(0)
    checkpoint = train(head_recipe(name, output)).best_checkpoint
    export_checkpoint(load_draft(checkpoint), None, output / "export", target=target)
    return Trained(checkpoint, output / "export")
