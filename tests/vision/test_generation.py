"""Prompts with images in the generator: the target's own text, and drafts accepted as the training's walk says."""

import json
from collections import namedtuple

import pytest
import torch

from modelopt_eagle.data import load_prompts, prepare_dataset
from modelopt_eagle.decoding import PseudoSpeculativeGenerator
from modelopt_eagle.decoding.generator import PlainGenerator
from modelopt_eagle.errors import DataError, DecodingError
from modelopt_eagle.features import FeatureContract, collate
from modelopt_eagle.features.compute import finish_row
from modelopt_eagle.training.acceptance import acceptance_walk
from modelopt_eagle.validation import measure_acceptance
from modelopt_eagle.validation.dialogues import answer_dialogues, prompt_inputs
from tests.vision.tiny_vision import make_step

NEW = 20
Row = namedtuple("Row", "id category input_ids supervised")


@pytest.fixture
def prompts(target, mixed):
    """``(ids, inputs)`` of the rows with images up to their first answer behind the last image."""
    made = []
    for row in prepare_dataset(target.tokenizer, mixed, vision=target.vision).rows:
        if row.images is not None:
            length = next(i for i in range(row.images.end, len(row.input_ids)) if row.supervised[i])
            _, inputs = target.vision.inputs(row.images.text, row.images.read(), length)
            made.append((row.input_ids[:length], inputs))
    return made


def own_answer(target, ids, inputs):
    """Greedy tokens by the whole model's own forward over all tokens, again for each."""
    for _ in range(NEW):
        more = {n: torch.nn.functional.pad(v, (0, 1)) if n.endswith("type_ids") else v for n, v in inputs.items()}
        with torch.no_grad():
            logits = target.model(input_ids=torch.tensor([ids]), **inputs, use_cache=False).logits  # [1,S,V]
        ids, inputs = [*ids, int(logits[0, -1].argmax())], more
    return ids[-NEW:], inputs


def test_answers_are_the_targets_own_and_acceptance_is_the_walks(target, prompts):
    answers, rows = [], []
    for number, (ids, inputs) in enumerate(prompts):
        answer, padded = own_answer(target, ids, inputs)
        plain = PlainGenerator(target).generate(ids, NEW, eos_token_id=[], images=inputs)
        assert plain.tokens == [answer]
        output = target.features(torch.tensor([ids + answer]), None, None, images=padded)
        row = Row(str(number), "", ids + answer, [False] * len(ids) + [True] * NEW)
        rows.append(finish_row(row, output.aux_hidden[0], output.final_hidden[0], None, target.head))
        answers.append(answer)
    batch = collate(rows, FeatureContract.from_target(target))
    step = make_step(target)
    optimizer = torch.optim.Adam(step.parameters(), 5e-3)
    for _ in range(60):
        counts = step.count_positions(batch)
        optimizer.zero_grad()
        step(batch, step.normalisers(counts, batch.num_tokens)).loss.backward()
        optimizer.step()
    module = step.module.eval()
    with torch.no_grad():
        walk = acceptance_walk(
            module, step.embed(batch.input_ids), batch.aux_hidden, batch.supervised, batch.target_top1, 3,
            batch.document_ids,
        )  # fmt: skip
    for mode in (dict(num_steps=3), dict(mode="tree", topk=2, depth=3)):
        generator = PseudoSpeculativeGenerator(target, module, **mode)
        accepted = 0
        for (ids, inputs), answer, mine in zip(prompts, answers, walk.accepted, strict=True):
            drafted = generator.generate(ids, NEW, eos_token_id=[], images=inputs)
            assert drafted.tokens == [answer]
            accepted += sum(drafted.accepted_lengths[0])
            if "mode" not in mode:
                assert mine[:-2] == drafted.accepted_lengths[0][: len(mine) - 2]
        assert accepted > 6


def test_a_prompt_with_images_is_answered_alone(target, prompts):
    ids, inputs = prompts[0]
    with pytest.raises(DecodingError, match="answered alone, found 2 prompts"):
        PlainGenerator(target).generate([ids, ids], 2, images=inputs)


def test_validation_counts_prompts_with_images(target, mixed, tmp_path):
    """Each turn follows the answers before it, images included; text and images may stand in one set."""
    module = make_step(target).module.eval()
    with pytest.raises(DataError, match="mixed.jsonl:1: prompts with images are not supported here"):
        load_prompts(mixed)
    prompts = load_prompts(mixed, images=True)
    assert [bool(prompt.parts) for prompt in prompts] == [True, False, True, True]
    generator = PseudoSpeculativeGenerator(target, module, num_steps=2)
    dialogues = answer_dialogues(generator, prompts, max_new_tokens=6, batch_size=4)
    for dialogue in dialogues:
        messages = dialogue.messages
        assert [m.role for m in messages] == ["user", "assistant"] * len(dialogue.prompt.turns)
        last = prompt_inputs(target, messages[:-1])
        tokens = PlainGenerator(target).generate([last[0]], 6, images=last[1]).tokens[0]
        assert messages[-1].content == target.tokenizer.decode(tokens, skip_special_tokens=True)
    report = measure_acceptance(target, module, mixed, num_steps=2, max_new_tokens=6, speedup_prompts=4)
    assert report.prompts == 4 and report.steps == sum(dialogue.steps for dialogue in dialogues)
    assert target.vision.image_token in report.first_prompt and report.speed is not None


def test_prompts_with_images_of_a_target_of_text(tiny_target, mixed):
    prompts = load_prompts(mixed, images=True)
    generator = PlainGenerator(tiny_target)
    with pytest.raises(DataError, match="has the image .*png, and .* reads text only"):
        answer_dialogues(generator, prompts, max_new_tokens=2, batch_size=4)


def test_prompts_of_turns_may_have_images(mixed):
    path = mixed.parent / "turns.jsonl"
    path.write_text(json.dumps({"id": "a", "turns": ["<image>what?", "sure?"], "images": ["red.png"]}) + "\n")
    (prompt,) = load_prompts(path, images=True)
    assert prompt.turns == ("what?", "sure?") and [len(parts) for parts in prompt.parts] == [2, 0]
    assert prompt.message(0).images[0].path.endswith("red.png") and not prompt.message(1).images
    with pytest.raises(DataError, match="not supported here"):
        load_prompts(path)
