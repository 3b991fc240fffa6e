"""A head that is declared wrongly drafts badly; ``diagnose`` names the convention under which it drafts well."""

import json

import pytest
import torch

from modelopt_eagle.cli.main import run_command
from modelopt_eagle.data.prompts import Prompt
from modelopt_eagle.draft import DraftConfig, DraftVocab, EagleModule
from modelopt_eagle.draft.peagle.config import PEagleConfig
from modelopt_eagle.draft.peagle.module import PEagleModule
from modelopt_eagle.errors import DecodingError
from modelopt_eagle.export import export_checkpoint
from modelopt_eagle.target.tiny import make_tiny_target
from modelopt_eagle.validation.diagnose import answers_of, changed, diagnose, remapped, table_variants
from modelopt_eagle.validation.dialogues import first_turn
from tests.decoding.heads import learn_answers

PROMPTS = [Prompt(f"p{n}", "all", (f"Count to {n}.",)) for n in range(6)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A target and a head that knows its answers, with layers, map and rotary base of its own."""
    target = make_tiny_target(tmp_path_factory.mktemp("diagnose") / "target")
    torch.manual_seed(3)
    config = DraftConfig.from_target(target.config, draft_vocab_size=248, aux_layer_ids=(1, 4, 6))
    head = EagleModule(config, DraftVocab.from_target_ids(torch.arange(2, 250), 256))  # a map that can be shifted
    encoded = [answer.ids[0, : int(answer.supervised[0].int().argmax())].tolist()
               for answer in answers_of(target, PROMPTS, [1], 4)]  # fmt: skip
    return target, learn_answers(target, head, encoded, length=40, updates=90)


def wrong_layers(head):
    return changed(head, aux_layer_ids=(2, 5, 7))


def wrong_map(head):
    return remapped(head, head.target_ids - 1)


def wrong_residual(head):
    return changed(head, norm_before_residual=True)


def wrong_output(head):
    return changed(head, norm_output=True)


WRONG = [
    (wrong_layers, "layers one lower", "--aux-layer-ids 1,4,6"),
    (wrong_map, "the map one token on", "take d2t from the training checkpoint"),
    (wrong_residual, "norm_before_residual false", "--norm-before-residual false"),
    (wrong_output, "norm_output false", "declare norm_output false"),
]


def test_a_head_declared_rightly_is_let_be(trained):
    target, head = trained
    found = diagnose(target, head, PROMPTS, max_new_tokens=40)
    assert found.best is None and found.declared.acceptance_length > 1.5
    assert "no convention that was tried beats" in found.text()
    assert all(walk.steps for walk in found.results.values()) and len(found.results) > 12


@pytest.mark.parametrize(("spoil", "name", "mends"), WRONG)
def test_a_wrong_convention_is_named(trained, spoil, name, mends):
    target, head = trained
    found = diagnose(target, spoil(head), PROMPTS, max_new_tokens=40)
    assert found.best == name, found.text()
    assert mends in found.text().splitlines()[-1]
    assert found.results[name].accepted == diagnose(target, head, PROMPTS, max_new_tokens=40).declared.accepted


def test_other_rotary_tables_are_tried(trained):
    target, head = trained
    wrong = changed(head, rope_theta=77.0, rope_scaling={"rope_type": "linear", "factor": 2.0})
    names = [variant.name for variant in table_variants(wrong, target.config)]
    assert "rotary table: the target's" in names and "rotary table: unscaled" in names
    found = diagnose(target, wrong, PROMPTS, max_new_tokens=40)
    right = found.results["rotary table: the target's"]
    assert right.accepted == diagnose(target, head, PROMPTS, max_new_tokens=40).declared.accepted


def test_the_command_says_how_to_mend_it(trained, tmp_path, capsys):
    target, head = trained
    head.config.tokenizer_hash = None
    export_checkpoint(wrong_layers(head), None, tmp_path / "head")
    (tmp_path / "prompts.jsonl").write_text(
        "\n".join(json.dumps({"id": p.id, "category": "all", "turns": list(p.turns)}) for p in PROMPTS)
    )
    given = ["--model_path", tmp_path / "head", "--base_model", target._source, "--prompts", tmp_path / "prompts.jsonl",
             "--max_new_tokens", "40", "--json", tmp_path / "out/found.json"]  # fmt: skip
    given = [str(part) for part in given]
    assert run_command("diagnose", given) == 1
    assert "under 'layers one lower'" in capsys.readouterr().out
    assert json.loads((tmp_path / "out/found.json").read_text())["best"] == "layers one lower"
    assert run_command("diagnose", [*given, "--aux-layer-ids", "1,4,6"]) == 0
    assert run_command("diagnose", [*given, "--num_steps", "0"]) == 2
    assert "--num_steps must be at least 1" in capsys.readouterr().err


def test_a_map_that_is_none_is_not_tried(trained):
    _, head = trained
    assert remapped(head, head.target_ids.flip(0)) is None
    assert torch.equal(remapped(head, head.target_ids).d2t, head.d2t)


def test_other_heads_are_refused(trained):
    target, _ = trained
    masked = PEagleModule(PEagleConfig.from_target(target.config, mask_token_id=3))
    for other in (torch.nn.Linear(2, 2), masked):
        with pytest.raises(DecodingError, match="conventions of EAGLE-3 heads"):
            diagnose(target, other, PROMPTS)


def test_prompts_are_those_of_a_validation(trained):
    """Rendered with all that a prompt brings, not its first words alone."""
    target, _ = trained
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {}}}
    template = target.tokenizer.chat_template
    try:
        target.tokenizer.chat_template = "{{ tools | length if tools else 'no' }} tools, {{ mood }} " + template
        prompt = Prompt("p", "all", ("And now?",), system="Be brief.", tools=(tool,), template_arguments={"mood": "up"})
        (answer,) = answers_of(target, [prompt], [1], 4)
        asked = answer.ids[0, : int(answer.supervised[0].int().argmax())].tolist()
        assert asked == first_turn(target, prompt)
    finally:
        target.tokenizer.chat_template = template
    assert target.tokenizer.decode(asked).startswith("1 tools, up ")
