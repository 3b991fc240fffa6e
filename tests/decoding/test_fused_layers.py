"""Decoder layers of known kinds in few operations: the layers' own numbers, lent while decoding, others untouched."""

import pytest
import torch
import transformers
from heads import make_head
from torch.utils._python_dispatch import TorchDispatchMode

from modelopt_eagle.decoding import PlainGenerator, PseudoSpeculativeGenerator, cpu_product
from modelopt_eagle.decoding.cpu_linear import FastLinears
from modelopt_eagle.decoding.fused_layers import FusedLayer
from modelopt_eagle.decoding.target_runner import TargetRunner
from modelopt_eagle.target.model import Target

SIZES = dict(
    vocab_size=128, hidden_size=256, intermediate_size=320, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=64, max_position_embeddings=128, pad_token_id=0, eos_token_id=None,
)  # fmt: skip
FAMILIES = {
    "llama": ("Llama", {}),
    "llama, biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, relu, no groups": ("Llama", {"hidden_act": "relu", "num_key_value_heads": 4}),
    "mistral, window": ("Mistral", {"sliding_window": 5}),
    "qwen2, some biases": ("Qwen2", {}),
    "qwen3, norms of heads": ("Qwen3", {}),
    "gemma": ("Gemma", {"hidden_activation": "gelu_pytorch_tanh", "head_dim": 128}),
}
PREFIX = [[5, 9, 33, 70, 8, 1, 2, 3], [100, 3, 50]]


def build(family, options):
    torch.manual_seed(3)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **options})
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for weight in model.parameters():  # biases and norms away from 0 and 1
            weight.add_(torch.randn_like(weight) * 0.03)
    return Target(model, None, name=family)


def lent(target):
    return [layer for layer in target.layers if isinstance(layer.__dict__.get("forward"), FusedLayer)]


def passes(target):
    """Logits and features of a prefill, one token a row, and a tree: of one row, and of rows of several lengths."""
    found, sees = [], torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]).bool()[None]
    for prefix in (PREFIX[:1], PREFIX):
        lengths, rows = [len(row) for row in prefix], len(prefix)
        with torch.inference_mode(), TargetRunner(target, (0, 1), 24, 4) as runner:
            logits, aux = runner.prefill(torch.tensor([row + [0] * (8 - len(row)) for row in prefix]), lengths)
            found += [logits, *(states[:length].clone() for states, length in zip(aux, lengths, strict=True))]
            one = torch.full((rows, 1), 7), torch.ones(1, 1, 1).bool(), torch.zeros(1, 1).long()
            found += [states.clone() for states in runner.verify(one[0], lengths, *one[1:])]
            lengths = [length + 1 for length in lengths]
            tree = torch.tensor([[11, 12, 13, 14]] * rows), torch.tensor([[0, 1, 1, 2]])
            found += [states.clone() for states in runner.verify(tree[0], lengths, sees, tree[1])]
            found += [
                pool[row, :, :length].clone() for pool in runner.cache.tensors() for row, length in enumerate(lengths)
            ]
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_numbers_are_the_layers_own(family, monkeypatch):
    target = build(*FAMILIES[family])
    own = passes(target)
    for blas_rows, block_rows, pack_rows in ((0, 0, 0), (2, 0, 0), (3, 9, 4 if cpu_product.packs_for_mkl() else 0)):
        monkeypatch.setattr(cpu_product, "BLAS_ROWS", blas_rows)
        monkeypatch.setattr(cpu_product, "BLOCK_ROWS", block_rows)
        monkeypatch.setattr(cpu_product, "PACK_ROWS", pack_rows)
        for pack in (True, False):
            fast = FastLinears(target.model, pack)
            with torch.inference_mode(), fast.use():
                assert len(lent(target)) == 3
                for mine, theirs in zip(passes(target), own, strict=True):
                    torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=2e-5)
            assert not lent(target)


def test_text_and_acceptance_are_those_without(monkeypatch):
    target = build(*FAMILIES["qwen3, norms of heads"])
    head = make_head(target, aux_layer_ids=(0, 1, 2))
    for options in (dict(num_steps=3), dict(mode="tree", topk=2, depth=2)):
        found = [
            PseudoSpeculativeGenerator(target, head, **options, fast_linear=switch).generate(PREFIX, 12)
            for switch in (True, False)
        ]
        assert found[0].tokens == found[1].tokens and found[0].accepted_lengths == found[1].accepted_lengths


class Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.count += 1
        return operator(*args, **(kwargs or {}))


def test_a_step_runs_few_operators(monkeypatch):
    """Outside inference mode, so that operators made of others are counted by their parts."""
    monkeypatch.setattr(cpu_product, "BLAS_ROWS", 2)
    target = build(*FAMILIES["llama"])
    counts = []
    for pack in (None, True):
        with torch.no_grad(), TargetRunner(target, (), 24, 1) as runner:
            stack = FastLinears(target.model, pack).use() if pack else torch.no_grad()
            with stack:
                runner.prefill(torch.tensor(PREFIX[:1]), [8])
                with Operators() as operators:
                    runner.verify(torch.tensor([[7]]), [8], torch.ones(1, 1, 1).bool(), torch.zeros(1, 1).long())
        counts.append(operators.count)
    assert counts[1] < 0.75 * counts[0], counts


OTHERS = {"Gemma2": {}, "Granite": {"residual_multiplier": 0.5}, "Olmo2": {}}


@pytest.mark.parametrize("family", OTHERS)
def test_other_kinds_keep_their_forward(family):
    target = build(family, OTHERS[family])
    with FastLinears(target.model, True).use():
        assert not lent(target)


def test_adapted_hooked_and_replaced_parts_keep_their_forward():
    class Adapted(torch.nn.Linear):
        pass

    target = build(*FAMILIES["llama"])
    first, second, third = target.layers
    seen = []
    first.self_attn.q_proj.register_forward_hook(lambda *a: seen.append(1))
    second.mlp.up_proj = Adapted(256, 320, bias=False)
    fast = FastLinears(target.model, True)
    with torch.inference_mode(), fast.use():
        assert lent(target) == [third]
        passes(target)
        assert seen
        own = third.mlp.forward = third.mlp.forward
    with fast.use():
        assert not lent(target) and third.mlp.forward is own
    third.mlp.__dict__.pop("forward")
    third.register_forward_hook(lambda *a: seen.append(2))  # of the layer itself: it runs around either forward
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *a: None)
    try:
        with fast.use():
            assert not lent(target)
    finally:
        handle.remove()
    with torch.inference_mode(), fast.use():
        assert lent(target) == [third]
        passes(target)
    assert 2 in seen


def test_a_layer_that_does_more_under_the_same_name_keeps_its_forward(monkeypatch):
    """The trial: another release may change a layer of this name."""
    target = build(*FAMILIES["llama"])
    kind = type(target.layers[0])
    own = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, *a, **k: own(self, *a, **k) * 1.01)
    with FastLinears(target.model, True).use():
        assert not lent(target)
    monkeypatch.setattr(kind, "forward", lambda self, hidden_states, cache: hidden_states)
    with FastLinears(target.model, True).use():
        assert not lent(target)


def test_lent_for_the_call_only_also_after_an_exception():
    target, seen = build(*FAMILIES["llama"]), []
    generator = PlainGenerator(target, fast_linear=True)

    def look(*arguments):
        seen.append(len(lent(target)))
        if len(seen) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generator.generate(PREFIX, 8, on_tokens=look)
    assert seen == [3, 3] and not any("forward" in part.__dict__ for part in target.model.modules())


def test_other_calls_while_lent_take_the_layers_own():
    target, ids = build(*FAMILIES["llama"]), torch.tensor(PREFIX[:1])
    with torch.no_grad():
        own = target.model(ids).logits
        answer = target.model.generate(ids, max_new_tokens=6, do_sample=False)
    with FastLinears(target.model, True).use():
        with torch.no_grad():
            torch.testing.assert_close(target.model(ids).logits, own, atol=2e-5, rtol=0)
            assert torch.equal(target.model.generate(ids, max_new_tokens=6, do_sample=False), answer)
        target.model.requires_grad_(True)(ids).logits.sum().backward()
    assert target.layers[0].self_attn.q_proj.weight.grad is not None


def test_changed_weights_are_read_anew():
    target = build(*FAMILIES["qwen2, some biases"])
    fast = FastLinears(target.model, True)
    with torch.inference_mode(), fast.use():
        before = passes(target)[0].clone()
    copies = {key: copy.packed for key, copy in fast._packed.items()}
    with fast.use():
        assert all(fast._packed[key].packed is packed for key, packed in copies.items())
    attention = target.layers[1].self_attn
    for weight in (attention.k_proj.weight, attention.v_proj.bias, target.layers[0].input_layernorm.weight):
        weight.data = weight.data + torch.randn_like(weight) / 8
    own = passes(target)[0].clone()
    with torch.inference_mode(), fast.use():
        torch.testing.assert_close(passes(target)[0], own, atol=2e-5, rtol=2e-5)
    assert (own - before).abs().max() > 1e-3
