"""The memory that a run is said to need is what it takes."""

import pytest
import torch

from modelopt_eagle.cli.main import run_command
from modelopt_eagle.common.allocations import Allocations, Shapes
from modelopt_eagle.data import plan_batches, prepare_rows
from modelopt_eagle.draft.algorithm import find_algorithm
from modelopt_eagle.draft.attention import QueryPlan, largest_chunk_alone
from modelopt_eagle.errors import TrainingError
from modelopt_eagle.recipe import load_recipe
from modelopt_eagle.target.tiny import make_tiny_target
from modelopt_eagle.training import memory, run, train
from modelopt_eagle.training.course import batch_options
from modelopt_eagle.training.placement import split_share
from tests.training.runs import small_recipe, write_conversations


@pytest.fixture(scope="module")
def target():
    return make_tiny_target(hidden=32, vocab=1024, layers=6, heads=2, kv_heads=1, intermediate=64, max_positions=8192)


def conversations(count, length, share):
    answer = round(length * share)
    return [{"id": f"row-{n}", "messages": [{"role": "user", "content": chr(97 + n) * (length - answer - 60 - 9 * n)},
                                            {"role": "assistant", "content": "a" * answer}]}
            for n in range(count)]  # fmt: skip


def peak_of(recipe, target, rows):
    """What the estimate says."""
    found = prepare_rows(target.tokenizer, rows, name="rows", max_length=recipe.data.max_length).rows
    lengths, supervised = [len(row.input_ids) for row in found], [sum(row.supervised) for row in found]
    shape = memory.heaviest_batch(recipe, lengths, supervised, 1)
    head = find_algorithm(recipe.drafter.algorithm).head_config(recipe, target.model.config,
                                                                recipe.eagle.draft_vocab_size, None)  # fmt: skip
    return memory.estimate_peak(recipe, target.model.config, head, shape)


@pytest.mark.parametrize(
    ("length", "batch", "share", "options"),
    [
        (256, 3, 0.6, ["eagle.ttt_steps=7"]),  # the full vocabulary
        (256, 1, 0.5, ["eagle.ttt_steps=1", "eagle.draft_vocab_size=256", "training.optimizer=muon"]),
        (512, 2, 0.3, ["eagle.ttt_steps=3", "eagle.draft_vocab_size=512", "eagle.num_layers=2"]),  # a deep head
        (4096, 1, 0.05, ["eagle.ttt_steps=2", "eagle.draft_vocab_size=256"]),
        (260, 1, 0.5, ["eagle.draft_vocab_size=256", "training.gradient_accumulation_steps=3"]),
        (900, 4, 0.2, ["eagle.draft_vocab_size=256", "data.cache_features=memory"]),
        (256, 2, 0.4, ["algorithm=peagle", "peagle.depth=4", "eagle.draft_vocab_size=256"]),
        (256, 2, 0.4, ["algorithm=dflash", "eagle.draft_vocab_size=256"]),
        (256, 2, 0.4, ["algorithm=medusa", "eagle.draft_vocab_size=256", "training.precision=bf16"]),
    ],
    ids=["full", "short", "deep", "long", "accumulated", "cached", "peagle", "dflash", "medusa-bf16"],
)
def test_the_estimate_is_what_a_run_allocates(target, tmp_path, length, batch, share, options):
    rows = conversations(2 * batch, length, share)
    recipe = load_recipe(None, [
        f"data.max_length={length}", f"training.batch_size={batch}", "training.max_steps=2", "training.report_to=none",
        f"training.output_dir={tmp_path}", *options,
    ])  # fmt: skip
    with Allocations() as counted:
        for tensor in (*target.model.parameters(), *target.model.buffers()):
            counted.add(tensor)
        train(recipe, target=target, data=rows, quiet=True)
    found = peak_of(recipe, target, rows)
    tokens = sum(size for size, _ in found.shape) * 2
    head = find_algorithm(recipe.drafter.algorithm).head_config(recipe, target.model.config, None, None)
    kept = memory.bytes_kept(recipe, tokens, memory.state_bytes(head), found.shape, "cpu")
    assert found.unknown is None and found.total + kept == pytest.approx(counted.peak, rel=0.15)


def test_storages_are_counted_once_until_they_are_let_go():
    known = torch.zeros(1000)
    with Allocations() as seen:
        view = known[10:]
        made = view + 1
        part = made[5:]
        assert seen.now == 990 * 4
        del made
        assert seen.now == 990 * 4
        del part
        assert (seen.now, seen.peak) == (0, 990 * 4)


def test_shapes_have_no_memory_and_choose_by_masks_that_are_there():
    with Shapes() as seen:
        weight = seen.empty(2**20, 2**20, requires_grad=True)  # 4 TiB
        chosen = weight[torch.tensor([True, False, True] + [False] * (2**20 - 3))]
        assert chosen.shape == (2, 2**20) and bool((chosen > 0).all())
        chosen.sum().backward()
        assert weight.grad.shape == weight.shape and seen.peak > 2 * 4 * 2**40


def test_one_chunk_of_a_plan_is_the_largest():
    rows = torch.arange(300)
    whole = QueryPlan.make(rows, torch.zeros_like(rows)).chunks
    with largest_chunk_alone():
        chunk, again = QueryPlan.make(rows, torch.zeros_like(rows)).chunks
        assert len(QueryPlan.make(rows[:3], torch.zeros_like(rows[:3])).chunks) == 1
    assert chunk == again and chunk in whole and len(whole) > 2
    assert (chunk[1] - chunk[0]) * (chunk[3] - chunk[2]) == max((b - a) * (d - c) for a, b, c, d in whole)


def test_a_run_from_a_store_counts_the_tables_alone(target):
    recipe = load_recipe(None, ["data.offline_data_path=store", "eagle.draft_vocab_size=256"])
    head = find_algorithm("eagle3").head_config(recipe, target.model.config, 256, None)
    found = memory.estimate_peak(recipe, target.model.config, head, ((400, 100), (200, 50)))
    tables = 4 * 32 * (2 * 1024 + 256)  # embedding, output head, its rows for the draft vocabulary
    assert found.target == pytest.approx(tables, rel=0.05) and found.phase != "target"
    two = memory.estimate_peak(recipe, target.model.config, head, ((400, 100), (200, 50)), processes=2)
    assert two.total - found.total == found.head // 4  # gradients in buckets
    ahead = memory.bytes_kept(recipe, 10**6, 100.0, found.shape, "cpu")
    assert ahead == 4 * 100 * 600 and memory.bytes_kept(recipe, 10**6, 100.0, found.shape, "cuda") == 0


@pytest.fixture
def little(monkeypatch):
    monkeypatch.setattr(memory, "SMALL", 0)
    monkeypatch.setattr(memory, "free_memory", lambda device: 2**20)


def test_a_run_that_cannot_fit_is_refused_before_features_are_kept(little, tiny_target, tiny_target_dir, tmp_path):
    data = write_conversations(tmp_path / "rows.jsonl", 12)
    recipe = small_recipe(tiny_target_dir, data, tmp_path / "run", "data.cache_features=disk", "training.max_steps=1")
    with pytest.raises(TrainingError, match=r"MiB, and 1.0 MiB are there: lower .* training.ignore_memory=true"):
        train(recipe)
    assert not list((tmp_path / "run").glob("features*")) and not list((tmp_path / "run").glob("checkpoint-*"))
    forced = small_recipe(tiny_target_dir, data, tmp_path / "run", "data.cache_features=disk", "training.max_steps=1",
                          "training.ignore_memory=true")  # fmt: skip
    result = train(forced)
    assert result.finished and any("MiB of tensors at the peak on each device" in line for line in result.header)


def test_weights_are_counted_in_the_numbers_that_they_are_loaded_in(tiny_target_dir, tmp_path):
    said = []
    for dtype in ("float32", "bfloat16"):
        recipe = small_recipe(tiny_target_dir, "d", tmp_path, f"model.dtype={dtype}")
        with pytest.raises(TrainingError) as caught:
            memory.check_weights(recipe, tiny_target_dir, 1)
        said.append(float(str(caught.value).split("weights take ")[1].split()[0]))
    assert said[0] == pytest.approx(2 * said[1], rel=0.2) and said[1] > 0
    memory.check_weights(small_recipe(tiny_target_dir, "d", tmp_path, "data.streaming_server_url=http://h:1"),
                         tiny_target_dir, 1)  # fmt: skip  # its weights stay where they are


@pytest.mark.parametrize("options", [["training.batch_size=3"], ["training.max_tokens_per_batch=400"]])
def test_the_heaviest_batch_is_looked_for_in_several_epochs(options):
    random = torch.Generator().manual_seed(1)
    lengths = torch.randint(20, 200, (40,), generator=random).tolist()
    supervised = [length // 3 for length in lengths]

    def tokens(epochs):
        recipe = load_recipe(None, [f"training.epochs={epochs}", "data.max_length=256", *options])
        shape = memory.heaviest_batch(recipe, lengths, supervised, 2)
        assert all((length, length // 3) in zip(lengths, supervised, strict=True) for length, _ in shape)
        batches = [[lengths[n] for n in batch] for epoch in range(min(epochs, memory.PLANNED_EPOCHS))
                   for batch in plan_batches(lengths, epoch=epoch, seed=42, shuffle=True,
                                             **batch_options(recipe.training, 1),
                                             **({} if "batch_size" in options[0] else
                                                {"world_size": 2, "supervised": supervised}))]  # fmt: skip
        assert sum(length for length, _ in shape) == max(map(sum, batches))
        return sum(length for length, _ in shape)

    found = [tokens(epochs) for epochs in (1, 2, 4, 9)]
    assert found == sorted(found) and found[2] == found[3]
    if "batch_size" in options[0]:
        assert found[0] < found[2]


def test_weights_that_cannot_fit_are_refused_before_they_are_loaded(tiny_target_dir, tmp_path, monkeypatch):
    data = write_conversations(tmp_path / "rows.jsonl", 4)
    monkeypatch.setattr(run, "free_memory", lambda device: 2**20)
    monkeypatch.setattr(run, "load_target", lambda **arguments: pytest.fail("it was loaded"))
    with pytest.raises(TrainingError, match="the target's weights take .* MiB, and 1.0 MiB are there"):
        train(small_recipe(tiny_target_dir, data, tmp_path / "run"))


def test_a_split_target_is_estimated_in_slices(tiny_target, tiny_target_dir, tmp_path, capsys):
    data = write_conversations(tmp_path / "rows.jsonl", 4)
    layers = [sum(p.numel() for p in layer.parameters()) for layer in tiny_target.parts.layers]
    every = 4 * sum(p.numel() for p in tiny_target.model.parameters())
    recipe = load_recipe(None, [f"model.base_model={tiny_target_dir}", "model.parallel=fsdp"])
    for shards in (2, 4):
        expected = every - 4 * sum(layers) + 4 * sum(layers) / shards + 4 * 2 * max(layers)
        assert split_share(recipe, tiny_target.model.config, every, shards) == pytest.approx(min(every, expected))
    norms = 4 * sum(p.numel() for layer in tiny_target.parts.layers for p in layer.parameters() if p.dim() == 1)
    recipe = load_recipe(None, [f"model.base_model={tiny_target_dir}", "model.parallel=tensor"])
    expected = every - (4 * sum(layers) - norms) / 2  # nothing is gathered, and norms are whole
    assert split_share(recipe, tiny_target.model.config, every, 2) == pytest.approx(expected)
    command = ["--base_model", str(tiny_target_dir), "--data", str(data), "--recipe", "eagle3", "--gflops", "1",
               "--processes", "4", "eagle.draft_vocab_size=64"]  # fmt: skip
    assert run_command("estimate", [*command, "model.parallel=fsdp", "--memory", "1"]) == 0
    assert "split        the target's layers over 4 processes" in capsys.readouterr().out
    shared = [*command, "model.parallel=tensor", "model.shards=2", "--memory", "1"]
    assert run_command("estimate", shared) == 0
    assert "split        the target's layers over 2 processes (tensor parallelism)" in capsys.readouterr().out
    assert run_command("estimate", [*command, "model.shards=3", "--memory", "1"]) == 2
    assert "model.shards is 3, and there are 4 processes" in capsys.readouterr().err
    for kind in ("fsdp", "tensor"):
        assert run_command("estimate", [*command, "--processes", "1", f"model.parallel={kind}"]) == 2
        assert f"model.parallel: {kind} splits the target over processes, and there is one: say how many (--processes" \
            in capsys.readouterr().err  # fmt: skip
    assert run_command("estimate", [*command, "--memory", "1"]) == 0
    assert "split  " not in capsys.readouterr().out  # a copy fits
    assert run_command("estimate", [*command, "--memory", "0.0001"]) == 1
    assert "split  " in capsys.readouterr().out
