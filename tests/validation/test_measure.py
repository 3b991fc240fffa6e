"""Acceptance measured by decoding: pooled, by prefix, per category; second turns follow the first answers."""

import json

import pytest
import torch
from heads import make_head

from modelopt_eagle.common.acceptance import (
    acceptance_length,
    bootstrap_interval,
    by_context,
    conditional_rates,
    paired_difference,
    prefix_shares,
    request_mean,
)
from modelopt_eagle.data import Prompt
from modelopt_eagle.decoding import PlainGenerator, PseudoSpeculativeGenerator, SamplingOptions
from modelopt_eagle.errors import DataError
from modelopt_eagle.validation import measure, measure_acceptance
from modelopt_eagle.validation.dialogues import answer_dialogues, first_turn, pieces, prompt_ids


@pytest.fixture(scope="module")
def report(target, good_head, prompts):
    return measure_acceptance(target, good_head, prompts, max_new_tokens=32, batch_size=3, speedup_prompts=2)


def test_a_recorded_trace_with_a_known_mean():
    """B135: pooled over all steps, not a mean over prompts."""
    trace = [[3, 0, 1], [2], []]
    assert acceptance_length(trace) == 1 + 6 / 4
    assert prefix_shares(trace, 3) == [3 / 4, 2 / 4, 1 / 4]
    assert 1 + sum(prefix_shares(trace, 3)) == acceptance_length(trace)
    assert acceptance_length([]) == 1.0 and bootstrap_interval([]) == (1.0, 1.0)


def test_interval_covers_the_truth_about_as_often_as_it_says():
    generator = torch.Generator().manual_seed(0)
    covered, tries = 0, 200
    for trial in range(tries):
        means = torch.rand(40, generator=generator) * 2  # each prompt has its own mean acceptance; overall mean 1
        rows = [torch.poisson(mean.expand(20), generator=generator).tolist() for mean in means]
        low, high = bootstrap_interval(rows, seed=trial, rounds=300)
        covered += low <= 2.0 <= high
    assert 0.85 < covered / tries < 1.0


def test_report_agrees_with_the_generator(target, good_head, prompts, report):
    generator = PseudoSpeculativeGenerator(target, good_head)
    dialogues = answer_dialogues(generator, prompts, max_new_tokens=32, batch_size=1)
    accepted = [dialogue.accepted for dialogue in dialogues]
    assert report.acceptance_length == acceptance_length(accepted) > 1.8
    assert report.per_position == prefix_shares(accepted, 3)
    assert report.steps == sum(map(len, accepted)) and report.prompts == 4
    assert report.per_category == {"writing": acceptance_length(accepted[:2]), "math": acceptance_length(accepted[2:])}
    assert report.ci95[0] <= report.acceptance_length <= report.ci95[1]
    for category, length in report.per_category.items():
        low, high = report.per_category_ci95[category]
        assert low <= length <= high
    assert report.speedup > 0 and report.speed.tokens > 0
    assert abs(report.speed.speedup / report.speed.efficiency - report.speed.acceptance_length) < 1e-9


def test_second_turn_follows_the_answer_that_was_given(target, good_head, prompts):
    plain = PlainGenerator(target)
    first = plain.generate([first_turn(target, prompts[0])], 32).tokens[0]
    dialogue = answer_dialogues(
        PseudoSpeculativeGenerator(target, good_head), prompts[:1], max_new_tokens=32, batch_size=8
    )[0]
    said = target.tokenizer.decode(first).removesuffix(target.tokenizer.eos_token)
    assert [message.role for message in dialogue.messages] == ["user", "assistant", "user", "assistant"]
    assert dialogue.messages[1].content == said
    second = plain.generate([prompt_ids(target, dialogue.messages[:3])], 32).tokens[0]
    assert dialogue.messages[3].content == target.tokenizer.decode(second).removesuffix(target.tokenizer.eos_token)
    assert dialogue.tokens == len(first) + len(second)


def test_prompts_and_timings_that_have_no_time_are_left_out_and_counted(target, good_head, prompts, report):
    options = {"max_new_tokens": 32, "batch_size": 2, "speedup_prompts": 2}
    whole = measure_acceptance(target, good_head, prompts, seconds=600.0, **options)
    assert (whole.prompts, whole.speed.prompts, whole.acceptance_length) == (4, 2, report.acceptance_length)
    assert not any("for measuring" in note for note in whole.notes)
    short = measure_acceptance(target, good_head, prompts, seconds=1e-6, **options)
    assert (short.prompts, short.speed.prompts) == (2, 1)
    notes = short.to_dict()["notes"]
    assert "2 of 4 prompts were not asked: the time for measuring was over" in notes
    assert "the speed-up was timed on 1 of 2 prompts, for the same reason" in notes and notes[-1] in short.table()
    asked = {dialogue.prompt.id: dialogue.accepted for dialogue in short.dialogues}
    assert list(asked) == [prompts[0].id, prompts[2].id], "drawn from all over the prompts"
    assert all(d.accepted == asked[d.prompt.id] for d in whole.dialogues if d.prompt.id in asked)


def test_turns_that_do_not_fit_are_counted(target, good_head, prompts):
    long = Prompt("long", "writing", ("x" * 2030, "more", "a third turn, which is not asked"))
    report = measure_acceptance(target, good_head, [*prompts[1:2], long], max_new_tokens=32, speedup_prompts=0)
    assert report.too_long == 2 and report.prompts == 1 and "left out: 2 turns" in report.table()
    assert report.speedup is None
    with pytest.raises(DataError, match="max_new_tokens"):
        measure_acceptance(target, good_head, [long], max_new_tokens=32, speedup_prompts=0)
    with pytest.raises(DataError, match="no prompts"):
        measure_acceptance(target, good_head, [], max_new_tokens=32)


def test_the_pieces_of_an_answer_are_its_text_step_by_step(target, good_head, prompts, report, tmp_path):
    rows = [json.loads(line) for line in report.write_dialogues(tmp_path / "dialogues.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == [prompt.id for prompt in prompts]
    for row, dialogue in zip(rows, report.dialogues, strict=True):
        assert [turn["question"] for turn in row["turns"]] == list(dialogue.prompt.turns)
        assert sum((turn["accepted"] for turn in row["turns"]), []) == dialogue.accepted
        for turn in row["turns"]:
            assert len(turn["pieces"]) == 1 + len(turn["accepted"]) and turn["pieces"][0][0] == ""
    first = rows[0]["turns"][0]
    assert first["context"] == len(first_turn(target, prompts[0]))


def test_a_character_of_two_tokens_belongs_to_the_step_that_ends_it(target):
    tokens = target.tokenizer("aäb€c", add_special_tokens=False)["input_ids"]  # bytes: 1 + 2 + 1 + 3 + 1
    assert pieces(target.tokenizer, tokens, [1, 0, 2, 0]) == [("", "a"), ("", "ä"), ("", "b"), ("", "€"), ("", "c")]
    assert pieces(target.tokenizer, tokens[:3], [5]) == [("", "a"), ("ä", "")]
    assert pieces(target.tokenizer, tokens[:2], []) == [("", "a")] and pieces(target.tokenizer, [], []) == [("", "")]
    noise = torch.randint(0, 247, (80,), generator=torch.Generator().manual_seed(1)).tolist()
    accepted = [3, 0, 1, 2] * 10
    found = pieces(target.tokenizer, noise, accepted)
    assert "".join(map("".join, found)) == target.tokenizer.decode(noise, clean_up_tokenization_spaces=False)


def test_paired_differences_know_noise_from_a_gain():
    generator = torch.Generator().manual_seed(0)
    first = [torch.poisson(torch.full((30,), 1.0 + 0.5 * (i % 3)), generator=generator).tolist() for i in range(40)]
    better = [[n + 1 for n in row[::2]] for row in first]
    found = paired_difference(first, better)
    assert found.difference == pytest.approx(acceptance_length(better) - acceptance_length(first))
    assert found.ci95[0] > 0 and found.p_value < 0.01 and found.prompts == 40
    same = paired_difference(first, first)
    assert same.difference == 0 and same.p_value == 1 and same.ci95 == (0, 0)
    small = 0
    for trial in range(100):
        rows = [[torch.poisson(torch.ones(20), generator=generator).tolist() for _ in range(15)] for _ in range(2)]
        small += paired_difference(*rows, seed=trial, rounds=200).p_value < 0.05
    assert small <= 12  # 5 are expected
    assert paired_difference([[]], [[1]]).prompts == 0 and paired_difference([], []).p_value == 1


def test_json_has_exactly_the_fields_named(report, tmp_path):
    path = report.write_json(tmp_path / "report" / "acceptance.json")
    data = json.loads(path.read_text())
    names = "acceptance_length ci95 per_position per_category speedup steps prompts target commit".split()
    more = {"draft", "costs", "per_category_ci95", "conditional", "request_mean", "by_context"}
    assert list(data)[:9] == names and set(data) - set(names) == more
    assert data["draft"] == {"mode": "chain", "num_steps": 3}
    assert data["costs"]["break_even"] == report.speed.break_even and data["costs"]["plain_step"] > 0
    assert data["target"] == "tiny" and len(data["commit"]) >= 7
    assert data["acceptance_length"] == report.acceptance_length and len(data["ci95"]) == 2
    assert [entry.name for entry in path.parent.iterdir()] == ["acceptance.json"]


def test_rates_by_position_prompt_and_context():
    trace = [[3, 0, 1], [2], []]
    assert conditional_rates(trace, 4) == [3 / 4, 2 / 3, 1 / 2, 0.0]
    assert conditional_rates([[0]], 2) == [0.0, None] and conditional_rates([], 1) == [None]
    assert request_mean(trace) == ((1 + 4 / 3) + 3) / 2 and request_mean([[]]) is None
    found = by_context(trace, [[10, 300, 5000], [63], []])
    assert found == {"0-63": (2, 1 + 5 / 2), "256-511": (1, 1.0), "4096-8191": (1, 2.0)}


def test_contexts_follow_the_text(target, good_head, prompts):
    """A step stands behind the prompt, and behind all tokens emitted before."""
    dialogue = answer_dialogues(
        PseudoSpeculativeGenerator(target, good_head), prompts[1:2], max_new_tokens=32, batch_size=1, max_turns=1
    )[0]
    first = len(first_turn(target, prompts[1])) + 1
    expected = [first + sum(1 + n for n in dialogue.accepted[:step]) for step in range(dialogue.steps)]
    assert dialogue.contexts == expected and dialogue.steps > 3


def test_answers_drawn_as_production_draws(target, good_head, prompts, report):
    options = dict(
        max_new_tokens=32, batch_size=3, speedup_prompts=1, seed=3, sampling=SamplingOptions(0.9, top_p=0.95)
    )
    drawn = measure_acceptance(target, good_head, prompts, **options)
    both = measure_acceptance(target, good_head, prompts, sample_drafts=True, **options)
    assert 1 < drawn.acceptance_length < report.acceptance_length  # texts the head has not learnt
    assert drawn.acceptance_length == measure_acceptance(target, good_head, prompts, **options).acceptance_length
    assert drawn.to_dict()["sampling"] == {
        "temperature": 0.9, "top_k": 0, "top_p": 0.95, "min_p": 0.0, "sample_drafts": False
    }  # fmt: skip
    assert "answers drawn: temperature 0.9" in drawn.table() and "drafts drawn" in both.table()
    assert both.acceptance_length > 1 and drawn.speedup > 0


def test_the_speed_is_timed_on_as_many_different_prompts_as_there_are(target, good_head, prompts, monkeypatch):
    timed = []
    monkeypatch.setattr(measure, "measure_speed", lambda generators, encoded, *rest, **named: timed.append(encoded))
    generator = PseudoSpeculativeGenerator(target, good_head)
    for count in (4, 8, 2):
        measure.time_generators([generator], prompts, count, 32)
    firsts = [first_turn(target, prompt) for prompt in prompts]
    assert timed == [firsts, firsts, [firsts[0], firsts[2]]]


def test_a_tree_accepts_at_least_what_its_chain_does(target, good_head, prompts, report):
    """B152, on fixed prompts."""
    tree = measure_acceptance(
        target, good_head, prompts, mode="tree", topk=4, depth=3, num_nodes=20, max_new_tokens=32, speedup_prompts=0
    )
    assert tree.acceptance_length >= report.acceptance_length
    assert len(tree.per_position) == 3
    assert tree.to_dict()["draft"] == {"mode": "tree", "topk": 4, "depth": 3, "num_nodes": 20}
    assert "costs" not in tree.to_dict() and "accepted up to each depth of the tree" in tree.table()


def test_a_reduced_vocabulary_counts_what_it_cannot_say_as_missed(target, prompts):
    """B134: tokens outside the draft vocabulary stay in the denominator."""
    head = make_head(target, draft_vocab_size=16)
    report = measure_acceptance(target, head, prompts, max_new_tokens=32, speedup_prompts=0)
    assert report.steps > 32 and report.acceptance_length < 1.5


def test_prompts_may_be_texts_or_a_file(target, good_head, tmp_path):
    options = dict(max_new_tokens=8, speedup_prompts=0)
    texts = measure_acceptance(target, good_head, ["Hello", "Say a word."], **options)
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"id": text, "turns": [text]}) + "\n" for text in ("Hello", "Say a word.")))
    read = measure_acceptance(target, good_head, file, **options)
    assert texts.prompts == read.prompts == 2 and texts.steps == read.steps
    assert texts.acceptance_length == read.acceptance_length and set(texts.per_category) == {"all"}
    for wrong, words in (([], "no prompts"), ([["Hello"]], "expected prompts or texts, found list")):
        with pytest.raises(DataError, match=words):
            measure_acceptance(target, good_head, wrong, **options)
