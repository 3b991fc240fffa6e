"""The capture buffer takes real rows only, by column blocks, and refuses what does not fit."""

import pytest
import torch

from modelopt_eagle.decoding import PseudoSpeculativeGenerator
from modelopt_eagle.decoding.capture_buffer import CaptureBuffer
from modelopt_eagle.errors import DecodingError, TargetError


def test_columns_rows_and_residuals():
    buffer = CaptureBuffer(12, 4, max_tokens=6, max_requests=2, num_nodes=3, aux_layer_ids=[9, 1, 11])
    assert buffer.layer_ids == (1, 9, 11) and buffer.data.shape == (6 + 3 * 2, 12)
    address = buffer.data.data_ptr()
    buffer.begin()
    outputs = {layer: torch.full((8, 4), float(layer)) for layer in buffer.layer_ids}  # 8 rows, 3 of them padding
    for layer, output in outputs.items():
        buffer.write(layer, output, 5, residual=torch.ones(8, 4) if layer == 9 else None)
    assert buffer.read(5)[0].tolist() == [1.0] * 4 + [10.0] * 4 + [11.0] * 4
    assert not buffer.data[5:].any()  # the graph's padding never came in
    assert buffer.read(5).data_ptr() == address
    assert buffer.wants(9) and not buffer.wants(2)


def test_equals_the_hooks_of_the_target(target):
    ids = torch.tensor([[5, 9, 33, 70]])
    expected = target.features(ids, None, (1, 3, 4)).aux_hidden[0]
    buffer = CaptureBuffer(target.num_layers, target.hidden_size, 4, 1, 1)  # the default layers of 8
    handles = [
        target.layers[k].register_forward_hook(lambda module, args, out, k=k: buffer.write(k, out[0], 4))
        for k in buffer.layer_ids
    ]
    target.model(ids)
    for handle in handles:
        handle.remove()
    assert buffer.layer_ids == (1, 3, 4) and torch.equal(buffer.read(4), expected)


def test_default_needs_six_layers_and_empty_switches_off():
    assert CaptureBuffer(6, 4, 1, 1, 1).layer_ids == (1, 2, 3)
    with pytest.raises(TargetError, match="6 layers"):
        CaptureBuffer(5, 4, 1, 1, 1)
    with pytest.raises(TargetError):
        CaptureBuffer(8, 4, 1, 1, 1, aux_layer_ids=[1, 1])
    off = CaptureBuffer(3, 4, 100, 10, 10, aux_layer_ids=[])
    assert not off.enabled and off.data.numel() == 0
    with pytest.raises(DecodingError, match="switched off"):
        off.read(1)


def test_too_small_or_too_few_is_an_error():
    buffer = CaptureBuffer(8, 4, 2, 1, 2, aux_layer_ids=[0, 5])
    with pytest.raises(DecodingError, match="do not fit a capture buffer of 4"):
        buffer.write(0, torch.zeros(9, 4), 5)
    with pytest.raises(DecodingError, match="4 rows were announced, its output has 3"):
        buffer.write(0, torch.zeros(3, 4), 4)
    with pytest.raises(DecodingError, match="not captured"):
        buffer.write(3, torch.zeros(3, 4), 3)
    with pytest.raises(DecodingError, match="expected"):
        buffer.write(0, torch.zeros(3, 5), 3)
    buffer.write(0, torch.zeros(3, 4), 3)
    with pytest.raises(DecodingError, match=r"fewer in this pass: \{5: 0\}"):
        buffer.read(3)
    buffer.write(5, torch.zeros(3, 4), 3)
    buffer.read(3)
    buffer.begin()  # the rows of the pass before no longer count
    with pytest.raises(DecodingError):
        buffer.read(1)
    with pytest.raises(DecodingError, match="max_tokens"):
        CaptureBuffer(8, 4, 0, 1, 1)


def test_a_replayed_graph_says_how_many_rows_are_real():
    """Its copies are replayed, the bookkeeping of ``write`` is not."""
    buffer = CaptureBuffer(8, 4, 6, 1, 1, aux_layer_ids=[0, 5])
    buffer.begin()
    buffer.data[:6] = 1.0  # what the graph copies, three of its rows being padding
    with pytest.raises(DecodingError, match="fewer in this pass"):
        buffer.read(3)
    buffer.replayed(3)
    assert buffer.read(3).shape == (3, 8)
    with pytest.raises(DecodingError, match=r"fewer in this pass: \{0: 3, 5: 3\}"):
        buffer.read(4)
    with pytest.raises(DecodingError, match="8 rows do not fit a capture buffer of 7"):
        buffer.replayed(8)


def test_the_targets_own_capture_fills_a_buffer(target):
    """``Target.capture(into=...)``: the same values at an address that never changes; too small is an error."""
    buffer = CaptureBuffer(8, target.hidden_size, max_tokens=12, max_requests=2, num_nodes=1, aux_layer_ids=[7, 0])
    address = buffer.data.data_ptr()
    with target.capture((0, 7), into=buffer) as captured:
        for shape in ((2, 6), (1, 3)):
            ids = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(sum(shape)))
            target.model(ids)
            assert torch.equal(captured.aux_hidden, target.features(ids, None, (0, 7)).aux_hidden)
            assert captured.aux_hidden.data_ptr() == address
        with pytest.raises(DecodingError, match="15 rows do not fit a capture buffer of 14"):
            target.model(torch.zeros(1, 15, dtype=torch.int64))
    with pytest.raises(TargetError, match="leave out gradient or into"):
        target.capture((0, 7), gradient=True, into=buffer)


@pytest.mark.parametrize("options", [dict(num_steps=3), dict(mode="tree", topk=2, depth=3)], ids=["chain", "tree"])
def test_a_run_has_one_buffer_that_strangers_do_not_reach(target, good_head, prompts, monkeypatch, options):
    """The generator allocates features once, and a callback that runs the model itself does not spoil them."""
    made, real = [], CaptureBuffer.__init__

    def count(self, *arguments, **more):
        made.append(self)
        real(self, *arguments, **more)

    generator = PseudoSpeculativeGenerator(target, good_head, **options)
    expected = generator.generate(prompts, 20)
    monkeypatch.setattr(CaptureBuffer, "__init__", count)

    def nosy(request, tokens, reason):
        target.model(torch.full((1, 40), 5))
        assert not any(m._forward_hooks for m in target.layers)  # hooks hang during the generator's passes only

    found = generator.generate(prompts, 20, on_tokens=nosy)
    assert found.tokens == expected.tokens and found.accepted_lengths == expected.accepted_lengths
    assert len(made) == 1
    longest = max(map(len, prompts))
    assert made[0].rows == len(prompts) * longest + len(prompts) * generator.plan.num_nodes
