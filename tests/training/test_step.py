"""The one module behind which head and loss lie: counting, empty batches, hard labels, bf16, compilation."""

import shutil
from dataclasses import replace

import pytest
import torch

from modelopt_eagle.draft import DraftConfig, DraftVocab
from modelopt_eagle.draft.algorithm import random_module
from modelopt_eagle.features import FeatureContract, collate
from modelopt_eagle.features.compute import compute_features
from modelopt_eagle.recipe import load_recipe
from modelopt_eagle.target.head import TargetHead
from modelopt_eagle.training.step import TeacherTables, TrainingStep, compile_layers, head_transform


class Row:
    """A tokenised row."""

    def __init__(self, number, length, prompt):
        generator = torch.Generator().manual_seed(number)
        self.id, self.category = str(number), "all"
        self.input_ids = torch.randint(4, 200, (length,), generator=generator).tolist()
        self.supervised = [place >= prompt for place in range(length)]


@pytest.fixture(scope="module")
def batch(tiny_target):
    rows = [Row(0, 14, 5), Row(1, 9, 8), Row(2, 20, 3)]
    ids = tiny_target.default_aux_layer_ids()
    return collate(compute_features(tiny_target, rows, ids), FeatureContract.from_target(tiny_target))


def make_step(target, *overrides, precision="float32"):
    recipe = load_recipe(None, overrides)
    config = DraftConfig.from_target(target.config, 96)
    counts = torch.arange(256).flip(0)
    module = random_module(config, DraftVocab.from_counts(counts, 96), seed=0)
    tables = TeacherTables.make(target.embedding.weight, target.head, module.target_ids)
    return TrainingStep(module, tables, recipe.eagle, precision)


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("eagle.in_vocab_only=true",),
        ("eagle.self_logit_distillation=false",),
        ("eagle.convention=modelopt",),
        ("eagle.convention=eagle",),
        ("eagle.convention=speculators", "eagle.ttt_steps=2"),
        ("eagle.convention=modelopt", "eagle.in_vocab_only=true"),
    ],
    ids=" ".join,
)
def test_positions_counted_before_are_those_that_the_loss_counts(tiny_target, batch, overrides):
    step = make_step(tiny_target, *overrides)
    counts = step.count_positions(batch)
    output = step(batch, step.normalisers(counts, batch.num_tokens))
    assert counts.tolist() == output.valid_counts.tolist()
    assert counts.sum() > 0 and torch.isfinite(output.loss)


def test_known_choices_and_computed_ones_agree(tiny_target, batch):
    """``served`` takes the target's choices from the batch; without them they come from the final states."""
    step = make_step(tiny_target, "eagle.in_vocab_only=true")
    counts = step.count_positions(batch)
    bare = replace(batch, target_top1=None)
    assert step.count_positions(bare).tolist() == counts.tolist()
    norm = step.normalisers(counts, batch.num_tokens)
    assert step(bare, norm).top1_hits.tolist() == step(batch, norm).top1_hits.tolist()


def test_process_without_a_batch_reaches_every_parameter_with_zero(tiny_target):
    step = make_step(tiny_target)
    output = step(None, torch.ones(3))
    output.loss.backward()
    assert output.loss == 0 and output.valid_counts.tolist() == [0, 0, 0]
    assert all(p.grad is not None and not p.grad.any() for p in step.parameters())


def test_only_the_head_is_in_the_module(tiny_target):
    step = make_step(tiny_target)
    assert {name.split(".")[0] for name, _ in step.named_parameters()} == {"module"}
    assert sum(p.numel() for p in step.parameters()) == sum(p.numel() for p in step.module.parameters())


def test_every_use_of_the_head_goes_through_forward(tiny_target, batch):
    """A wrapper that shards parameters gathers them around ``forward``; a use outside would see fragments."""
    step = make_step(tiny_target)
    inside = False

    def enter(*_):
        nonlocal inside
        inside = True

    def leave(*_):
        nonlocal inside
        inside = False

    def check(*_):
        assert inside, "a part of the head was called outside the step's forward"

    step.register_forward_pre_hook(enter)
    step.register_forward_hook(leave)
    for part in step.module.modules():
        part.register_forward_pre_hook(check)
    counts = step.count_positions(batch)
    step(batch, step.normalisers(counts, batch.num_tokens)).loss.backward()


def test_bf16_stays_close_to_float32(tiny_target, batch):
    plain, half = make_step(tiny_target), make_step(tiny_target, precision="bf16")
    norm = plain.normalisers(plain.count_positions(batch), batch.num_tokens)
    a, b = plain(batch, norm), half(batch, norm)
    b.loss.backward()
    assert a.loss.item() == pytest.approx(b.loss.item(), rel=0.02)
    assert all(p.dtype == torch.float32 and p.grad.dtype == torch.float32 for p in half.parameters())


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_compiled_layers_give_the_same_loss_and_gradients(tiny_target, batch, backend):
    """With the inductor the C++ that a run would run; where no compiler is, there is none to test."""
    if backend == "inductor" and shutil.which("gcc") is None:
        pytest.skip("torch.compile needs a C++ compiler on a CPU")
    plain, compiled = make_step(tiny_target), make_step(tiny_target)
    compile_layers(compiled.module, backend=backend)
    norm = plain.normalisers(plain.count_positions(batch), batch.num_tokens)
    a, b = plain(batch, norm).loss, compiled(batch, norm).loss
    a.backward()
    b.backward()
    torch.testing.assert_close(a, b)
    for (name, p), (other, q) in zip(plain.named_parameters(), compiled.named_parameters(), strict=True):
        assert name == other
        torch.testing.assert_close(p.grad, q.grad)
    assert plain.module.state_dict().keys() == compiled.module.state_dict().keys()


def test_head_with_its_own_embedding_learns_it(tiny_target, batch):
    recipe = load_recipe(None, [])
    config = DraftConfig.from_target(tiny_target.config, 96, own_embedding=True)
    module = random_module(config, DraftVocab.from_counts(torch.arange(256), 96), seed=0)
    tables = TeacherTables.make(tiny_target.embedding.weight, tiny_target.head, module.target_ids)
    step = TrainingStep(module, tables, recipe.eagle)
    step(batch, step.normalisers(step.count_positions(batch), batch.num_tokens)).loss.backward()
    assert module.embed_tokens.weight.grad.abs().sum() > 0


def test_transform_is_the_target_head_after_its_product():
    generator = torch.Generator().manual_seed(0)
    head = TargetHead(torch.randn(9, 4, generator=generator), torch.randn(9, generator=generator), 0.5, 2.0)
    hidden, ids = torch.randn(3, 4, generator=generator), torch.tensor([1, 5, 8])
    transform = head_transform(head)
    torch.testing.assert_close(transform(hidden @ head.weight.T, None), head(hidden))
    torch.testing.assert_close(transform(hidden @ head.rows(ids).T, ids), head(hidden)[:, ids])
    assert head_transform(TargetHead(head.weight)) is None
