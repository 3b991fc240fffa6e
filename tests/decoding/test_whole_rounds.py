"""A round as one function of tensors gives what the round call by call gives, also when a trace of it is replayed."""

import pytest
import torch
from heads import make_head
from test_architectures import PROMPTS as TEXTS
from test_architectures import build
from test_supported import GPT2, LLAMA4
from test_supported import PROMPTS as ASKED
from test_supported import build as build_counting
from torch.utils._python_dispatch import TorchDispatchMode
from tracing import TracingRecorder

from modelopt_eagle.decoding import PlainGenerator, PseudoSpeculativeGenerator, whole_rounds
from modelopt_eagle.decoding.rounds import DraftedRounds
from modelopt_eagle.decoding.target_runner import TargetRunner
from modelopt_eagle.decoding.whole_rounds import LEAST_WIDTH, WholeRounds
from modelopt_eagle.draft.algorithm import find_algorithm
from modelopt_eagle.errors import DecodingError
from modelopt_eagle.kernels.recorder import CudaGraphRecorder
from modelopt_eagle.target.tiny import make_tiny_target

CHAIN, TREE = dict(num_steps=3), dict(mode="tree", topk=3, depth=3, num_nodes=10)
LIMITS = [48, 7, 30, 12, 48, 21]


class Call:
    """A recorder that runs the region every time."""

    def record(self, region, inputs):
        return lambda: region(*inputs)


class Stale:
    """A recording that keeps what one of its inputs held when it was made, as a graph with a number baked in would."""

    def __init__(self, change):
        self.change = change

    def record(self, region, inputs):
        kept = self.change(list(inputs))
        return lambda: region(*kept())


def generators(target, head, recorder, **options):
    """Call by call, and with a recorder."""
    plain, recorded = (PseudoSpeculativeGenerator(target, head, **options) for _ in range(2))
    recorded._recorder = recorder
    return plain, recorded


def listen(monkeypatch):
    """What each round of any generator gave: emitted tokens, and features of the accepted nodes."""
    heard, own = [], DraftedRounds.step

    def step(self, requests):
        emitted, accepted = own(self, requests)
        features = [row[: n + 1].clone() for row, n in zip(self.features, accepted, strict=True)]
        heard.append((emitted, features, [row[:n].tolist() for row, n in zip(self.pending, self.counts, strict=True)]))
        return emitted, accepted

    monkeypatch.setattr(DraftedRounds, "step", step)
    return heard


def same_rounds(ours, theirs):
    assert len(ours) == len(theirs) > 5
    for (emitted, features, pending), (expected, known, following) in zip(ours, theirs, strict=True):
        assert emitted == expected and pending == following
        for mine, other in zip(features, known, strict=True):
            torch.testing.assert_close(mine, other, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("options", [CHAIN, TREE], ids=["chain", "tree"])
def test_a_replayed_round_is_the_round_itself(target, good_head, prompts, greedy, options, monkeypatch):
    """Ragged rows that leave one by one, round by round; then other batches over the same memory."""
    heard, recorder = listen(monkeypatch), TracingRecorder()
    plain, recorded = generators(target, good_head, recorder, **options)
    found = recorded.generate(prompts, LIMITS)
    ours, theirs = list(heard), heard
    theirs.clear()
    expected = plain.generate(prompts, LIMITS)
    same_rounds(ours, theirs)
    assert found.tokens == expected.tokens == [text[:limit] for text, limit in zip(greedy, LIMITS, strict=True)]
    assert found.accepted_lengths == expected.accepted_lengths and found.acceptance_length > 1.5
    assert recorder.recorded[:3] == [6, 4, 2]
    assert recorder.replays == len(ours) - 1  # every round but that of the prompts
    cache, count = recorded._whole.cache, len(recorder.recorded)
    for some in (prompts[2:5], prompts[:2]):
        assert recorded.generate(some, 24).accepted_lengths == plain.generate(some, 24).accepted_lengths
    assert recorded._whole.cache is cache and len(recorder.recorded) <= count + 2


@pytest.mark.parametrize("kind", ["llama, eager", "qwen2, mixed windows", "deepseek, latents", "llama4, chunks"])
def test_targets_of_many_kinds(kind):
    """Called over fixed shapes: windows, chunks and latents see what they saw; answers pass a bound of the width."""
    target = build(kind)
    head = make_head(target)
    plain, fixed = generators(target, head, Call(), **TREE)
    texts = [*TEXTS[:2], (TEXTS[1] * 30)[: LEAST_WIDTH - 16]]
    assert fixed.generate(texts, 24).tokens == plain.generate(texts, 24).tokens
    widths = {width for _, width, _ in fixed._whole._recordings}
    assert fixed._whole.refused is None and len(widths) == 2 and min(widths) == LEAST_WIDTH


def test_answers_up_to_the_last_slot(target, good_head, prompts):
    plain, fixed = generators(target, good_head, Call(), **TREE, cache_length=LEAST_WIDTH)
    text, room = (prompts[0] * 70)[: LEAST_WIDTH - 30], 30 - TREE["num_nodes"]
    assert fixed.generate([text], room).tokens == plain.generate([text], room).tokens
    assert fixed._whole.capacity == LEAST_WIDTH
    with pytest.raises(DecodingError, match="cache_length is 256, but 257 slots are needed"):
        fixed.generate([text], room + 1)
    with pytest.raises(DecodingError, match="holds 256 tokens a request, 257 are needed"):
        fixed._whole.round([LEAST_WIDTH - TREE["num_nodes"] + 1], [1], None, None)


class Launches(TorchDispatchMode):
    """Operators that a generator runs outside of its replays, those left out that compute nothing."""

    VIEWS = "slice select view expand unsqueeze alias detach transpose t _unsafe_view resolve_conj resolve_neg".split()

    def __init__(self):
        super().__init__()
        self.names, self.replaying = [], False

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        name = operator.name().removeprefix("aten::").split(".")[0]
        if not self.replaying and name not in self.VIEWS:
            self.names.append(name)
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("options", [CHAIN, TREE], ids=["chain", "tree"])
def test_launches_and_waits_of_a_round(target, good_head, prompts, options, monkeypatch):
    """Between two rounds: two copies and one replay, and one read. The round call by call launches over a hundred."""
    mode, waits = Launches(), []

    class Counted(TracingRecorder):
        def record(self, region, inputs):
            replay = super().record(region, inputs)

            def counted():
                mode.names.append("replay")
                mode.replaying = True
                try:
                    return replay()
                finally:
                    mode.replaying = False

            return counted

    def reads(name, own):
        def read(self, *given, **named):
            if not mode.replaying:
                waits.append(name)
            return own(self, *given, **named)

        return read

    for name in ("tolist", "item", "__bool__", "__int__", "nonzero"):
        monkeypatch.setattr(torch.Tensor, name, reads(name, getattr(torch.Tensor, name)))
    plain, recorded = generators(target, good_head, Counted(), **options)
    found, own = {}, DraftedRounds.step
    for label, one in (("whole", recorded), ("plain", plain)):
        rounds = found[label] = []

        def step(self, requests, rounds=rounds):
            mode.names.clear()
            waits.clear()
            answer = own(self, requests)
            rounds.append((list(mode.names), list(waits)))
            return answer

        monkeypatch.setattr(DraftedRounds, "step", step)
        one.generate(prompts[1:2] * 2, 24, eos_token_id=[])  # recordings are made
        rounds.clear()
        with mode:
            one.generate(prompts[1:2] * 2, 24, eos_token_id=[])
    steady = found["whole"][2:]  # behind the prompts' round and the first that takes over from it
    assert len(steady) > 2 and all(names == ["copy_", "copy_", "replay"] for names, _ in steady), steady
    assert all(read == ["tolist"] for _, read in steady)
    assert min(len(names) for names, _ in found["plain"]) > 100


COLUMNS = {"lengths": slice(0, 1), "counts": slice(1, 2), "tokens": slice(2, None)}


@pytest.mark.parametrize("what", [*COLUMNS, "features", "draft keys", "target keys"])
def test_a_stale_replay_is_seen(target, good_head, prompts, what):
    """The control: with one input as it was at the recording, text or acceptance differ from the plain round's."""

    def change(inputs):
        if what in COLUMNS:
            frozen = inputs[0].clone()

            def kept():
                state = inputs[0].clone()
                state[:, COLUMNS[what]] = frozen[:, COLUMNS[what]]
                return [state, *inputs[1:]]

            return kept
        places = {"features": [1], "draft keys": [2, 3], "target keys": list(range(4, len(inputs)))}[what]
        frozen = [tensor.clone() if place in places else tensor for place, tensor in enumerate(inputs)]
        return lambda: frozen

    plain, recorded = generators(target, good_head, Stale(change), **CHAIN)
    calls = [(prompts[:2], 24), (prompts[1:3], 24)]  # keys that are kept are wrong for the next call
    found = [recorded.generate(texts, limit, eos_token_id=[]) for texts, limit in calls]
    expected = [plain.generate(texts, limit, eos_token_id=[]) for texts, limit in calls]
    assert recorded._whole.refused is None
    assert [one.accepted_lengths for one in found] != [one.accepted_lengths for one in expected]
    if what in ("features", "draft keys"):
        assert [one.tokens for one in found] == [one.tokens for one in expected]  # the head alone was misled


def test_what_cannot_be_recorded_runs_call_by_call(target, good_head, prompts, monkeypatch):
    """Rounds that sample use the recorded draft; a target whose pass reads a value back loses nothing but the graph."""
    plain, recorded = generators(target, good_head, TracingRecorder(), **CHAIN)
    wishes = dict(temperature=[0.8, 0.0], seed=1)
    assert recorded.generate(prompts[:2], 12, **wishes).tokens == plain.generate(prompts[:2], 12, **wishes).tokens
    assert not recorded._whole._recordings and recorded._recorder.replays

    class Fails(TracingRecorder):
        def record(self, region, inputs):
            try:
                return super().record(region, inputs)
            except RuntimeError as error:
                raise DecodingError(f"a round could not be captured: {error}") from error

    own = TargetRunner.verify_fixed

    def reads_back(self, tokens, lengths, *given):
        return own(self, tokens, lengths.clamp(max=int(lengths.max())), *given)

    monkeypatch.setattr(TargetRunner, "verify_fixed", reads_back)
    plain, recorded = generators(target, good_head, Fails(), **CHAIN)
    with pytest.warns(UserWarning, match="the draft alone is recorded: a round could not be captured: .*reads a value"):
        found = recorded.generate(prompts, 12)
    expected = plain.generate(prompts, 12)
    assert found.tokens == expected.tokens and found.accepted_lengths == expected.accepted_lengths
    assert recorded._recorder.replays and not recorded._whole._recordings
    fallible = WholeRounds(target, recorded.plan, CudaGraphRecorder(fall_back=True), False)
    assert not fallible.recorder.fall_back  # a capture that fails must not leave the whole width to be run eagerly


def test_targets_that_count_slots_are_not_recorded(prompts):
    """Temperature by slots of the cache from 128 on, of which the recording would read 256; ALiBi at any length."""
    target = build_counting("Llama4Text", {**LLAMA4, "attn_temperature_tuning": True, "floor_scale": 128})
    _, recorded = generators(target, make_head(target), Call(), **CHAIN)
    with pytest.warns(UserWarning, match="the draft alone is recorded: its layers without rotary positions scale"):
        found = recorded.generate(ASKED, 8)
    assert found.tokens == PlainGenerator(target).generate(ASKED, 8).tokens
    target = build_counting("Bloom", dict(vocab_size=128, hidden_size=32, n_layer=6, n_head=4, bos_token_id=1))
    _, recorded = generators(target, make_head(target), Call(), **CHAIN)
    found = recorded.generate(ASKED[:1], 8)
    assert found.tokens == PlainGenerator(target).generate(ASKED[:1], 8).tokens and recorded._whole is None


def test_learned_positions_end_with_their_table():
    """The last answers fill the table of 26 places, where drafts reach beyond it."""
    target = build_counting("GPT2", GPT2)
    plain, fixed = generators(target, make_head(target), Call(), **TREE)
    limits = [26 - len(prompt) for prompt in ASKED]
    assert fixed.generate(ASKED, limits).tokens == plain.generate(ASKED, limits).tokens
    assert fixed._whole._recordings


def test_a_long_row_that_left_is_a_short_dummy(target, good_head, prompts):
    """Three rows remain in a recording of four that reads fewer slots than the fourth was long."""
    plain, fixed = generators(target, good_head, Call(), **TREE)
    texts = [*prompts[:3], (prompts[0] * 70)[:250]]
    limits = [40, 40, 40, 9]
    assert fixed.generate(texts, limits).tokens == plain.generate(texts, limits).tokens
    assert {(rows, width) for rows, width, _ in fixed._whole._recordings} >= {(4, 512), (4, LEAST_WIDTH)}


def test_a_head_of_another_kind_runs_call_by_call(target, prompts):
    """P-EAGLE's rounds have no fixed shapes yet; a recorder changes nothing for it."""
    algorithm = find_algorithm("peagle")
    torch.manual_seed(0)
    head = algorithm.module(algorithm.config.from_target(target.config, mask_token_id=255)).eval()
    plain, recorded = generators(target, head, TracingRecorder(), num_steps=3)
    assert recorded.generate(prompts, 12).accepted_lengths == plain.generate(prompts, 12).accepted_lengths
    assert not recorded._recorder.replays and recorded._whole.cache is None


def test_memory_is_used_again_and_weights_that_moved_record_anew(prompts):
    target = make_tiny_target()
    plain, recorded = generators(target, make_head(target), TracingRecorder(), **CHAIN)
    recorded.generate(prompts[:2], 8)
    cache, count = recorded._whole.cache, len(recorded._recorder.recorded)
    with torch.inference_mode():
        for tensor in cache.held():
            tensor.fill_(torch.nan)  # of an earlier call: masked, it would spread
    assert recorded.generate(prompts[:2], 8).tokens == plain.generate(prompts[:2], 8).tokens
    assert recorded._whole.cache is cache and len(recorded._recorder.recorded) == count
    for weight in target.model.parameters():
        weight.data = -weight.data
    assert recorded.generate(prompts[:2], 8).tokens == plain.generate(prompts[:2], 8).tokens
    assert recorded._whole.cache is cache and len(recorded._recorder.recorded) > count


def test_a_call_goes_on_where_recordings_end(target, good_head, prompts, monkeypatch):
    """More slots are refused in the middle of an answer: rounds call by call take over what whole ones left."""
    refused = {LEAST_WIDTH: None, 2 * LEAST_WIDTH: "it counts slots"}
    monkeypatch.setattr(whole_rounds, "needs_numbers", lambda target, slots: refused[slots])
    plain, fixed = generators(target, good_head, Call(), **TREE)
    texts = [prompts[1], (prompts[0] * 70)[:240]]
    with pytest.warns(UserWarning, match="the draft alone is recorded: it counts slots"):
        found = fixed.generate(texts, 40)
    expected = plain.generate(texts, 40)
    assert found.tokens == expected.tokens and found.accepted_lengths == expected.accepted_lengths
    assert [width for _, width, _ in fixed._whole._recordings] == [LEAST_WIDTH] * len(fixed._whole._recordings)
