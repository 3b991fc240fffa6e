"""What a layer's projections read and give: two norms side by side, heads rotated; references, wiring and bytes."""

import importlib
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from modelopt_eagle.draft import DraftConfig, DraftVocab, fused, layers, projections
from modelopt_eagle.draft.algorithm import random_module
from modelopt_eagle.draft.eagle3.rollout import rollout
from modelopt_eagle.errors import DecodingError
from modelopt_eagle.kernels import norm_concat, norm_concat_work, rotate_heads, rotate_heads_work
from tests.kernels.test_training_kernels import script  # noqa: F401  a fixture


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


@pytest.mark.parametrize("normed", [True, False])
def test_norms_side_by_side_are_torchs_and_so_are_the_gradients(normed):
    embedding, state, by_state = drawn(3, 5, 12), drawn(3, 5, 12, seed=1), drawn(12, seed=2)
    by_embedding = drawn(12, seed=3) if normed else None
    halves = [nn.functional.rms_norm(x, (12,), w, 1e-3) if w is not None else x
              for x, w in ((embedding, by_embedding), (state, by_state))]  # fmt: skip
    expected = torch.cat(halves, -1)
    found = norm_concat(embedding, state, by_embedding, by_state, 1e-3)
    torch.testing.assert_close(found, expected)
    leaves = [leaf for leaf in (embedding, state, by_state, by_embedding) if leaf is not None]
    upstream = drawn(3, 5, 24, seed=4).detach()
    for one, other in zip(*(torch.autograd.grad(out, leaves, upstream) for out in (found, expected)), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(("pairs", "interleaved"), [(4, False), (4, True), (3, True), (2, False)])
def test_rotated_heads_are_those_of_the_plain_code(pairs, interleaved):
    x, angle = drawn(2, 3, 5, 8), drawn(2, 3, pairs, seed=1).detach()
    expected = projections.rotate(x, angle.cos(), angle.sin(), interleaved)
    found = rotate_heads(x, angle.cos(), angle.sin(), interleaved)
    torch.testing.assert_close(found, expected)
    rest = 8 - 2 * pairs
    assert torch.equal(found[..., :rest], x[..., :rest]) and not torch.equal(found[..., rest:], x[..., rest:])
    upstream = drawn(2, 3, 5, 8, seed=2).detach()
    torch.testing.assert_close(*(torch.autograd.grad(out, x, upstream)[0] for out in (found, expected)))


def test_results_have_the_dtype_that_is_asked_for():
    state, weight = drawn(2, 4).detach().bfloat16(), torch.ones(4)
    wide = norm_concat(state.float(), state, weight, weight, 1e-5, torch.bfloat16)
    turned = rotate_heads(drawn(2, 3, 4), torch.ones(2, 2), torch.zeros(2, 2), dtype=torch.float16)
    assert (wide.dtype, turned.dtype) == (torch.bfloat16, torch.float16)
    assert norm_concat(state.float(), state, None, weight, 1e-5).dtype == torch.bfloat16


def test_what_does_not_fit_is_refused(monkeypatch):
    state, weight = torch.zeros(2, 4), torch.ones(4)
    with pytest.raises(DecodingError, match=r"embedding must have shape \[2, 4\], found \[3, 4\]"):
        norm_concat(torch.zeros(3, 4), state, weight, weight, 1e-5)
    with pytest.raises(DecodingError, match="3 pairs do not fit into a head of 4"):
        rotate_heads(torch.zeros(2, 1, 4), torch.zeros(2, 3), torch.zeros(2, 3))
    with pytest.raises(DecodingError, match=r"cos must have shape \[2, any\], found \[1, 2\]"):
        rotate_heads(torch.zeros(2, 1, 4), torch.zeros(1, 2), torch.zeros(1, 2))
    for name in ("norm_concat", "rotate_heads"):
        module = importlib.import_module(f"modelopt_eagle.kernels.{name}")  # the package has the function there
        monkeypatch.setattr(module, "choose_backend", lambda backend, device: "triton")
    wide = torch.zeros(1, 8193)
    with pytest.raises(DecodingError, match="up to 8192 wide, found 8193"):
        norm_concat(wide, wide, None, wide[0], 1e-5)
    with pytest.raises(DecodingError, match="found 4 in torch.float64"):
        rotate_heads(torch.zeros(2, 1, 4, dtype=torch.float64), torch.zeros(2, 2), torch.zeros(2, 2))


LATENT = {"decoder_type": "kimik2", "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}


NORMED = {"norm_before_residual": True, "qk_norm": True}


@pytest.mark.parametrize("options", [{}, NORMED, {"embedding_norm": False}, LATENT])
def test_training_by_kernels_gives_what_it_gives_without(options, monkeypatch):
    config = DraftConfig(
        hidden_size=16, target_hidden_size=16, intermediate_size=24, num_attention_heads=2, num_hidden_layers=2,
        num_key_value_heads=2 if options is LATENT else 1, head_dim=8, vocab_size=48, draft_vocab_size=20,
        aux_layer_ids=(0, 1, 2), max_position_embeddings=64, rms_norm_eps=1e-5, rope_theta=1e4, **options,
    )  # fmt: skip
    module = random_module(config, DraftVocab.from_counts(torch.arange(48), 20), 0)
    given = drawn(2, 9, 16), drawn(2, 9, 48, seed=1)
    leaves = [*given, *(p for name, p in module.named_parameters() if not name.startswith(("lm_head", "embed")))]

    def trained():
        states = torch.stack(rollout(module, *given, 3).states)
        upstream = drawn(*states.shape, seed=2).detach()
        return states.detach(), torch.autograd.grad(states, leaves, upstream)

    plain, calls = trained(), []
    monkeypatch.setattr(fused, "choose_backend", lambda backend, device: "triton")
    for place, name in ((layers, "norm_concat"), (projections, "rotate_heads")):
        real = getattr(place, name)
        monkeypatch.setattr(place, name, lambda *a, real=real, name=name: calls.append(name) or real(*a))
    found = trained()
    torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-5)
    assert calls.count("norm_concat") == 3 and calls.count("rotate_heads") == 2 * 2 * 3  # steps; q and k of two layers
    calls.clear()
    with torch.no_grad():
        rollout(module, *given, 3)
    assert calls == []  # drafting and the walk run on torch's operations


def test_a_compiled_layer_leaves_the_fusion_to_the_compiler(monkeypatch):
    monkeypatch.setattr(fused, "choose_backend", lambda backend, device: "triton")
    monkeypatch.setattr(projections, "rotate_heads", lambda *a: pytest.fail("a kernel inside a compiled graph"))
    compiled = torch.compile(projections.rotate, backend="eager", fullgraph=True)
    assert compiled(drawn(2, 3, 4), torch.ones(2, 2), torch.zeros(2, 2)).shape == (2, 3, 4)


def test_the_work_by_hand():
    # 3 rows, 5 wide: embedding in 4 bytes, state and result in 2; two norms' weights, a float a row and half
    found = norm_concat_work(3, 5, 4, 2, 2)
    assert found["forward"].bytes == 3 * (5 * 4 + 5 * 2 + 10 * 2 + 8) + 2 * 5 * 4
    assert found["backward"].bytes == 3 * (5 * 4 + 5 * 2 + 10 * 2 + 8 + 5 * 2) + 4 * 5 * 4
    assert rotate_heads_work(3, 2, 8, 4, 2).bytes == 2 * 3 * 2 * 8 * 2 + 3 * 2 * 4 * 4


class Moved(TorchDispatchMode):
    """Bytes that operations read and write, views apart."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if not function.is_view:
            tensors = [x for x in torch.utils._pytree.tree_leaves((args, out)) if isinstance(x, torch.Tensor)]
            self.bytes += sum(x.nbytes for x in tensors if x.dim() == 3 and x.shape[1] > 1)  # cosines apart
        return out


def test_what_torchs_operations_move_is_what_the_benchmark_says(script):  # noqa: F811
    cases = importlib.import_module("layer_cases")
    for size in (cases.LayerSizes(6, 16, 3, 8, 4), cases.LayerSizes(6, 16, 3, 12, 4)):
        x, angle = torch.zeros(6, 3, size.dim, dtype=torch.bfloat16), torch.zeros(6, 4, dtype=torch.bfloat16)
        with Moved() as seen:
            projections.rotate(x, angle, angle, interleaved=size.dim > 8)
        case = size.turned_case()
        assert seen.bytes == case.apart["forward"] and case.apart["forward"] > 2 * case.work["forward"].bytes
    case = cases.LayerSizes(4096, 4096, 32, 128, 64).norms_case()
    assert case.apart["forward"] > 4 * case.work["forward"].bytes
    assert case.apart["backward"] > 4 * case.work["backward"].bytes


@pytest.mark.parametrize("number", [1, 5])
def test_other_ways_to_attend_are_held_against_the_reference(script, number):  # noqa: F811
    """Half of the tokens ask; keys and values of different widths."""
    cases = importlib.import_module("training_cases")
    kernel = cases.ATTENTION
    case = kernel.cases()[number]
    for name in ("flash and column", cases.FLEX):
        assert script.check(kernel, case, kernel.contestants[name], "cpu") is None, name
    wrong = kernel.contestants["flash and column"]
    other = cases.Contestant(lambda given: wrong.passes(replace(given, scale=given.scale * 1.1)))
    assert "forward differs" in script.check(kernel, case, other, "cpu")
