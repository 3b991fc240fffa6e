"""Batches shared over processes by positions: loss, gradients, counters and mode are those of one process."""

from pathlib import Path

import pytest
import torch

from modelopt_eagle.errors import RecipeError
from modelopt_eagle.recipe import load_recipe
from modelopt_eagle.training import train
from modelopt_eagle.training.context import zigzag
from tests.training import shared_batches
from tests.training.runs import small_recipe, write_conversations
from tests.training.test_distributed import launch, weights

SCRIPT = Path(__file__).with_name("shared_batches.py")


@pytest.fixture(scope="module", params=[2, 3])
def shares(request, tmp_path_factory):
    """What each of two, and of three, processes got for its share of every case."""
    folder = tmp_path_factory.mktemp("shares")
    launch(folder, script=SCRIPT, processes=request.param)
    return [torch.load(folder / f"rank-{rank}.pt") for rank in range(request.param)]


@pytest.fixture(scope="module")
def whole():
    """The same cases in one process."""
    results = {}
    for name in shared_batches.CASES:
        step, batch = shared_batches.make(name)
        counts = step.count_positions(batch, torch.Generator().manual_seed(shared_batches.SEED))
        if counts is None:
            results[name] = None
            continue
        norm = step.normalisers(counts, batch.num_tokens)
        results[name] = shared_batches.measure(step, batch, norm, **shared_batches.options_of(name))
        results[name]["total"] = torch.cat((counts, torch.tensor([batch.num_tokens])))
    return results


@pytest.mark.parametrize("name", shared_batches.CASES)
def test_loss_and_gradients_add_up_to_those_of_one_process(name, shares, whole):
    """B110."""
    one, parts = whole[name], [share[name] for share in shares]
    if name == "nothing":
        assert one is None and parts == [None] * len(parts)
        return
    for part in parts:
        assert part["total"].tolist() == one["total"].tolist() and part["training"]
    for key in ("counts", "hits"):
        assert sum(part[key] for part in parts).tolist() == one[key].tolist()
    torch.testing.assert_close(sum(part["loss"] for part in parts), one["loss"], rtol=1e-6, atol=1e-6)
    if one["preservation"] is not None:
        total = sum(part["preservation"] for part in parts)
        torch.testing.assert_close(total, one["preservation"], rtol=1e-6, atol=1e-6)
        assert one["preservation"] > 0
    torch.testing.assert_close(sum(part["per_step"] for part in parts), one["per_step"], rtol=1e-6, atol=1e-6)
    for parameter, gradient in one["gradients"].items():
        total = sum(part["gradients"][parameter] for part in parts)
        torch.testing.assert_close(total, gradient, rtol=1e-5, atol=1e-6, msg=f"{name}: {parameter}")
    assert sum(g.abs().sum() for g in one["gradients"].values()) > 0
    if name in shared_batches.ADAPTED:
        assert any("adapters" in parameter for parameter in one["gradients"])


def test_each_process_holds_and_keeps_its_share(shares, whole):
    """Features are cut; what the backward pass keeps is cut too but for the gathered keys and values."""
    one = whole["long row"]
    for part in (share["long row"] for share in shares):
        assert part["features"] < 1.02 * one["features"] / len(shares)
        assert part["kept"] < (0.1 + 1 / len(shares)) * one["kept"]


def test_gathered_values_stand_in_order_and_their_gradient_is_summed(shares):
    size = len(shares)
    factor = size * (size + 1) / 2  # each process weighs what it sees by its rank + 1
    assert sorted(torch.cat([share["gathered"][0] for share in shares]).tolist()) == list(range(11))
    for tokens, gathered, gradient in (share["gathered"] for share in shares):
        assert torch.equal(gathered, torch.arange(11.0)[:, None].expand(-1, 3))
        torch.testing.assert_close(gradient, factor * (tokens + 1.0)[:, None].expand(-1, 3))


@pytest.mark.parametrize("length", [1, 2, 7, 100, 4096])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_zigzag_deals_every_token_once_and_the_work_evenly(length, size):
    shares = [zigzag(length, size, rank) for rank in range(size)]
    assert sorted(torch.cat(shares).tolist()) == list(range(length))
    assert all(share.tolist() == sorted(share.tolist()) for share in shares)
    if length == 4096:
        seen = [int((share + 1).sum()) for share in shares]  # keys that the queries of a process see
        assert max(seen) < 1.1 * min(seen)


def test_a_run_of_two_processes_on_each_batch_is_that_of_one(tiny_target_dir, tmp_path):
    """The trainer: rows, normalisers, clipping, schedule."""
    data = write_conversations(tmp_path / "rows.jsonl", 11)
    options = ("training.batch_size=3", "training.gradient_accumulation_steps=2", "training.context_parallel=2")
    said = launch(tiny_target_dir, data, tmp_path / "two", *options)
    one = train(small_recipe(tiny_target_dir, data, tmp_path / "one", *options[:2]))
    assert one.steps == 4 and "step 4/4" in said
    for name, tensor in weights(tmp_path / "one", 4).items():
        torch.testing.assert_close(weights(tmp_path / "two", 4)[name], tensor, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["eagle.loss=lk"], "set loss: kl"),
        (["eagle.convention=eagle"], "set convention: served"),
        (["eagle.convention=modelopt", "eagle.in_vocab_only=true"], "set convention: served"),
    ],
)
def test_options_that_look_at_a_whole_batch_are_refused(overrides, says):
    with pytest.raises(RecipeError) as caught:
        load_recipe(None, ["training.context_parallel=2", *overrides])
    assert says in str(caught.value)


def test_too_few_processes_are_refused_before_anything_is_loaded(tiny_target_dir, tmp_path, monkeypatch):
    from modelopt_eagle.training import run

    monkeypatch.setattr(run, "load_target", lambda **_: pytest.fail("the target was loaded"))
    data = write_conversations(tmp_path / "rows.jsonl", 3)
    with pytest.raises(RecipeError, match="there is one process: start a multiple of 2 with accelerate launch"):
        train(small_recipe(tiny_target_dir, data, tmp_path / "run", "training.context_parallel=2"))
