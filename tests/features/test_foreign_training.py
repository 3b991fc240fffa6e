"""``modelopt-eagle train`` from the dumps of other tools, as they lie on the disk."""

import json

import pytest
from safetensors.torch import load_file

from modelopt_eagle.cli.main import run_command
from modelopt_eagle.features.dump import TargetBackEnd, dump
from tests.features.test_foreign import AUX, WRITERS, target_states  # noqa: F401 (a fixture)
from tests.training.runs import write_conversations


def train(target_dir, data, output, *overrides):
    return run_command(
        "train",
        [
            "--recipe", "quickstart", f"model.base_model={target_dir}", f"data.offline_data_path={data}",
            f"training.output_dir={output}", "data.cache_features=none", "training.batch_size=4", "training.epochs=1",
            "training.time_budget_minutes=null", "training.report_to=none", "eagle.draft_vocab_size=64",
            "eagle.init=random", *overrides,
        ],
    )  # fmt: skip


def trained(output):
    checkpoint = max(output.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    return load_file(checkpoint / "model.safetensors"), state


@pytest.fixture(scope="module")
def from_store(tiny_target, tiny_target_dir, dataset, tmp_path_factory):
    """Weights and state of a run from our own store."""
    folder = tmp_path_factory.mktemp("own")
    dump(TargetBackEnd(tiny_target, AUX), dataset.rows, folder / "store", dtype="float32")
    assert train(tiny_target_dir, folder / "store", folder / "run", "eagle.aux_layer_ids=1,3,4") == 0
    return trained(folder / "run")


KINDS = {"modelopt": "Model-Optimizer", "specforge": "SpecForge", "specforge-gz": "SpecForge"}
KINDS |= {"speculators": "speculators", "speculators-old": "speculators"}


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_dump_trains_the_head_that_a_store_trains(
    tiny_target_dir, target_states, from_store, tmp_path, capsys, kind  # noqa: F811
):  # fmt: skip
    write, options, normed = WRITERS[kind]
    (tmp_path / "theirs").mkdir()
    write(tmp_path / "theirs", target_states, **options)
    before = sorted(str(path) for path in (tmp_path / "theirs").rglob("*"))
    assert train(tiny_target_dir, tmp_path / "theirs", tmp_path / "run") == 2
    asked = capsys.readouterr().err
    assert f"is a dump of {KINDS[kind]}, which does not say" in asked
    assert "eagle.aux_layer_ids: [a, b, c]" in asked and "data.offline_final_states: normed|pre-norm" in asked
    answers = ["eagle.aux_layer_ids=1,3,4", f"data.offline_final_states={'normed' if normed else 'pre-norm'}"]
    assert train(tiny_target_dir, tmp_path / "theirs", tmp_path / "run", *answers) == 0
    assert f"a dump of {KINDS[kind]}" in capsys.readouterr().err
    ours, theirs = trained(tmp_path / "run"), from_store
    assert ours[1]["step"] == theirs[1]["step"] == 3
    assert ours[1]["history"][-1]["loss"] == pytest.approx(theirs[1]["history"][-1]["loss"], rel=1e-3)
    assert (ours[0]["d2t"] == theirs[0]["d2t"]).all()
    assert before == sorted(str(path) for path in (tmp_path / "theirs").rglob("*"))  # nothing is written there


def test_answers_to_what_is_known_are_refused(tiny_target, tiny_target_dir, dataset, tmp_path, capsys):
    dump(TargetBackEnd(tiny_target, AUX), dataset.rows, tmp_path / "store")
    assert train(tiny_target_dir, tmp_path / "store", tmp_path / "run", "data.offline_final_states=normed") == 2
    assert "is a feature store, which says itself what it holds" in capsys.readouterr().err
    assert run_command("train", ["data.offline_final_states=normed"]) == 2
    assert "offline_final_states speaks of another tool's dump: set offline_data_path" in capsys.readouterr().err
    skipping = ["data.offline_data_path=x", "data.on_missing=skip", "data.offline_all_supervised=true"]
    assert run_command("train", skipping) == 2
    assert "leave on_missing at fail" in capsys.readouterr().err


def test_estimate_reads_a_dump(tiny_target_dir, target_states, dataset, tmp_path, capsys):  # noqa: F811
    write, options, _ = WRITERS["specforge-gz"]
    write(tmp_path, target_states, **options)
    command = [f"model.base_model={tiny_target_dir}", f"data.offline_data_path={tmp_path}", "data.cache_features=none",
               "eagle.draft_vocab_size=64"]  # fmt: skip
    assert run_command("estimate", ["--gflops", "10", *command]) == 0
    tokens = sum(dataset.lengths)
    assert f"{len(dataset.rows)} rows, {tokens:,} tokens" in capsys.readouterr().out
    short = max(row.prompt_length for row in dataset.rows) + 3
    kept = [row for row in dataset.rows[:7] if any(row.supervised[:short])]
    cut = [f"data.max_length={short}", "data.max_rows=7"]  # what training would use of it
    assert run_command("estimate", ["--gflops", "10", *command, *cut]) == 0
    tokens = sum(min(len(row.input_ids), short) for row in kept)
    assert f"{len(kept)} rows, {tokens:,} tokens" in capsys.readouterr().out


def test_estimate_reads_the_data_of_a_store_that_is_yet_to_be_filled(tiny_target_dir, tmp_path, capsys):
    data = write_conversations(tmp_path / "rows.jsonl", 5)
    command = [f"model.base_model={tiny_target_dir}", f"data.offline_data_path={tmp_path / 'store'}",
               f"data.train_path={data}", "data.cache_features=none", "data.on_missing=generate",
               "eagle.draft_vocab_size=64"]  # fmt: skip
    assert run_command("estimate", ["--gflops", "10", *command]) == 0
    assert "5 rows, " in capsys.readouterr().out
    assert not (tmp_path / "store").exists()
