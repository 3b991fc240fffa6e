"""What ends an answer is one rule over tokenizer, generation config and config, whoever asks."""

import json
from dataclasses import replace

import pytest

from modelopt_eagle.data import Prompt, prepare_dataset
from modelopt_eagle.decoding import PlainGenerator
from modelopt_eagle.errors import TargetError
from modelopt_eagle.features.dump import EngineBackEnd, TargetBackEnd, dump
from modelopt_eagle.features.store import StoreReader
from modelopt_eagle.recipe import load_recipe
from modelopt_eagle.target import load_target, load_target_tables
from modelopt_eagle.target.stops import find_end_token_ids, read_generation_config
from modelopt_eagle.target.tiny import make_tiny_target
from modelopt_eagle.training.data import from_store, read_data
from modelopt_eagle.validation.synthesis import SynthesisSettings, answer_prompts

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}~{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


class Source:
    def __init__(self, eos_token_id):
        self.eos_token_id = eos_token_id


@pytest.mark.parametrize(
    "sources, ids",
    [
        ([None, None], ()),
        ([Source(2), None, Source(None)], (2,)),
        ([Source(2), Source([7, 5]), Source(5), Source((9,))], (2, 5, 7, 9)),
        ([Source(None), object(), Source(-1)], ()),
    ],
)
def test_all_sources_count(sources, ids):
    assert find_end_token_ids(*sources) == ids


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny target whose three sources disagree: the tokenizer says 2, generation config ~ and }, config ^."""
    path = tmp_path_factory.mktemp("targets") / "disagreeing"
    make_tiny_target(path)
    for name, ids in (("config.json", 0), ("generation_config.json", [1, 2])):
        values = json.loads((path / name).read_text())
        tilde, brace, caret = (load_target(path).tokenizer(c)["input_ids"][0] for c in "~}^")
        (path / name).write_text(json.dumps(values | {"eos_token_id": [tilde, brace] if ids else caret}))
    return path


@pytest.fixture(scope="module")
def ends(folder):
    tokenizer = load_target(folder).tokenizer
    return tuple(sorted([2, *(tokenizer(c)["input_ids"][0] for c in "~}^")]))


def test_the_same_ids_online_offline_streamed_and_dumped(folder, ends, tmp_path):
    target, tables = load_target(folder), load_target_tables(folder)
    assert target.end_token_ids == tables.end_token_ids == ends
    back_ends = TargetBackEnd(target), EngineBackEnd(tables, (1, 3, 4), iter, final_is_normed=True)
    assert {back_end.end_token_ids for back_end in back_ends} == {ends}
    data = tmp_path / "talk.jsonl"
    turns = [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "so"}]
    data.write_text(json.dumps({"messages": turns}) + "\n")
    recipe = load_recipe(None, [f"model.base_model={folder}", f"data.train_path={data}"])
    for loaded in (target, tables):  # online with the target, streamed and from a store with its tables
        loaded.tokenizer.chat_template = TEMPLATE
        (row,) = read_data(recipe, loaded, str(data)).rows
        learned = [token for token, flag in zip(row.input_ids, row.supervised, strict=True) if flag]
        assert loaded.tokenizer.decode(learned) == "so~"  # the end token of the generation config is learned


def test_a_store_keeps_what_it_was_made_with(folder, ends, tmp_path):
    target = load_target(folder)
    turns = [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "so"}]
    (tmp_path / "talk.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    rows = prepare_dataset(target.tokenizer, tmp_path / "talk.jsonl", end_token_ids=target.end_token_ids).rows
    dump(TargetBackEnd(target, (1, 3, 4)), rows, tmp_path / "store", dtype="float32")
    contract = StoreReader(tmp_path / "store").contract
    assert contract.end_token_ids == ends
    assert not contract.differences(replace(contract, end_token_ids=None))
    assert "end_token_ids" in contract.differences(replace(contract, end_token_ids=(2,)))[0]
    recipe = load_recipe(None, [f"model.base_model={folder}", f"data.offline_data_path={tmp_path / 'store'}"])
    said = []
    tables = load_target_tables(folder)
    from_store(recipe, tables, (1, 3, 4), said.append)
    assert not any("stops at" in line for line in said)
    from_store(recipe, replace(tables, end_token_ids=(2,)), (1, 3, 4), said.append)
    assert any(f"end with the tokens {list(ends)}, today's target stops at [2]" in line for line in said)


def test_decoding_stops_at_each_of_them(tmp_path):
    target = make_tiny_target()
    generator = PlainGenerator(target)
    prompts = [[50, 60, 70], [9, 8, 100], [200, 4]]
    free = generator.generate(prompts, 24, eos_token_id=[]).tokens
    said = [next(token for token in row[6:] if token not in row[:6]) for row in free]
    target.model.generation_config.eos_token_id = [said[0]]
    target.model.config.eos_token_id = said[1]
    target.tokenizer.eos_token = target.tokenizer.convert_ids_to_tokens(said[2])
    assert target.end_token_ids == tuple(sorted(said))
    output = generator.generate(prompts, 24)
    for row, answer in zip(free, output.tokens, strict=True):
        assert answer == row[: 1 + next(place for place, token in enumerate(row) if token in said)]
    assert output.finish_reasons == ["eos"] * 3
    assert generator.generate(prompts, 24, eos_token_id=[]).tokens == free  # what a user gives wins
    settings = SynthesisSettings("toy", max_new_tokens=24)
    (answered,) = answer_prompts(generator, [Prompt("q", "", ("why?",))], settings)
    ids = target.tokenizer(answered.messages[-1].content, add_special_tokens=False)["input_ids"]
    assert not set(ids) & set(said)


def test_a_generation_config_that_cannot_be_read_is_said(folder, tmp_path):
    for name in folder.iterdir():
        (tmp_path / name.name).write_bytes(name.read_bytes())
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1')
    for load in (load_target, load_target_tables):
        with pytest.raises(TargetError, match=r"generation_config\.json cannot be read"):
            load(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    assert read_generation_config(tmp_path) is None
    assert load_target(tmp_path).end_token_ids == load_target_tables(tmp_path).end_token_ids


def test_an_error_without_words_is_said_by_its_kind(folder, monkeypatch):
    import transformers

    def refuse(path):
        raise OSError

    monkeypatch.setattr(transformers.GenerationConfig, "from_pretrained", refuse)
    with pytest.raises(TargetError, match=r"generation_config.json cannot be read \(OSError\)"):
        read_generation_config(folder)
