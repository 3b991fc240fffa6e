"""The generator says what the target says, and its acceptance is that of the teacher-forced walk."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from modelopt_eagle.decoding import PlainGenerator, PseudoSpeculativeGenerator
from modelopt_eagle.training.acceptance import acceptance_walk

MODES = [
    dict(num_steps=3),
    dict(num_steps=1),
    dict(num_steps=0),
    dict(mode="tree", topk=3, depth=3, num_nodes=10),
    dict(mode="tree", topk=2, depth=4, num_nodes=11),
    dict(mode="tree", topk=5, depth=1),
]


@pytest.mark.parametrize("options", MODES, ids=str)
@pytest.mark.parametrize("which", ["head", "good_head"])
def test_greedy_output_is_the_targets_own(target, prompts, greedy, options, which, request):
    generator = PseudoSpeculativeGenerator(target, request.getfixturevalue(which), **options)
    assert generator.generate(prompts, 48).tokens == greedy


def test_plain_generator_equals_transformers(target, prompts, greedy):
    output = PlainGenerator(target).generate(prompts, 48)
    assert output.tokens == greedy
    assert output.acceptance_length == 1.0 and output.accepted_per_position == []


@pytest.mark.parametrize("options", MODES[:1] + MODES[3:5], ids=str)
def test_acceptance_does_not_depend_on_the_batch(target, good_head, prompts, options):
    """B139: the same prompts one by one and together accept the same drafts at every step."""
    generator = PseudoSpeculativeGenerator(target, good_head, **options)
    together = generator.generate(prompts, 40)
    alone = [generator.generate([prompt], 40) for prompt in prompts]
    assert together.accepted_lengths == [output.accepted_lengths[0] for output in alone]
    assert together.acceptance_length > 2
    counts = [sum(output.accepted_per_position[k] for output in alone) for k in range(generator.plan.depth)]
    assert together.accepted_per_position == counts


@pytest.mark.parametrize("steps", [1, 3, 6])
def test_walk_and_generator_agree_to_the_token(target, good_head, prompts, greedy, steps):
    ends = [answer[18 + row] for row, answer in enumerate(greedy)]
    output = PseudoSpeculativeGenerator(target, good_head, num_steps=steps).generate(prompts, 48, eos_token_id=ends)
    assert "eos" in output.finish_reasons
    for prompt, answer, accepted, reason in zip(
        prompts, output.tokens, output.accepted_lengths, output.finish_reasons, strict=True
    ):
        ids = torch.tensor([prompt + answer])
        features = target.features(ids, None, good_head.config.aux_layer_ids)
        supervised = torch.zeros_like(ids, dtype=torch.bool)
        supervised[:, len(prompt) :] = True
        top1 = target.logits(features.final_hidden).argmax(-1)
        walked = acceptance_walk(good_head, target.embedding(ids), features.aux_hidden, supervised, top1, steps)
        if reason == "length":  # the walk cannot see what would have been accepted behind the limit
            assert accepted[:-1] == walked.accepted[0][:-1] and accepted[-1] >= walked.accepted[0][-1]
        else:
            assert accepted == walked.accepted[0]


def test_ragged_padding_on_either_side(target, good_head, prompts, greedy):
    longest = max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        where = slice(0, len(prompt)) if row % 2 else slice(longest - len(prompt), longest)
        ids[row, where], mask[row, where] = torch.tensor(prompt), 1
    output = PseudoSpeculativeGenerator(target, good_head).generate(ids, 48, attention_mask=mask)
    assert output.tokens == greedy


def test_prompts_may_be_given_in_any_plain_form(target, good_head, prompts, greedy):
    generator = PseudoSpeculativeGenerator(target, good_head)
    ids = torch.tensor(prompts[0])
    mask = torch.ones(len(ids) + 1, dtype=torch.int64)
    mask[0] = 0
    padded = torch.cat((ids.new_zeros(1), ids))
    for given, options in (
        (prompts[0], {}),
        (ids, {}),
        (ids.int(), {}),
        (ids[None].int(), {}),
        ([ids], {}),
        (padded, {"attention_mask": mask}),
    ):
        assert generator.generate(given, 48, temperature=0, **options).tokens == greedy[:1]


def test_length_limit_inside_an_accepted_run(target, good_head, prompts, greedy):
    for limit in range(1, 9):
        output = PseudoSpeculativeGenerator(target, good_head, num_steps=4).generate(prompts, limit)
        assert output.tokens == [answer[:limit] for answer in greedy]
        assert set(output.finish_reasons) == {"length"}
    mixed = [1, 7, 2, 30, 5, 48]
    output = PseudoSpeculativeGenerator(target, good_head, mode="tree", topk=2, depth=3).generate(prompts, mixed)
    assert output.tokens == [answer[:limit] for answer, limit in zip(greedy, mixed, strict=True)]


@pytest.mark.parametrize("options", [dict(num_steps=4), dict(mode="tree", topk=3, depth=3)], ids=str)
def test_end_token_inside_an_accepted_run(target, good_head, prompts, greedy, options):
    """Every token of the answer in turn is made the end token; nothing behind it is emitted or counted."""
    generator = PseudoSpeculativeGenerator(target, good_head, **options)
    inside = 0
    for place in range(3, 24, 2):
        end = greedy[3][place]
        output = generator.generate([prompts[3]], 48, eos_token_id=end)
        first = greedy[3].index(end)
        assert output.tokens[0] == greedy[3][: first + 1]
        assert output.finish_reasons == ["eos"]
        emitted = 1 + sum(1 + accepted for accepted in output.accepted_lengths[0])
        assert emitted in (first + 1, first + 2)  # the second: the end was a drafted token, no bonus came
        inside += emitted == first + 2
    assert inside > 0


def test_rows_stop_at_different_times(target, good_head, prompts, greedy):
    ends = [answer[8 + 3 * row] for row, answer in enumerate(greedy)]
    output = PseudoSpeculativeGenerator(target, good_head).generate(prompts, 48, eos_token_id=ends)
    for answer, tokens, reason in zip(greedy, output.tokens, output.finish_reasons, strict=True):
        stops = [place for place, token in enumerate(answer) if token in ends]
        assert tokens == (answer[: stops[0] + 1] if stops else answer)
        assert reason == ("eos" if stops else "length")


def test_stop_strings(target, good_head, prompts, greedy):
    text = target.tokenizer.decode(greedy[0])
    stop = text[10:13]
    output = PseudoSpeculativeGenerator(target, good_head).generate(prompts[:1], 48, stop_strings=[stop, "never said"])
    assert output.finish_reasons == ["stop"]
    said = target.tokenizer.decode(output.tokens[0])
    assert stop in said and stop not in target.tokenizer.decode(output.tokens[0][:-1])
    assert output.tokens[0] == greedy[0][: len(output.tokens[0])]


def test_streaming_gives_every_token_once_and_the_reason_last(target, good_head, prompts):
    heard = {index: [] for index in range(len(prompts))}
    reasons = {index: [] for index in range(len(prompts))}

    def listen(index, tokens, reason):
        heard[index] += tokens
        reasons[index].append(reason)

    output = PseudoSpeculativeGenerator(target, good_head).generate(prompts, 30, on_tokens=listen)
    assert [heard[index] for index in range(len(prompts))] == output.tokens
    for index, reason in enumerate(output.finish_reasons):
        assert reasons[index][-1] == reason and set(reasons[index][:-1]) <= {None}
        assert len(reasons[index]) == 1 + len(output.accepted_lengths[index])


def test_the_same_call_twice_accepts_the_same(target, good_head, prompts):
    """B154."""
    generator = PseudoSpeculativeGenerator(target, good_head)
    first, second = generator.generate(prompts, 30), generator.generate(prompts, 30)
    assert first.accepted_lengths == second.accepted_lengths and first.tokens == second.tokens


def test_generators_of_one_target_in_several_threads(target, good_head, prompts):
    """Each captures the features of its own passes: texts and acceptance are those of a run alone."""
    shapes = [dict(num_steps=3), dict(mode="tree", topk=3, depth=3, num_nodes=8)]
    generators = [PseudoSpeculativeGenerator(target, good_head, **shapes[n % 2]) for n in range(4)]
    alone = [generator.generate(prompts[n : n + 2], 24) for n, generator in enumerate(generators)]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            runs = [pool.submit(generator.generate, prompts[n : n + 2], 24) for n, generator in enumerate(generators)]
            for run, expected in zip(runs, alone, strict=True):
                assert run.result().tokens == expected.tokens
                assert run.result().accepted_lengths == expected.accepted_lengths
