"""A target that two gloo processes hold together, against whole copies and against one process."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import GPT2Config, GptOssConfig, LlamaConfig

from modelopt_eagle.cli.dump import main as dump
from modelopt_eagle.errors import RecipeError, TargetError
from modelopt_eagle.features.store import StoreReader
from modelopt_eagle.pipeline import why_unmeasured
from modelopt_eagle.target import load_target
from modelopt_eagle.target.split import layer_shares, weight_bytes
from modelopt_eagle.training import placement, train
from tests.training.runs import small_recipe, write_conversations
from tests.training.split_processes import recipe
from tests.training.test_distributed import launch

SCRIPT = Path(__file__).with_name("split_processes.py")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """11 rows: with one row a batch the second process has nothing in its last micro-batch."""
    return write_conversations(tmp_path_factory.mktemp("data") / "rows.jsonl", 11)


@pytest.fixture(scope="module")
def folder(tiny_target_dir, data, tmp_path_factory):
    """Where two processes have run everything of the script."""
    folder = tmp_path_factory.mktemp("split")
    launch(tiny_target_dir, data, folder, script=SCRIPT)
    return folder


@pytest.fixture(scope="module")
def found(folder):
    """What each of the two processes found."""
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in (0, 1)]


def weights(run):
    return load_file(run / "checkpoint-6" / "model.safetensors")


def test_a_split_target_gives_the_states_of_a_whole_one(found):
    for states in (found[0]["states"], found[1]["states"]):
        assert states["same"] and states["logits"] and states["identity"] and states["ends"]


def test_a_target_in_tensor_parts_gives_the_states_of_a_whole_one(found):
    """Sums of parts are rounded in another order."""
    for parts in (part["parts"] for part in found):
        assert 0 < parts["difference"] < 1e-5
        assert parts["identity"] and parts["ends"] and parts["last"]


def test_a_process_runs_its_own_rows_though_each_computes_a_part_of_every_pass(found):
    """Two texts of the two and one that both asked for, which is run once."""
    for parts in (part["parts"] for part in found):
        assert parts["own"]["difference"] < 1e-5 and parts["own"]["passes"] == 3
    assert all(part["states"]["own"] == {"difference": 0.0, "passes": 2} for part in found)


def test_tensor_parts_of_the_layers_are_half_but_for_the_norms(found):
    norms = 8 * 2 * 64 * 4  # bytes, of eight layers
    for parts in (part["parts"] for part in found):
        own, whole = parts["layers"]
        assert own - norms == (whole - norms) // 2
        assert parts["memory"] == own - norms  # no part is a view that keeps its whole


def test_families_with_biases_experts_and_images_give_their_states_in_tensor_parts(found):
    for part in found:
        assert set(part["families"]) == {"phi", "qwen3_moe", "gpt_neox", "gemma3 with images"}
        for worst, share in part["families"].values():
            assert worst < 1e-5 and 0.5 < share < 0.52


def test_a_plan_that_is_wrong_for_its_family_is_refused_at_load(found):
    for part in found:
        broken, other = part["wrong"]
        assert "transformers' plan of tensor parallelism for LlamaForCausalLM does not run over 2 processes" in broken
        assert "LlamaForCausalLM changes what layer 0 gives" in other and "model.parallel: fsdp" in other


def test_each_process_holds_half_of_the_layers(found):
    for states in (found[0]["states"], found[1]["states"]):
        own, whole = states["layers"]
        assert own * 2 == whole
        assert states["model"] == [own + 2 * 256 * 64 * 4 + 64 * 4, whole + 2 * 256 * 64 * 4 + 64 * 4]  # tables, norm


def test_processes_with_unequal_passes_leave_together(found):
    assert [part["states"]["uneven"] for part in found] == [3, 1]
    assert [part["parts"]["uneven"] for part in found] == [3, 1]


@pytest.mark.parametrize("kind", ["states", "parts"])
def test_a_failure_in_one_process_is_told_by_all(found, kind):
    first, second = (part[kind]["failed"] for part in found)
    assert second == "row 7 is broken"
    assert first == "process 1 failed, so all end: EagleError: row 7 is broken"


def test_training_with_a_split_target_is_training_with_copies(folder, found):
    """Bit for bit: the layers are gathered whole before they run."""
    copies, split = weights(folder / "whole"), weights(folder / "split")
    assert all(torch.equal(copies[key], split[key]) for key in copies)
    whole, ours = found[0]["whole"], found[0]["split"]
    assert [entry["loss"] for entry in ours["history"]] == [entry["loss"] for entry in whole["history"]]
    assert ours["evaluations"] == whole["evaluations"]


@pytest.fixture(scope="module")
def one(tiny_target_dir, data, tmp_path_factory):
    """The same training in one process: where it lies, and its result."""
    folder = tmp_path_factory.mktemp("one") / "run"
    return folder, train(recipe(tiny_target_dir, data, folder, "training.gradient_accumulation_steps=4"))


def assert_as_one(ours, entry, one, close=1e-5, learned=1e-5):
    """Losses, weights and evaluation of a run of two processes are those of one.

    Adam divides a gradient by its own size: where sums are in another order, weights may be apart by more than losses.
    """
    run, theirs = one
    for found, wanted in zip(entry["history"], theirs.history, strict=True):
        assert found["loss"] == pytest.approx(wanted["loss"], abs=close)
    for name, tensor in weights(run).items():
        torch.testing.assert_close(weights(ours)[name], tensor, rtol=learned, atol=learned, msg=name)
    last, wanted = entry["evaluations"][-1], theirs.evaluations[-1]
    assert last["acceptance_length"] == wanted["acceptance_length"]
    assert last["drawn_length"] == pytest.approx(wanted["drawn_length"], abs=close)


def test_training_with_tensor_parts_is_training_in_one_process(folder, found, one):
    assert_as_one(folder / "tensor", found[0]["tensor"], one, learned=1e-4)


def test_a_stopped_run_with_tensor_parts_goes_on_bit_for_bit(folder, found):
    whole, resumed = weights(folder / "tensor"), weights(folder / "stopped")
    assert found[0]["stopped"] == 3 and all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.parametrize(("name", "more"), [("shared", ()), ("adapted", ("target_lora.rank=2",))])
def test_processes_that_share_each_batch_train_as_one(folder, found, tiny_target_dir, data, tmp_path, name, more):
    """The target runs a row in tensor parts, over the heads; or with adapters, whole in each process."""
    run = tmp_path / "run"
    alone = train(recipe(tiny_target_dir, data, run, "training.max_steps=6", *more))
    assert_as_one(folder / name, found[0][name], (run, alone), close=1e-4, learned=1e-4)
    assert "each batch is shared by 2" in "".join(found[0][name]["header"])


@pytest.fixture(scope="module")
def workers(tiny_target_dir, data, tmp_path_factory):
    """A store that two workers with copies have filled, one after the other."""
    store = tmp_path_factory.mktemp("workers") / "store"
    for worker in ("0/2", "1/2"):
        options = ["--output-dir", str(store), "--shard", worker, "--dtype", "float32"]
        assert dump(["--model", str(tiny_target_dir), "--input-file", str(data), *options]) == 0
    return StoreReader(store)


@pytest.mark.parametrize(("kind", "close"), [("fsdp", 0.0), ("none", 0.0), ("tensor", 1e-5)])
def test_processes_dump_a_split_target_as_workers_with_copies(folder, workers, kind, close):
    """Launched processes are workers by themselves; rows alike bit for bit, but for the order of sums."""
    store = StoreReader(folder / f"dump-{kind}")
    assert store.contract == workers.contract and store.dataset_hash == workers.dataset_hash
    assert list(store.indices) == list(workers.indices) == list(range(11))
    assert len(list((folder / f"dump-{kind}").glob("manifest*.json"))) == 2
    for number in range(11):
        ours, theirs = store.row(number), workers.row(number)
        for name in ("aux_hidden", "final_hidden", "input_ids", "target_top1", "target_logsumexp"):
            found, wanted = getattr(ours, name), getattr(theirs, name)
            torch.testing.assert_close(found, wanted, rtol=0, atol=close * float(wanted.abs().max()))


@pytest.mark.parametrize(
    ("options", "processes", "says"),
    [
        (["--parallel", "tensor"], 1, "--parallel tensor splits the target over processes, and there is one"),
        (["--shards", "2"], 2, "--shards says how many processes hold a split target: give --parallel"),
        (["--parallel", "fsdp", "--shards", "3"], 4, "--shards is 3, and there are 4 processes"),
        (["--parallel", "fsdp", "--device", "cuda:1"], 2, "each process takes its own device"),
        (["--shard", "0/2"], 2, "so does its place among the 2 processes that were launched"),
    ],
)
def test_a_dump_that_cannot_be_split_so_is_refused_in_a_line(tmp_path, monkeypatch, capsys, options, processes, says):
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    assert dump(["--model", "no-such", "--input-file", "d", "--output-dir", str(tmp_path / "s"), *options]) == 2
    assert says in capsys.readouterr().err and not (tmp_path / "s").exists()


def test_two_processes_fill_a_store_by_a_split_target_with_unequal_shares(folder, found):
    """Six rows and five; the batches are others than in the step, so the last bits may differ."""
    stored = found[0]["stored"]["history"]
    assert [entry["loss"] for entry in stored] == pytest.approx(
        [entry["loss"] for entry in found[0]["whole"]["history"]], abs=1e-5
    )
    shares = [json.loads(path.read_text()) for path in (folder / "stored" / "features").glob("manifest*.json")]
    assert sorted(len(shard["indices"]) for share in shares for shard in share["shards"]) == [5, 6]


def test_training_with_a_split_target_is_training_in_one_process(folder, found, one):
    assert_as_one(folder / "split", found[0]["split"], one)


def test_the_header_says_how_the_target_lies(found):
    (line,) = [line for line in found[0]["split"]["header"] if line.startswith("processes")]
    assert line == (
        "processes: 2 on cpu, each with the whole head; the target is split by FSDP2 over 2 "
        "(0.7 MiB of 1.3 MiB in each)"
    )
    (line,) = [line for line in found[0]["tensor"]["header"] if line.startswith("processes")]
    assert "the target is split by tensor parallelism over 2 (0.7 MiB of 1.3 MiB in each)" in line


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("--fail-at", "process 1 failed, so all end: FeatureError: row 7 is broken"),
        ("--die-at", "another process of this run has ended, so this one ends too"),
    ],
)
def test_a_process_that_fails_ends_the_other_with_one_message(tiny_target_dir, data, tmp_path, how, says):
    """Its own error, or where it is gone without a word, that; and no traceback."""
    more = ("training.batch_size=1", "model.parallel=fsdp")
    said = launch(tiny_target_dir, data, tmp_path / "run", how, 3, *more, well=False)
    assert said.count(f"refused: {says}") == 1, said
    assert "RuntimeError" not in said and "Connection" not in said


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("data.offline_data_path=store",), "takes its features from elsewhere"),
        (("data.offline_data_path=store", "data.on_missing=generate"), "fill the store by `modelopt-eagle dump`"),
        (("target_lora.rank=4",), "set target_lora.rank: 0"),
        (("model.device=cuda:1",), "model.device is cuda:1: set auto"),
    ],
)
def test_what_a_split_target_cannot_do_is_refused_in_the_recipe(tmp_path, more, says):
    for kind in ("fsdp", "tensor"):
        with pytest.raises(RecipeError, match=f"model.parallel: {kind}.*{says}"):
            small_recipe("quickstart", "d", tmp_path, f"model.parallel={kind}", *more)


class Launched:
    """What an accelerator says to one of two processes."""

    num_processes, device = 2, torch.device("cpu")

    def reduce(self, tensor, how):
        return tensor * 2


def test_auto_splits_what_does_not_fit_each_process(tiny_target_dir, tmp_path, monkeypatch):
    """The tiny target takes 1.3 MiB, its head in training 0.9 MiB."""
    made = []
    monkeypatch.setattr(placement.Shards, "make", lambda *given: made.append(given) or "shards")
    monkeypatch.setattr(placement, "device_memory", lambda device, processes: 3 * 2**20)
    chosen = placement.place_target(small_recipe(tiny_target_dir, "d", tmp_path), Launched())
    assert chosen.shards is None and not made
    assert chosen.reason == "a copy takes 1.3 MiB and the head 0.9 MiB of 3.0 MiB each, of which 80% may be used"
    chosen = placement.place_target(small_recipe(tiny_target_dir, "d", tmp_path, "model.shards=2"), Launched())
    assert chosen.reason.endswith("may be used, so model.shards: 2 has no effect")
    monkeypatch.setattr(placement, "device_memory", lambda device, processes: 2 * 2**20)
    assert placement.place_target(small_recipe(tiny_target_dir, "d", tmp_path), Launched()).shards == "shards"
    assert made == [("fsdp", 2, "cpu")]
    adapted = placement.place_target(small_recipe(tiny_target_dir, "d", tmp_path, "target_lora.rank=2"), Launched())
    assert adapted.shards is None and adapted.reason.endswith("and target_lora needs it whole")
    with pytest.raises(RecipeError, match="model.shards is 3, and there are 2 processes"):
        placement.place_target(small_recipe(tiny_target_dir, "d", tmp_path, "model.shards=3"), Launched())


def test_a_target_that_does_not_fit_the_first_process_is_not_measured(tiny_target_dir, tmp_path, monkeypatch):
    recipe = small_recipe(tiny_target_dir, "d", tmp_path)
    assert why_unmeasured(recipe) is None
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert why_unmeasured(recipe) is None
    monkeypatch.setattr(placement, "device_memory", lambda device, processes: 2**20 // processes)
    assert "a copy takes 1.3 MiB and the head 0.2 MiB of 1.0 MiB here" in why_unmeasured(recipe)
    assert why_unmeasured(small_recipe(tiny_target_dir, "d", tmp_path, "validation.mode=none")) is not None


def test_quantised_weights_are_not_split(tiny_target_dir, tmp_path):
    folder = tmp_path / "quantised"
    shutil.copytree(tiny_target_dir, folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(TargetError, match=r"is quantised \(fp8\), and such weights are not split"):
        load_target(folder, shards="two")
    fits, why = placement.whole_fits(small_recipe(folder, "d", tmp_path), torch.device("cpu"))
    assert fits and "quantised" in why


def test_one_process_splits_nothing(tiny_target_dir, data, tmp_path):
    with pytest.raises(RecipeError, match="model.parallel: fsdp splits the target over processes, and there is one"):
        train(small_recipe(tiny_target_dir, data, tmp_path, "model.parallel=fsdp"))
    with pytest.raises(RecipeError, match="model.parallel is none: leave it out"):
        small_recipe("quickstart", "d", tmp_path, "model.parallel=none", "model.shards=2")


def test_bytes_of_a_target_count_tied_tables_once_and_know_its_largest_layer():
    """Both are counted without weights: the tables of a tied target are one, layers differ where some have experts."""
    sizes = dict(vocab_size=96, hidden_size=32, intermediate_size=200, num_hidden_layers=6, num_attention_heads=4,
                 num_key_value_heads=2, head_dim=8)  # fmt: skip
    tied, own = (transformers.LlamaConfig(**sizes, tie_word_embeddings=tie) for tie in (True, False))
    kind = transformers.AutoModelForCausalLM
    assert weight_bytes(kind, own, torch.bfloat16) - weight_bytes(kind, tied, torch.bfloat16) == 2 * 96 * 32
    mixed = transformers.Qwen3MoeConfig(**sizes, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
                                        mlp_only_layers=[2])  # fmt: skip
    model = kind.from_config(mixed)
    layers = [sum(p.numel() for p in layer.parameters()) for layer in model.model.layers]
    assert max(layers) == layers[2] > layers[0]
    assert layer_shares(kind, mixed) == (sum(layers), layers[2], sum(p.numel() for p in model.parameters()))


def config_only(config, folder):
    """A target's folder without weights."""
    config.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("config", "processes", "says"),
    [
        (GPT2Config(n_layer=2, n_embd=32, n_head=2), 2, "no plan of tensor.* for the layers of GPT2LMHeadModel"),
        (GptOssConfig(num_hidden_layers=2, hidden_size=32, intermediate_size=32, num_local_experts=2, vocab_size=64), 2,
         "no plan of tensor.* for the layers of GptOssForCausalLM"),
        (LlamaConfig(num_hidden_layers=2, hidden_size=48, num_attention_heads=6, num_key_value_heads=3, vocab_size=64),
         2, "num_key_value_heads is 3, which 2 processes cannot share"),
    ],
)  # fmt: skip
def test_what_no_plan_cuts_is_refused_by_name_before_anything_is_loaded(tmp_path, config, processes, says):
    """There are no weights in the folder, and no other process."""
    shards = SimpleNamespace(kind="tensor", size=processes)
    with pytest.raises(TargetError, match=says) as refused:
        load_target(config_only(config, tmp_path / "target"), shards=shards)
    assert "model.parallel: fsdp (of a dump --parallel fsdp)" in str(refused.value)
