"""The draft loop replayed from a recording drafts what the loop itself drafts: nothing in it was a Python number."""

import weakref
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from heads import make_head
from tracing import TracingRecorder

from modelopt_eagle.decoding import PlainGenerator, PseudoSpeculativeGenerator
from modelopt_eagle.draft.eagle3 import graphs as draft_graphs
from modelopt_eagle.draft.eagle3.draft_loop import DraftLoop
from modelopt_eagle.draft.eagle3.graphs import DraftGraphs
from modelopt_eagle.draft.plan import DraftPlan
from modelopt_eagle.errors import DecodingError, RecipeError
from modelopt_eagle.kernels.recorder import CudaGraphRecorder, choose_recorder

MODES = [
    dict(num_steps=4),
    dict(num_steps=1),
    dict(mode="tree", topk=3, depth=3, num_nodes=10),
    dict(mode="tree", topk=2, depth=4, num_nodes=11),
    dict(mode="tree", topk=5, depth=1),
]


def pair(target, head, **options):
    """The same generator call by call, and with recordings of its drafts (whole rounds: ``test_whole_rounds.py``)."""
    plain, recorded = (PseudoSpeculativeGenerator(target, head, **options) for _ in range(2))
    recorded._recorder, recorded._take_whole = TracingRecorder(), lambda: None
    return plain, recorded


def same(one, other):
    assert one.tokens == other.tokens
    assert one.accepted_lengths == other.accepted_lengths
    assert one.finish_reasons == other.finish_reasons


@pytest.mark.parametrize("options", MODES, ids=str)
def test_replayed_drafts_are_the_loops_own(target, good_head, prompts, greedy, options):
    """Ragged prompts, rows that stop at different times, and several calls of one generator."""
    plain, recorded = pair(target, good_head, **options)
    limits = [48, 7, 30, 12, 48, 21]
    first = recorded.generate(prompts, limits)
    same(first, plain.generate(prompts, limits))
    assert first.tokens == [answer[:limit] for answer, limit in zip(greedy, limits, strict=True)]
    recorder = recorded._recorder
    assert recorder.recorded[0] == 8 and 1 < len(recorder.recorded) < recorder.replays
    for some in (prompts[2:5], prompts[::-1], prompts[1:2]):
        same(recorded.generate(some, 24), plain.generate(some, 24))
    assert sorted(recorder.recorded) == [1, 2, 4, 8]  # nothing is recorded twice


@pytest.mark.parametrize("options", [MODES[0], MODES[2]], ids=str)
def test_sampling_draws_the_same(target, good_head, prompts, options):
    plain, recorded = pair(target, good_head, **options)
    wishes = dict(temperature=[0.0, 0.7, 1.0, 1.3, 0.0, 0.9], top_p=0.9, seed=3)
    drawn = recorded.generate(prompts, 20, **wishes)
    same(drawn, plain.generate(prompts, 20, **wishes))
    assert recorded._recorder.replays and drawn.tokens != recorded.generate(prompts, 20).tokens


HEADS = {
    "two layers": {"num_hidden_layers": 2},
    "norm_output": {"norm_output": True, "norm_before_residual": True},
    "latent attention": {
        "decoder_type": "kimik2",
        "q_lora_rank": 16,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
    },
    "reduced vocabulary": {"draft_vocab_size": 64},
}


class Call:
    """A recorder that runs the region every time: its shapes are those of the recording."""

    def record(self, region, inputs):
        return lambda: region(*inputs)


COUNTS = [[7, 2, 4], [1, 3, 2], [5, 1, 1], [2, 2], [1, 5], [3], [4]]
"""New anchors of each row, round by round: a prompt, rounds of other lengths than the recorded one, rows that leave."""


@torch.no_grad()
@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("plan", [DraftPlan.chain(4), DraftPlan.tree(3, 4, 12)], ids=["chain", "tree"])
def test_every_field_of_every_round(target, kind, plan):
    """Rounds of random features: drafted tokens, links, masks and keys are those of the region called anew, to the bit,
    and those of the loop with shapes of its own."""
    head, recorder = make_head(target, seed=3, **HEADS[kind]), TracingRecorder()
    graphs, called = (DraftGraphs(head, target.embedding, plan, record) for record in (recorder, Call()))
    loops = [graphs.loop(3, 60), called.loop(3, 60), DraftLoop(head, target.embedding, plan, 3, 60)]
    starts = [0, 0, 0]
    width = head.config.fc_input_size
    for turn, counts in enumerate(COUNTS):
        if len(counts) < len(starts):  # the first row has finished
            for loop in loops:
                loop.keep(torch.arange(1, len(starts)))
            starts = starts[1:]
        torch.manual_seed(turn)
        batch, most = len(counts), max(counts)
        tokens, features, roots = (
            torch.randint(256, (batch, most)),
            torch.randn(batch, most, width),
            torch.arange(batch),
        )
        for loop in loops:
            loop.commit(tokens, features, starts, counts)
        starts = [start + count for start, count in zip(starts, counts, strict=True)]
        drafts = [loop.draft(starts, roots) for loop in loops]
        if plan.is_tree:
            assert drafts[0].tree.max_depth == plan.depth
            drafts = [[*(getattr(d.tree, name) for name in draft_graphs.FIELDS), d.sees] for d in drafts]
        else:
            drafts = [[draft] for draft in drafts]
        for replayed, again, eager in zip(*drafts, strict=True):
            assert torch.equal(replayed, again) and torch.equal(replayed, eager)
        for mine, same, theirs in zip(*(loop.eager.cache.tensors() for loop in loops), strict=True):
            for row, start in enumerate(starts):
                assert torch.equal(mine[row, :, :start], same[row, :, :start])
                torch.testing.assert_close(mine[row, :, :start], theirs[row, :, :start], atol=1e-5, rtol=1e-5)
    assert recorder.recorded == [4, 2, 1] and recorder.replays == 6  # all but the prompt's


@torch.no_grad()
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("layers", [1, 2])
def test_the_first_step_over_the_whole_buffer_is_the_loops_own(target, window, layers):
    """Up to the last place of the cache; what a row's padding holds is nothing to it."""
    head = make_head(target, seed=4, num_hidden_layers=layers, sliding_window=window)
    plan, width = DraftPlan.chain(4), head.config.fc_input_size
    plain, fixed, other = (DraftLoop(head, target.embedding, plan, 3, 16, fixed_shapes=True) for _ in range(3))
    starts = [0, 0, 0]
    for turn, counts in enumerate([[3, 1, 5], [5, 2, 5], [5, 1, 5], [3, 4, 1]]):  # the first row ends in the last slot
        torch.manual_seed(turn)
        tokens, features = torch.randint(256, (3, 5)), torch.randn(3, 5, width)
        padding = torch.arange(5) >= torch.tensor(counts)[:, None]  # [B,m]
        places = torch.tensor(starts), torch.tensor(counts)
        expected = plain.advance(tokens[:, : max(counts)], features[:, : max(counts)], starts, counts)
        found = fixed.advance_fixed(tokens, features, *places)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        again = other.advance_fixed(
            tokens.masked_fill(padding, 7), features.masked_fill(padding[..., None], torch.nan), *places
        )
        assert torch.equal(again, found)
        starts = [start + count for start, count in zip(starts, counts, strict=True)]
        for mine, theirs in zip(fixed.cache.tensors(), plain.cache.tensors(), strict=True):
            for row, start in enumerate(starts):
                torch.testing.assert_close(mine[row, :, :start], theirs[row, :, :start], atol=1e-5, rtol=1e-5)
    assert starts[0] == 16


def test_a_trace_tells_a_python_number(target, good_head, prompts, monkeypatch):
    """The control: with one length read as a number the region cannot be traced, with one baked in it drafts wrong."""
    own = DraftGraphs.region

    def reads_back(self, tokens, aux_hidden, places, roots, *cache):
        return own(self, tokens[:, : int(places[:, 1].max())], aux_hidden, places, roots, *cache)

    def bakes_in(column):
        def region(self, tokens, aux_hidden, places, roots, *cache):
            fixed = places.clone()
            fixed[:, column].fill_(1 + column)
            return own(self, tokens, aux_hidden, fixed, roots, *cache)

        return region

    plain, recorded = pair(target, good_head, num_steps=3)
    right = plain.generate(prompts[1:2], 24)
    monkeypatch.setattr(DraftGraphs, "region", reads_back)
    with pytest.raises(RuntimeError, match="reads a value back"):
        recorded.generate(prompts[1:2], 24)
    for column in (0, 1):
        recorded._drafter = None
        monkeypatch.setattr(DraftGraphs, "region", bakes_in(column))
        wrong = recorded.generate(prompts[1:2], 24)
        assert wrong.tokens == right.tokens and wrong.acceptance_length < right.acceptance_length


def test_a_trace_refuses_numbers_of_the_host():
    """On a GPU they are copied, which no graph may do; on the CPU nobody would see it."""
    with pytest.raises(RuntimeError, match="makes a tensor of Python numbers"):
        TracingRecorder().record(lambda x: (x + torch.tensor([1, 2]),), [torch.zeros(2)])


def test_an_exception_leaves_nothing_behind(target, good_head, prompts, monkeypatch):
    plain, recorded = pair(target, good_head, num_steps=3)
    before = recorded.generate(prompts, 20)
    target.model.train()
    good_head.train()

    def interrupt(index, tokens, reason):
        if len(tokens) > 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        recorded.generate(prompts, 20, on_tokens=interrupt)
    assert target.model.training and good_head.training
    target.model.eval()
    good_head.eval()
    same(recorded.generate(prompts, 20), before)
    same(plain.generate(prompts, 20), before)


def test_longer_calls_larger_batches_and_moved_weights_record_anew(target, prompts):
    head = make_head(target, seed=2)
    plain, recorded = pair(target, head, num_steps=2)
    recorder = recorded._recorder
    recorded.generate(prompts[:1], 12)
    recorded.generate(prompts[1:2], 12)
    assert recorder.recorded == [1]
    recorded.generate(prompts[:2], 12)
    assert recorder.recorded == [1, 2]
    recorded.generate([prompts[0] * 70, prompts[1]], 12)  # 280 tokens: above the least capacity
    assert recorder.recorded == [1, 2, 2]
    same(recorded.generate(prompts[:2], 12), plain.generate(prompts[:2], 12))
    assert recorder.recorded == [1, 2, 2]
    with torch.no_grad():
        for weight in head.parameters():
            weight.neg_()  # in place: the recording reads the new numbers
    same(recorded.generate(prompts[:2], 12), plain.generate(prompts[:2], 12))
    assert recorder.recorded == [1, 2, 2]
    for weight in head.parameters():
        weight.data = -weight.data  # elsewhere
    same(recorded.generate(prompts[:2], 12), plain.generate(prompts[:2], 12))
    assert recorder.recorded == [1, 2, 2, 2]


def test_numbers_of_an_earlier_call_do_not_spread(target, good_head, prompts):
    plain, recorded = pair(target, good_head, **MODES[0])
    recorded.generate(prompts[:2], 12)
    cache = recorded._drafter.cache
    with torch.inference_mode():
        for tensor in cache.tensors():
            tensor.fill_(float("nan"))
    same(recorded.generate(prompts[:2], 12), plain.generate(prompts[:2], 12))
    assert recorded._drafter.cache is cache


def test_rotary_tables_that_a_recording_reads_are_held(target, good_head, prompts):
    class Repeated:
        """Holds nothing of what a region reads, like a graph."""

        def record(self, region, inputs):
            return lambda: region(*inputs)

    _, recorded = pair(target, good_head, **MODES[0])
    recorded._recorder = Repeated()
    recorded.generate(prompts[:1], 8)
    tables = [weakref.ref(table) for table in good_head.rotary.tables]
    longer = 2 * len(good_head.rotary.tables[0])
    good_head.rotary(torch.tensor([longer - 1]))
    assert len(good_head.rotary.tables[0]) == longer and all(table() is not None for table in tables)


def test_a_call_inside_a_call_has_memory_of_its_own(target, good_head, prompts):
    plain, recorded = pair(target, good_head, num_steps=3)
    inner = []

    def call(index, tokens, reason):
        if not inner:
            inner.append(recorded.generate(prompts[3:], 10))

    outer = recorded.generate(prompts[:3], 20, on_tokens=call)
    assert len(inner) == 1 and recorded._recorder.replays
    same(outer, plain.generate(prompts[:3], 20))
    same(inner[0], plain.generate(prompts[3:], 10))


def test_switch(target, good_head):
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert choose_recorder("auto", cpu) is None and choose_recorder(False, cuda) is None
    for switch, fall_back in (("auto", True), (True, False)):
        recorder = choose_recorder(switch, cuda)
        assert isinstance(recorder, CudaGraphRecorder) and recorder.fall_back is fall_back
    with pytest.raises(DecodingError, match="CUDA device, found cpu"):
        PseudoSpeculativeGenerator(target, good_head, cuda_graph=True)
    with pytest.raises(DecodingError, match='"auto", True or False'):
        PseudoSpeculativeGenerator(target, good_head, cuda_graph="on")
    assert PlainGenerator(target)._recorder is None


class FakeCuda:
    """The parts of ``torch.cuda`` that a capture touches; ``fails`` is the error of the capture."""

    def __init__(self, monkeypatch, fails=None):
        self.events, self.fails = [], fails
        stream = SimpleNamespace(wait_stream=lambda other: self.events.append("wait"))
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: self)
        monkeypatch.setattr(torch.cuda, "graph", self.capture)

    @contextmanager
    def capture(self, graph, pool, capture_error_mode):
        self.events.append(("capture", pool))
        yield
        if self.fails is not None:
            raise self.fails

    def pool(self):
        return "the pool"

    def replay(self):
        self.events.append("replay")


def test_capture_warms_up_on_a_side_stream_and_shares_a_pool(monkeypatch):
    cuda, runs = FakeCuda(monkeypatch), []
    recorder = CudaGraphRecorder()
    replay = recorder.record(lambda x: runs.append(x) or (x + 1,), [torch.ones(2)])
    assert cuda.events == ["wait", "wait", ("capture", None)] and len(runs) == 4
    assert replay()[0] is replay()[0] and cuda.events[3:] == ["replay", "replay"] and len(runs) == 4
    recorder.record(lambda x: (x,), [torch.ones(2)])
    assert cuda.events[-1] == ("capture", "the pool")


def test_a_failed_capture_is_an_error_that_names_the_switch_or_a_warning(monkeypatch):
    FakeCuda(monkeypatch, RuntimeError("operation not permitted when stream is capturing\nmore"))
    with pytest.raises(DecodingError, match="not permitted when stream is capturing.*cuda_graph=False"):
        CudaGraphRecorder().record(lambda x: (x + 1,), [torch.ones(2)])
    place = torch.ones(2)
    with pytest.warns(UserWarning, match="without a CUDA graph.*capturing$"):
        replay = CudaGraphRecorder(fall_back=True).record(lambda x: (x + 1,), [place])
    place.fill_(5)
    assert replay()[0].tolist() == [6, 6]


def test_a_run_with_the_graph_on_is_refused_before_training(monkeypatch):
    """Without a CUDA device it would fail only after hours, when it is validated."""
    from modelopt_eagle.pipeline import check_cuda_graph
    from modelopt_eagle.recipe import Recipe

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    check_cuda_graph(Recipe())
    with pytest.raises(RecipeError, match="validation.cuda_graph is on.*set validation.cuda_graph: auto, or off"):
        check_cuda_graph(Recipe.model_validate({"validation": {"cuda_graph": "on"}}))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    check_cuda_graph(Recipe.model_validate({"validation": {"cuda_graph": "on"}}))
    with pytest.raises(RecipeError, match=r"model.device is not one \(cpu\)"):
        check_cuda_graph(Recipe.model_validate({"validation": {"cuda_graph": "on"}, "model": {"device": "cpu"}}))
