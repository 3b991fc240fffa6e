"""``env`` and ``estimate``."""

import json

import pytest

from modelopt_eagle.cli import env, estimate
from modelopt_eagle.cli.main import run_command
from modelopt_eagle.recipe import load_recipe
from tests.training.runs import write_conversations


def test_env_names_what_a_bug_report_needs(capsys):
    assert run_command("env", ["--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert "torch" in facts["packages"] and "cores" in facts["cpu"] and facts["extra train"] == "installed"
    assert run_command("env", []) == 0
    assert "extra train" in capsys.readouterr().out


def test_env_says_which_module_of_an_extra_is_missing(monkeypatch):
    monkeypatch.setitem(env.EXTRAS, "train", ("accelerate", "no_such_module_at_all"))
    assert env.collect()["extra train"] == "missing no_such_module_at_all"


def test_estimate_counts_what_training_then_finds(tiny_target_dir, tiny_target, tmp_path):
    from modelopt_eagle.training import train

    data = write_conversations(tmp_path / "rows.jsonl", 12)
    recipe = load_recipe(
        None,
        [
            f"model.base_model={tiny_target_dir}", f"data.train_path={data}", "eagle.draft_vocab_size=64",
            "training.batch_size=4", f"training.output_dir={tmp_path / 'run'}", "training.report_to=none",
            "data.cache_features=disk",
        ],
    )  # fmt: skip
    found = estimate.estimate(recipe, estimate.read_rows(recipe))
    result = train(recipe)
    assert found.steps == result.steps == 3
    assert found.target_parameters == sum(p.numel() for p in tiny_target.model.parameters())
    from modelopt_eagle.export import load_draft

    assert found.head_parameters == sum(p.numel() for p in load_draft(tmp_path / "run").parameters())
    stored = sum(file.stat().st_size for file in (tmp_path / "run" / "features").glob("*.safetensors"))
    assert 0.85 * found.feature_bytes < stored < 1.02 * found.feature_bytes  # the rows begin with one template
    written = sum(file.stat().st_size for file in result.last_checkpoint.glob("*.*t*"))
    assert found.checkpoint_bytes == pytest.approx(written, rel=0.2)


def test_estimate_takes_target_and_data_as_train_does(tiny_target_dir, tmp_path, capsys):
    """Another target is estimated under the recipe that training it would take."""
    rows = [{"messages": [{"role": "user", "content": "Say a."}, {"role": "assistant", "content": "a"}]}] * 4
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    given = ["--base_model", str(tiny_target_dir), "--data", str(tmp_path / "rows.jsonl"), "--gflops", "1"]
    assert run_command("estimate", [*given, "data.max_length=64", "eagle.draft_vocab_size=null"]) == 0
    shown = capsys.readouterr().out
    assert "data         4 rows" in shown and "target       0." in shown


def test_estimate_prints_without_weights(tiny_target_dir, tmp_path, capsys):
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_bytes((tiny_target_dir / "config.json").read_bytes())
    command = [
        f"model.base_model={tmp_path / 'config'}",
        "--tokens",
        "1000000",
        "--gflops",
        "100",
        "data.max_length=256",
    ]
    assert run_command("estimate", [*command, "eagle.draft_vocab_size=null"]) == 0
    shown = capsys.readouterr().out
    assert "1,000,000 tokens" in shown and "at least, at 100 GFLOP/s each" in shown


def sizes(target, *options):
    recipe = load_recipe(None, [f"model.base_model={target}", "data.max_length=512", "eagle.draft_vocab_size=64",
                                *options])  # fmt: skip
    return estimate.estimate(recipe, estimate.EvenRows(100, 20_000, 12_000))


def test_time_counts_the_budget_the_warm_up_and_a_measured_rate(tiny_target_dir, capsys):
    command = ["--base_model", str(tiny_target_dir), "--tokens", "60000", "data.max_length=64", "training.epochs=2",
               "eagle.draft_vocab_size=64", "--tokens_per_second", "100"]  # fmt: skip
    assert run_command("estimate", command) == 0
    assert "time         20.0 min at 100 tokens/s, as given\n" in capsys.readouterr().out
    assert run_command("estimate", [*command, "training.time_budget_minutes=5"]) == 0
    assert "ends it after 5.0 min, about 25% of the steps" in capsys.readouterr().out
    whole, warm, one = (sizes(tiny_target_dir, text).head_flops for text in (
        "eagle.ttt_warmup=0", "eagle.ttt_warmup=0.5", "eagle.ttt_steps=1"))  # fmt: skip
    assert warm == pytest.approx((whole + one) / 2)


def test_the_disk_holds_checkpoints_features_and_an_export(tiny_target_dir):
    plain, cached = (sizes(tiny_target_dir, f"data.cache_features={kind}", "training.save_total_limit=2") for kind in (
        "none", "disk"))  # fmt: skip
    assert plain.disk_bytes == 3 * plain.checkpoint_bytes + 2 * plain.head_parameters
    assert cached.disk_bytes == plain.disk_bytes + cached.feature_bytes


def test_what_does_not_fit_is_said_by_the_exit_code(tiny_target_dir, capsys):
    command = ["--base_model", str(tiny_target_dir), "--tokens", "9000", "--gflops", "1", "data.max_length=64",
               "eagle.draft_vocab_size=64", "--memory"]  # fmt: skip
    assert run_command("estimate", [*command, "0.001"]) == 1
    assert "does not fit into 1.0 MiB (as given)" in capsys.readouterr().out
    assert run_command("estimate", [*command, "0.001", "training.ignore_memory=true"]) == 0
    assert run_command("estimate", [*command, "1"]) == 0
    assert "fits         into 1.00 GiB (as given)" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        run_command("estimate", [*command, "-1"])
