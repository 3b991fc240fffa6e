"""What a dump's template is told: arguments and the date are the store's, today and tomorrow."""

import json

import pytest

from modelopt_eagle.cli import dump
from modelopt_eagle.errors import FeatureError
from modelopt_eagle.features import FeatureContract, OfflineSource
from modelopt_eagle.target import chat
from modelopt_eagle.target.tiny import CHATML_TEMPLATE


@pytest.fixture
def given(tiny_target_dir, tmp_path):
    rows = [
        {"messages": [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": f"a{i}"}]}
        for i in range(4)
    ]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    template = tmp_path / "t.jinja"
    template.write_text("{{ strftime_now('%Y-%m-%d') + ('!' if loud else '.') }}" + CHATML_TEMPLATE)
    return ["--model", str(tiny_target_dir), "--input-file", str(tmp_path / "d.jsonl"), "--output-dir",
            str(tmp_path / "store"), "--chat-template", str(template), "--dtype", "float32"]  # fmt: skip


def test_a_store_goes_on_tomorrow_with_the_date_of_today(given, tiny_target, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(chat, "today", lambda: "2026-01-31")
    assert dump.main([*given, "--shard", "0/2"]) == 0
    monkeypatch.setattr(chat, "today", lambda: "2026-02-01")
    assert dump.main([*given, "--shard", "1/2"]) == 0
    source = OfflineSource(tmp_path / "store")
    texts = [tiny_target.tokenizer.decode(source.load([n]).input_ids[0].tolist()) for n in range(len(source.lengths))]
    assert len(texts) == 4 and all(text.startswith("2026-01-31.") for text in texts)
    assert chat.kept_date(tmp_path / "store") == "2026-01-31"


def test_arguments_of_the_template_are_part_of_the_contract(given, tiny_target_dir, tmp_path):
    from modelopt_eagle.target import load_target

    assert dump.main([*given, "--template-arguments", '{"loud": true}']) == 0
    target = load_target(tiny_target_dir, chat_template=given[given.index("--chat-template") + 1])
    chat.set_chat_settings(target.tokenizer, {"loud": True})
    source = OfflineSource(tmp_path / "store", FeatureContract.from_target(target))
    assert "!" in target.tokenizer.decode(source.load([0]).input_ids[0].tolist())
    chat.set_chat_settings(target.tokenizer, {"loud": False})
    with pytest.raises(FeatureError, match="template_hash"):
        OfflineSource(tmp_path / "store", FeatureContract.from_target(target))
