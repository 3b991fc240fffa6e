"""What is said before a run costs anything, what a finished one was trained on, and what its template was told."""

import json

import pytest
import torch

import modelopt_eagle.training.run as run
from modelopt_eagle import train
from modelopt_eagle.data.vocab import required_ids, save_draft_vocab
from modelopt_eagle.draft import DraftVocab
from modelopt_eagle.errors import CheckpointError, DataError, RecipeError, TargetError, TrainingError
from modelopt_eagle.target import chat
from modelopt_eagle.target.identity import tokenizer_hash
from modelopt_eagle.target.tiny import make_byte_tokenizer, make_tiny_target
from modelopt_eagle.training.prechecks import check_read
from tests.training.runs import interrupt_at, small_recipe, write_conversations


@pytest.fixture
def data(tmp_path):
    return write_conversations(tmp_path / "data.jsonl")


def saved_map(folder, tokenizer, ids, size=256):
    t2d = torch.zeros(size, dtype=torch.bool)
    t2d[list(ids)] = True
    d2t = t2d.nonzero().squeeze(-1) - torch.arange(len(set(ids)))
    return save_draft_vocab(folder, DraftVocab(d2t, t2d), {"tokenizer_hash": tokenizer_hash(tokenizer)})


@pytest.mark.parametrize("key", ["data.train_path", "data.eval_path", "data.offline_data_path"])
def test_a_misspelt_path_is_found_before_the_target_is_loaded(tiny_target_dir, data, tmp_path, monkeypatch, key):
    monkeypatch.setattr(run, "load", lambda *arguments: pytest.fail("the target was loaded"))
    wrong = tmp_path / "no" / "such.jsonl"
    with pytest.raises((DataError, RecipeError), match="no such file|is no folder"):
        train(small_recipe(tiny_target_dir, data, tmp_path / "run", f"{key}={wrong}"), quiet=True)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["eagle.draft_vocab_size=null", "eagle.min_vocab_coverage=0.5"], "eagle.min_vocab_coverage speaks of a part"),
        (["eagle.draft_vocab_size=null", "eagle.in_vocab_only=true"], "eagle.in_vocab_only speaks of a part of the"),
        (["export.layer_names=layers", "eagle.num_layers=2"], "one-layer heads, and eagle.num_layers is 2"),
        (["export.layer_names=layers", "algorithm=dflash"], "speaks of EAGLE-3's names, and dflash has its own"),
        (
            ["data.streaming_server_url=http://h:1", "validation.mode=none", "model.attn_implementation=eager"],
            "this run reads its tables only",
        ),
        (["model.shards=2"], "model.shards is 2, which says how many processes hold a split target, and there is one"),
    ],
)
def test_keys_that_nothing_would_read_are_refused_before_the_target_is_loaded(
    tiny_target_dir, data, tmp_path, monkeypatch, keys, said
):
    monkeypatch.setattr(run, "load", lambda *arguments: pytest.fail("the target was loaded"))
    with pytest.raises(RecipeError, match=said):
        train(small_recipe(tiny_target_dir, data, tmp_path / "run", *keys), quiet=True)


def test_keys_that_are_read_are_none_of_these(tiny_target_dir):
    for keys in (
        ["eagle.in_vocab_only=true", "eagle.min_vocab_coverage=0.5"],
        ["export.layer_names=layers", "model.attn_implementation=eager"],
        ["data.streaming_server_url=http://h:1", "model.attn_implementation=eager"],
    ):
        check_read(small_recipe(tiny_target_dir, "d", "run", *keys))


@pytest.mark.parametrize("key", ["eagle.draft_vocab_size=300", "eagle.aux_layer_ids=[1, 3, 9]"])
def test_sizes_that_the_config_contradicts_are_found_before_the_weights_are_loaded(
    tiny_target_dir, data, tmp_path, monkeypatch, key
):
    monkeypatch.setattr(run, "load", lambda *arguments: pytest.fail("the target was loaded"))
    with pytest.raises(
        (CheckpointError, TargetError), match=r"\(300\) is larger than .* \(256\)|layer ids from 0 to 7"
    ):
        train(small_recipe(tiny_target_dir, data, tmp_path / "run", key), quiet=True)


def test_a_map_of_other_data_stops_the_run(tiny_target_dir, tiny_target, data, tmp_path):
    path = saved_map(tmp_path / "map", tiny_target.tokenizer, [0, 1, 2, 3, *range(180, 240)])
    recipe = small_recipe(tiny_target_dir, data, tmp_path / "run", f"eagle.draft_vocab_path={path}")
    with pytest.raises(RecipeError, match=r"only \d+\.\d+% of the supervised tokens are inside.*min_vocab_coverage"):
        train(recipe, quiet=True)


def test_no_counted_position_stops_the_run(tiny_target_dir, data, tmp_path, monkeypatch):
    nothing = lambda step, batch, generator: torch.zeros(step.depths, dtype=torch.int64)  # noqa: E731
    monkeypatch.setattr(run.TrainingStep, "count_positions", nothing)
    with pytest.raises(TrainingError, match="no position was counted in 2 steps"):
        train(small_recipe(tiny_target_dir, data, tmp_path / "run"), quiet=True)


def test_a_map_that_was_replaced_is_noticed(tiny_target_dir, tiny_target, data, tmp_path, monkeypatch):
    path = saved_map(tmp_path / "map", tiny_target.tokenizer, [0, 1, 2, 3, *range(30, 130)])
    recipe = small_recipe(tiny_target_dir, data, tmp_path / "run", f"eagle.draft_vocab_path={path}",
                          "eagle.draft_vocab_size=null")  # fmt: skip
    with monkeypatch.context() as patched:
        interrupt_at(patched, 3)
        assert not train(recipe, quiet=True).finished
    saved_map(tmp_path / "map", tiny_target.tokenizer, [0, 1, 2, 3, *range(31, 131)])
    with pytest.raises(CheckpointError, match="vocabulary: "):
        train(recipe, quiet=True)


def test_a_finished_run_notices_that_its_data_changed(tiny_target_dir, data, tmp_path):
    recipe = small_recipe(tiny_target_dir, data, tmp_path / "run", "training.max_steps=1")
    assert train(recipe, quiet=True).finished and train(recipe, quiet=True).finished
    write_conversations(data, 25)
    with pytest.raises(CheckpointError, match=r"training there is complete.*data\.jsonl changed since"):
        train(recipe, quiet=True)


def test_placeholders_of_a_tokenizer_are_not_required(tmp_path):
    tokenizer = make_byte_tokenizer()
    before = required_ids(tokenizer, 8000)
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<unused{i}>" for i in range(3000)]})
    assert required_ids(tokenizer, 8000) == before == [0, 1, 2, 3]
    counts = torch.zeros(8000, dtype=torch.int64)
    counts[400] = 1
    assert required_ids(tokenizer, 8000, [7], counts) == [0, 1, 2, 3, 7, 400]
    tokenizer.chat_template += "<unused5>"
    assert tokenizer.convert_tokens_to_ids("<unused5>") in required_ids(tokenizer, 8000)


def test_a_vocabulary_too_small_is_refused_before_features(tiny_target_dir, data, tmp_path):
    with pytest.raises(RecipeError, match="eagle.draft_vocab_size is 3, and 4 special and end tokens"):
        train(small_recipe(tiny_target_dir, data, tmp_path / "run", "eagle.draft_vocab_size=3"), quiet=True)


def test_rows_are_cut_at_the_targets_own_window(tmp_path, data, capsys):
    make_tiny_target(tmp_path / "short", max_positions=48)
    train(small_recipe(tmp_path / "short", data, tmp_path / "run", "training.max_steps=1"))
    said = "".join(capsys.readouterr())
    assert "truncated at 48 tokens (the target's own window)" in said


def test_too_little_of_the_data_stops_the_run(tiny_target_dir, data, tmp_path):
    recipe = small_recipe(tiny_target_dir, data, tmp_path / "run", "data.max_length=60", "data.overlong=drop",
                          "data.min_used_share=0.9")  # fmt: skip
    with pytest.raises(DataError, match=r"only \d+ of 24 rows are used .*data.min_used_share: 0.9.*too_long"):
        train(recipe, quiet=True)


def test_arguments_and_date_are_the_runs_own(tiny_target_dir, tmp_path, data, monkeypatch):
    from modelopt_eagle.export import load_draft
    from modelopt_eagle.target.tiny import CHATML_TEMPLATE

    template = "{{ strftime_now('%Y/%m/%d') + ('!' if loud else '.') }}" + CHATML_TEMPLATE
    (tmp_path / "template.jinja").write_text(template)
    recipe = small_recipe(
        tiny_target_dir, data, tmp_path / "run", f"model.chat_template={tmp_path / 'template.jinja'}",
        "data.template_arguments={loud: true}",
    )  # fmt: skip
    monkeypatch.setattr("modelopt_eagle.training.prechecks.today", lambda: "2026-01-31")
    with monkeypatch.context() as patched:
        interrupt_at(patched, 3)
        assert not train(recipe, quiet=True).finished
    monkeypatch.setattr("modelopt_eagle.training.prechecks.today", lambda: "2026-02-01")
    result = train(recipe, quiet=True)  # tomorrow it goes on with the same rows
    extra = load_draft(result.best_checkpoint).config.extra
    assert extra["template_arguments"] == {"loud": True} and extra["template_date"] == "2026-01-31"
    assert chat.kept_date(tmp_path / "run") == "2026-01-31"
    tokenizer = make_byte_tokenizer()
    tokenizer.chat_template = template
    chat.use_chat_record(tokenizer, extra)
    from modelopt_eagle.data import Message, render_text

    assert render_text(tokenizer, [Message("user", "q")], True).startswith("2026/01/31!")
    assert json.loads((tmp_path / "run" / chat.DATE_FILE).read_text()) == {"template_date": "2026-01-31"}
    for broken in ("[1]", "{"):
        (tmp_path / "run" / chat.DATE_FILE).write_text(broken)
        with pytest.raises(DataError, match="template_date.json.*: remove it"):
            chat.kept_date(tmp_path / "run")
