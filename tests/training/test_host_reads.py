"""How often a micro-batch waits for the device: the step runs where tensors have no values, so every question is seen.

On torch's meta device shapes are computed and values do not exist. What needs a value to go on (``nonzero``, a mask as
an index, ``unique``) fails there; what reads one (``item``, ``tolist``, ``cpu``, ``bool``) is counted and answered.
"""

import contextlib
import sys

import pytest
import torch
from torch.overrides import TorchFunctionMode

from modelopt_eagle.data import TokenizedRow
from modelopt_eagle.draft import DraftVocab
from modelopt_eagle.draft.algorithm import find_algorithm, random_module
from modelopt_eagle.features import OnlineSource
from modelopt_eagle.recipe import load_recipe
from modelopt_eagle.target.tiny import make_tiny_target
from modelopt_eagle.training.optimizer import build_optimizers
from modelopt_eagle.training.stability import StepWatch
from modelopt_eagle.training.step import TeacherTables, TrainingStep

READS = {getattr(torch.Tensor, name) for name in ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__")}


class HostReads(TorchFunctionMode):
    """Counts reads of meta tensors; numbers are answered with 0, flags and whole numbers with 1."""

    def __init__(self):
        super().__init__()
        self.found, self.of_transformers = [], []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        asked = bool(args) and isinstance(args[0], torch.Tensor) and args[0].is_meta
        to_cpu = function is torch.Tensor.to and "cpu" in map(str, (*args[1:], *kwargs.values()))
        if asked and (function in READS or to_cpu):
            asking = "/transformers/" in sys._getframe(1).f_code.co_filename
            (self.of_transformers if asking else self.found).append(function.__name__)
            fill = torch.zeros if args[0].is_floating_point() else torch.ones
            answer = fill(args[0].shape, dtype=args[0].dtype)
            return answer if to_cpu else function(answer, *args[1:], **kwargs)
        return function(*args, **kwargs)


class Alone:
    """An accelerator of one process."""

    num_processes = 1


def make_row(number, length, prompt):
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(4, 200, (length,), generator=generator).tolist()
    return TokenizedRow(str(number), "", ids, [place >= prompt for place in range(length)], prompt)


@pytest.fixture(autouse=True)
def no_autocast(monkeypatch):
    """The meta device knows no autocast, and these steps use none."""
    monkeypatch.setattr(torch, "autocast", lambda *args, **options: contextlib.nullcontext())
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *args: False)


@pytest.fixture(scope="module")
def source():
    return OnlineSource(make_tiny_target(), [make_row(0, 24, 5), make_row(1, 9, 4), make_row(2, 40, 11)])


def make_step(target, overrides, fields, device="meta"):
    """A step on the meta device, and its recipe."""
    recipe = load_recipe(None, overrides)
    algorithm = find_algorithm(recipe.drafter.algorithm)
    layers = algorithm.default_layers(target.num_layers)
    config = algorithm.config.from_target(target.config, 96, layers, **fields)
    module = random_module(config, DraftVocab.from_counts(torch.arange(256).flip(0), 96), seed=0)
    tables = TeacherTables.make(target.embedding.weight, target.head, module.target_ids)
    step = TrainingStep(module, tables, recipe.eagle, settings=algorithm.settings(recipe))
    step.to_draft(), step.on_host_t2d()  # read once a run
    tables = TeacherTables.make(target.embedding.weight, target.head, module.target_ids, device)
    step.tables, step._to_draft = tables, step.to_draft().to(device)
    step.module.to(device)
    return step.train(), recipe


def run_window(step, recipe, batches) -> list[str]:
    """One optimiser step over some micro-batches as the trainer does it; what was read back."""
    optimizers = build_optimizers(step.module, recipe.training)
    watch = StepWatch("skip", Alone(), lambda line: None, lambda: "")
    with HostReads() as reads:
        window = [step.place(step.share(batch), "meta") for batch in batches]
        counts = sum(step.count_positions(batch, torch.Generator().manual_seed(3)) for batch in window)
        normalizers = step.normalisers(counts, sum(map(step.num_tokens, window)))
        losses = []
        for batch in window:
            output = step(batch, normalizers)
            output.loss.backward()
            losses.append(output.loss)
        norm = torch.nn.utils.clip_grad_norm_(step.parameters(), 1.0)
        watch.sound(0, window, losses, [norm])
        for optimizer in optimizers:
            optimizer.step()
    assert all(p.grad is not None for p in step.module.parameters() if p.requires_grad)
    return reads.found


MASK = {"mask_token_id": 255}
CASES = {
    "eagle3": ((), {}),
    "eagle3, two layers, a window": ((), {"num_hidden_layers": 2, "sliding_window": 8}),
    "eagle3, mixed": (("eagle.mix_hidden_states=0.3",), {}),
    "eagle3, lk": (("eagle.loss=lk",), {}),
    "eagle3, labels": (("eagle.self_logit_distillation=false",), {}),
    "eagle3, modelopt": (("eagle.convention=modelopt",), {}),
    "eagle3, choices within the vocabulary": (("eagle.in_vocab_only=true",), {}),
    "peagle": (("algorithm=peagle",), MASK),
    "peagle, two layers": (("algorithm=peagle",), {**MASK, "num_hidden_layers": 2}),
    "dflash": (("algorithm=dflash", "dflash.block_size=4"), {**MASK, "block_size": 4}),
    "dflash, dpace": (("algorithm=dflash", "dflash.block_size=4", "dflash.weighting=dpace"), {**MASK, "block_size": 4}),
    "medusa": (("algorithm=medusa", "medusa.heads=3"), {"heads": 3}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_window_of_stored_features_reads_back_once(source, case):
    """Two micro-batches, and the one question is whether their numbers are finite."""
    step, recipe = make_step(source.target, *CASES[case])
    assert run_window(step, recipe, [source.load([0, 1]), source.load([2])]) == ["tolist"]


def test_choices_that_only_the_device_knows_are_read_once_a_micro_batch(source):
    overrides, fields = CASES["eagle3, choices within the vocabulary"]
    step, recipe = make_step(source.target, (*overrides, "eagle.convention=modelopt"), fields)
    found = run_window(step, recipe, [source.load([0, 1]), source.load([2])])
    assert found == ["cpu", "cpu", "tolist"]


@pytest.mark.parametrize("drafter", ["eagle3", "peagle", "dflash"])
def test_online_features_add_one_read_a_micro_batch(drafter):
    """The target runs on the device, too; whether its states are finite is asked once for all rows of a batch.

    How the rows are masked, transformers asks once in each forward of the target, of which there are three.
    """
    target = make_tiny_target()
    source = OnlineSource(target, [make_row(0, 60, 5), make_row(1, 9, 4)])  # two forwards of the target
    step, recipe = make_step(target, *CASES[drafter])
    source.load([0])  # the first forward of a target looks at more
    target.model.to("meta")
    target.head = target.head.to(device="meta")
    with HostReads() as reads:
        batches = [source.load([0, 1]), source.load([1])]
    assert reads.found == ["tolist", "tolist"] and len(reads.of_transformers) == 3
    assert batches[0].input_ids.is_meta and batches[0].host is not None
    assert run_window(step, recipe, batches) == ["tolist"]


def test_the_counter_sees_what_it_is_to_see():
    values = torch.empty(3, device="meta")
    with HostReads() as reads:
        values.sum().item(), values.tolist(), values.cpu(), values.to("cpu"), bool(values[0]), float(values[0])
    assert len(reads.found) == 6
    for ask in (lambda: values.nonzero(), lambda: values[values > 0], lambda: values.unique()):
        with pytest.raises((NotImplementedError, RuntimeError)):
            ask()
