"""Runs that measure nothing, and targets that could not be measured, told before anything is trained."""

import json
from types import SimpleNamespace

import pytest
import transformers

from modelopt_eagle import pipeline
from modelopt_eagle.cli.main import run_command
from modelopt_eagle.decoding.verifiable import refusal
from modelopt_eagle.errors import DecodingError, RecipeError, TargetError
from modelopt_eagle.features.dump import TargetBackEnd, dump
from modelopt_eagle.recipe import load_recipe
from modelopt_eagle.target import Target, load_target, load_target_tables
from modelopt_eagle.training.data import read_data
from tests.training.runs import small_recipe, write_conversations

NONE = "validation.mode=none"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_conversations(tmp_path_factory.mktemp("data") / "rows.jsonl", 12)


@pytest.fixture(scope="module")
def hybrid(tiny_target, tmp_path_factory):
    """A folder whose target keeps a recurrent state in two of its layers."""
    folder = tmp_path_factory.mktemp("hybrid") / "lfm2"
    config = transformers.Lfm2Config(
        vocab_size=tiny_target.vocab_size, hidden_size=32, intermediate_size=48, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, block_multiple_of=8, conv_L_cache=3,
        layer_types=["conv", "conv", "full_attention"] * 2, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    transformers.Lfm2ForCausalLM(config).save_pretrained(folder)
    tiny_target.tokenizer.save_pretrained(folder)
    return folder


def test_a_run_from_a_store_without_validation_never_loads_the_target(
    tiny_target, tiny_target_dir, data, tmp_path, monkeypatch, capfd
):
    plain = small_recipe(tiny_target_dir, data, tmp_path / "run", "training.max_steps=2")
    rows = read_data(plain, tiny_target, str(data)).rows
    dump(TargetBackEnd(tiny_target), rows, tmp_path / "store", dtype="float32")

    def never(*args, **kwargs):
        raise AssertionError("the target was loaded")

    for place in ("modelopt_eagle.target", "modelopt_eagle.training.run", "modelopt_eagle.target.load"):
        monkeypatch.setattr(f"{place}.load_target", never)
    options = [
        "--base_model", str(tiny_target_dir), "--offline_data", str(tmp_path / "store"), "--recipe", "eagle3_offline",
        "--output_dir", str(tmp_path / "run"), "training.max_steps=2", "training.precision=float32",
        "training.report_to=none", "eagle.draft_vocab_size=64", NONE,
    ]  # fmt: skip
    assert run_command("train_and_export", options) == 0
    shown = capfd.readouterr()
    assert "not measured (validation.mode: none)" in shown.out and "processes: 1 on cpu" in shown.err
    assert "Not measured" in (tmp_path / "run" / "export" / "README.md").read_text()
    assert not (tmp_path / "run" / "report" / "acceptance.json").exists()
    state = json.loads((tmp_path / "run" / "checkpoint-2" / "trainer_state.json").read_text())
    assert state["header"][0].startswith("data: ") and any(line.startswith("processes: 1") for line in state["header"])
    assert run_command("train_and_export", options) == 0
    assert "exported already" in capfd.readouterr().err


@pytest.mark.parametrize("more", [[], ["training.dry_run=true"]])
def test_a_target_that_validation_would_refuse_is_said_before_anything_is_loaded(hybrid, data, tmp_path, more):
    recipe = small_recipe(hybrid, data, tmp_path / "run", *more)
    with pytest.raises(RecipeError, match=r"would refuse this target: .*recurrent layers \(conv\).*mode: none"):
        pipeline.run(recipe, quiet=True)
    assert not (tmp_path / "run").exists()


def test_which_settings_are_refused_follows_from_the_target(hybrid, tiny_target_dir):
    def of(folder, *options):
        return refusal(load_recipe(None, [f"model.base_model={folder}", *options]))

    ragged = of(hybrid)
    assert "rows of different lengths" in ragged and ragged.endswith("Set validation.batch_size=1")
    assert "prompts" not in ragged
    assert of(hybrid, "validation.batch_size=1") is None and of(hybrid, NONE) is None
    tree = ["validation.mode=tree", "validation.topk=2", "validation.batch_size=1"]
    assert "cannot verify trees" in of(hybrid, *tree)
    assert of(tiny_target_dir) is None and of(tiny_target_dir, *tree) is None
    with pytest.raises(TargetError):
        of("no/such/folder")


@pytest.mark.parametrize("reason", ["a window of 256 slots", "own code; or unmeasured (validation.mode: none)"])
def test_what_only_the_prompts_tell_ends_with_the_way_out(reason, tmp_path, monkeypatch):
    """Layers with a window read rows of different lengths up to its end; how long the prompts are is known late."""

    def refuse(*args, **kwargs):
        raise DecodingError(reason)

    target = SimpleNamespace(
        identity=lambda: SimpleNamespace(vocab_size=8, tokenizer_hash="t", revision="r"), dtype=None, device="cpu",
        tokenizer=None,
    )  # fmt: skip
    head = SimpleNamespace(config=SimpleNamespace(extra={}), to=lambda device: SimpleNamespace(eval=lambda: None))
    monkeypatch.setattr(pipeline, "measurement_mark", lambda *given: {})
    monkeypatch.setattr(pipeline, "own_adapter", lambda checkpoint: None)
    monkeypatch.setattr("modelopt_eagle.export.load_draft", lambda *given, **named: head)
    monkeypatch.setattr("modelopt_eagle.target.chat.use_chat_record", lambda *given: None)
    monkeypatch.setattr("modelopt_eagle.validation.measure_acceptance", refuse)
    recipe = load_recipe(None, [f"training.output_dir={tmp_path}"])
    result = SimpleNamespace(output_dir=tmp_path, best_checkpoint=tmp_path, seconds=0.0)
    with pytest.raises(DecodingError) as refused:
        pipeline.validate(recipe, result, target)
    assert str(refused.value).startswith(reason) and str(refused.value).count("validation.mode: none") == 1


def test_a_loaded_target_is_asked_itself(hybrid):
    target = load_target(hybrid)
    assert "recurrent layers" in refusal(load_recipe(None, []), target)
    one = load_recipe(None, ["validation.batch_size=1"])
    assert refusal(one, target) is None
    target.model.config._attn_implementation = "flash_attention_2"
    assert "takes no tree mask" in refusal(one, target)


def test_recurrent_layers_with_a_cache_of_their_own_are_told_by_the_loaded_target():
    """MiniMax."""
    sizes = dict(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=6, num_attention_heads=4,
                 num_key_value_heads=2, head_dim=8, num_local_experts=2, num_experts_per_tok=1)  # fmt: skip
    model = transformers.MiniMaxForCausalLM(transformers.MiniMaxConfig(**sizes)).float()
    recipe = load_recipe(None, ["validation.batch_size=1"])
    assert "cannot be run with a cache for them: MiniMax uses cache of its own" in refusal(
        recipe, Target(model, None, name="minimax")
    )


def test_tables_alone_cannot_verify(tiny_target_dir):
    tables = load_target_tables(tiny_target_dir)
    assert "only the target's tables were given" in refusal(load_recipe(None, []), tables)
    assert refusal(load_recipe(None, [NONE]), tables) is None


def test_train_and_estimate_say_it_too(hybrid, data, tmp_path, capfd):
    command = ["--base_model", str(hybrid), "--data", str(data), "--recipe", "eagle3", "eagle.draft_vocab_size=64"]
    assert run_command("estimate", [*command, "--gflops", "10"]) == 0
    assert "validation   refused: " in capfd.readouterr().out
    assert run_command("estimate", [*command, "--gflops", "10", NONE]) == 0
    assert "validation   none: the head would be exported unmeasured" in capfd.readouterr().out
    assert run_command("estimate", [*command, "--gflops", "10", "validation.batch_size=1"]) == 0
    assert "validation   by chain" in capfd.readouterr().out
    more = ["--output_dir", str(tmp_path / "run"), "training.max_steps=1", "training.report_to=none"]
    assert run_command("train", [*command, *more, "training.precision=float32"]) == 0
    assert "could not be measured" in capfd.readouterr().err


def test_a_revision_of_a_local_folder_is_refused(tiny_target_dir):
    with pytest.raises(TargetError, match="is a local folder, which has no revision 'abc'"):
        load_target(tiny_target_dir, revision="abc")


def test_early_stopping_without_rows_to_evaluate_on_is_refused(tiny_target_dir, data, tmp_path, monkeypatch):
    """Before features are made, which may take hours."""
    monkeypatch.setattr("modelopt_eagle.training.data._cached", lambda *given: pytest.fail("features were made"))
    recipe = small_recipe(tiny_target_dir, data, tmp_path, "training.early_stopping=2", "training.eval_steps=2")
    with pytest.raises(RecipeError, match="no row to evaluate on"):
        pipeline.run(recipe, quiet=True)
