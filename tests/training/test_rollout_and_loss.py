"""The fast rollout and loss against the plain ones, in value and gradient, and the rules of ``docs/design.md``."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from modelopt_eagle.draft import DraftConfig, DraftVocab, EagleModule
from modelopt_eagle.draft.attention import MAX_QUERIES, QueryPlan, column_attention, dense_column_attention
from modelopt_eagle.draft.conventions import CONVENTIONS
from modelopt_eagle.errors import CheckpointError
from modelopt_eagle.training import distillation_loss, rollout
from modelopt_eagle.training.metrics import Meter
from modelopt_eagle.training.reference import reference_loss, reference_rollout

V, VD, H = 40, 16, 32


def make_module(**changes) -> EagleModule:
    torch.manual_seed(0)
    options = dict(
        hidden_size=H, target_hidden_size=H, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, vocab_size=V, draft_vocab_size=VD, aux_layer_ids=(1, 3, 4), rope_theta=500.0,
    )  # fmt: skip
    module = EagleModule(DraftConfig(**{**options, **changes}))
    module.set_vocab(DraftVocab.from_target_ids(torch.arange(1, 2 * VD, 2), V))
    for name, parameter in module.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)  # ones would hide a norm applied twice or not at all
    return module


def make_batch(batch=2, length=14, seed=1):
    generator = torch.Generator().manual_seed(seed)
    embeddings = torch.randn(batch, length, H, generator=generator)
    aux = torch.randn(batch, length, 3 * H, generator=generator)
    logits = 3 * torch.randn(batch, length, V, generator=generator)
    supervised = torch.rand(batch, length, generator=generator) < 0.6
    documents = torch.tensor([[0] * 5 + [1] * 9, [2] * 11 + [3] * 3])[:batch]
    return embeddings, aux, logits, supervised, documents


MLA = dict(decoder_type="kimik2", num_key_value_heads=4, head_dim=12, q_lora_rank=10, kv_lora_rank=8,
           qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6)  # fmt: skip
FLAGS = [{}, {"norm_before_residual": True}, {"norm_before_fc": True}, {"fc_norm": True}, {"norm_output": True},
         {"attention_bias": True}, MLA, {**MLA, "q_lora_rank": None},
         {"qk_norm": True}, {"sliding_window": 5}, {"sliding_window": 4, **MLA}, {"last_norm": False},
         {"embedding_norm": False}]  # fmt: skip


@pytest.mark.parametrize("flags", FLAGS, ids=lambda f: "+".join(map(str, f)) or "plain")
@pytest.mark.parametrize("packed", [False, True])
def test_rollout_equals_the_plain_one_in_value_and_gradient(flags, packed):
    module = make_module(**flags)
    embeddings, aux, _, _, documents = make_batch()
    documents = documents if packed else None
    fast_aux, slow_aux = aux.clone().requires_grad_(), aux.clone().requires_grad_()
    fast = rollout(module, embeddings, fast_aux, 4, documents).hidden
    slow = reference_rollout(module, embeddings, slow_aux, 4, documents)
    torch.testing.assert_close(fast, slow, atol=1e-5, rtol=1e-5)
    weight = torch.randn(fast.shape, generator=torch.Generator().manual_seed(5))
    parameters = [p for n, p in module.named_parameters() if not n.startswith("lm_head")]
    grads_fast = torch.autograd.grad((fast * weight).sum(), [fast_aux, *parameters])
    grads_slow = torch.autograd.grad((slow * weight).sum(), [slow_aux, *parameters])
    for a, b in zip(grads_fast, grads_slow, strict=True):
        torch.testing.assert_close(a, b, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("column", [0, 3])
def test_column_attention_equals_the_dense_one_and_passes_gradcheck(column, monkeypatch):
    monkeypatch.setitem(MAX_QUERIES, "cpu", 3)
    generator = torch.Generator().manual_seed(0)
    rows = torch.tensor([0, 2, 3, 4, 6, 7, 8])
    plan = QueryPlan.make(rows, torch.tensor([0, 0, 3, 3, 3, 3, 3]))
    assert len(plan.chunks) > 1
    shapes = [(7, 4, 5), (9, 2, 5), (9, 2, 6), (7, column, 2, 5), (7, column, 2, 6)]
    tensors = [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]
    fast = column_attention(*tensors, plan, 0.4)
    torch.testing.assert_close(fast.double(), dense_column_attention(*tensors, plan, 0.4), atol=1e-6, rtol=1e-6)
    weight = torch.randn(fast.shape, generator=generator, dtype=torch.float64)
    fast_grads = torch.autograd.grad((fast * weight).sum(), tensors)
    slow_grads = torch.autograd.grad((dense_column_attention(*tensors, plan, 0.4) * weight).sum(), tensors)
    for a, b in zip(fast_grads, slow_grads, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("convention", list(CONVENTIONS))
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("teacher", ["logits", "hidden"])
def test_loss_equals_the_plain_one_in_value_and_gradient(convention, packed, teacher, monkeypatch):
    monkeypatch.setattr("modelopt_eagle.training.loss_plan.CHUNK", 5)  # several chunks, the last one not full
    module = make_module()
    embeddings, aux, logits, supervised, documents = make_batch()
    documents = documents if packed else None
    given = {"target_logits": logits}
    if teacher == "hidden":
        hidden, head = torch.randn(2, 14, 24), torch.randn(V, 24)
        logits = hidden @ head.T
        given = {"target_hidden": hidden, "target_lm_head": head}
    fast = distillation_loss(
        rollout(module, embeddings, aux, 3, documents, supervised=supervised, convention=convention),
        module, supervised, **given, convention=convention,
    )  # fmt: skip
    slow = reference_loss(
        reference_rollout(module, embeddings, aux, 3, documents), module, supervised, logits,
        convention=convention, document_ids=documents,
    )  # fmt: skip
    for name in ("loss", "per_step", "valid_counts", "top1_hits", "asked_counts"):
        torch.testing.assert_close(getattr(fast, name), getattr(slow, name), atol=1e-5, rtol=1e-5)
    parameters = list(module.parameters())
    fast_grads = torch.autograd.grad(fast.loss, parameters)
    slow_grads = torch.autograd.grad(slow.loss, parameters)
    for (name, _), a, b in zip(module.named_parameters(), fast_grads, slow_grads, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("option", ["labels", "in_vocab_only"])
def test_hard_labels_and_in_vocab_only_equal_the_plain_ones(option, monkeypatch):
    for place in ("loss", "loss_plan"):
        monkeypatch.setattr(f"modelopt_eagle.training.{place}.CHUNK", 5)
    module = make_module()
    embeddings, aux, logits, supervised, documents = make_batch()
    tokens = torch.randint(0, V, (2, 14), generator=torch.Generator().manual_seed(3))
    extra = {"labels": tokens} if option == "labels" else {"in_vocab_only": True}
    fast = distillation_loss(rollout(module, embeddings, aux, 3, documents), module, supervised, logits, **extra)
    slow = reference_loss(
        reference_rollout(module, embeddings, aux, 3, documents), module, supervised, logits,
        document_ids=documents, **extra,
    )  # fmt: skip
    torch.testing.assert_close(fast.loss, slow.loss)
    assert torch.equal(fast.valid_counts, slow.valid_counts) and torch.equal(fast.asked_counts, slow.asked_counts)
    kept = distillation_loss(rollout(module, embeddings, aux, 3, documents), module, supervised, logits)
    assert int(fast.valid_counts.sum()) < int(kept.valid_counts.sum())
    assert torch.equal(fast.asked_counts, kept.asked_counts) and torch.equal(kept.asked_counts, kept.valid_counts)


@pytest.mark.parametrize("in_vocab_only", [False, True])
def test_accuracy_counts_what_the_head_cannot_say_as_missed(in_vocab_only):
    """B134: ten positions, three of them outside the draft vocabulary, a head that is right wherever it can be."""
    module = make_module()
    embeddings, aux, _, _, _ = make_batch(1, 12)
    output = rollout(module, embeddings, aux, 1)
    draft = module.target_ids[module.lm_head(output.states[0]).argmax(-1)]  # [11] what the head says at anchors 0..10
    logits = torch.zeros(1, 12, V)
    logits[0, torch.arange(1, 12), draft] = 1.0  # its teacher says the same,
    logits[0, [2, 5, 9]] = torch.eye(V)[0]  # but token 0, which is outside, three times
    everything = torch.ones(1, 12, dtype=torch.bool)
    out = distillation_loss(output, module, everything, logits, in_vocab_only=in_vocab_only)
    assert out.asked_counts.tolist() == [10] and out.valid_counts.tolist() == [7 if in_vocab_only else 10]
    assert out.top1_hits.tolist() == [7]
    meter = Meter(0.9, SimpleNamespace(reduce=lambda value, how: value))
    meter.steps = 1
    meter.add(out)
    assert meter.take()["accuracy"] == [pytest.approx(0.7)]


def test_recomputed_forward_gives_the_same_gradients():
    """B22: nothing in the step changes its inputs, so it may be run a second time in the backward pass."""
    module = make_module()
    embeddings, aux, logits, supervised, documents = make_batch()

    def loss(aux):
        output = rollout(module, embeddings, aux, 3, documents, supervised=supervised)
        return distillation_loss(output, module, supervised, logits).loss

    inputs = [aux.clone().requires_grad_() for _ in range(2)]
    plain = torch.autograd.grad(loss(inputs[0]), [inputs[0], *module.parameters()])
    again = checkpoint(loss, inputs[1], use_reentrant=False)
    for a, b in zip(plain, torch.autograd.grad(again, [inputs[1], *module.parameters()]), strict=True):
        assert torch.equal(a, b)


def test_lk_loss_gradient_is_that_of_its_formula():
    module = make_module()
    embeddings, aux, logits, supervised, _ = make_batch()
    output = rollout(module, embeddings, aux, 2)
    fast = distillation_loss(output, module, supervised, logits, loss="lk", lk_eta=3.0)
    total = 0.0
    for k in range(2):
        keep = torch.zeros(2, 14, dtype=torch.bool)
        keep[:, : 12 - k] = supervised[:, 2 + k :]
        p = torch.zeros(2, 14, VD)
        p[:, : 13 - k] = logits[:, 1 + k :, module.target_ids].softmax(-1)
        q = module.lm_head(output.hidden[k]).log_softmax(-1)
        p, q = p[keep], q[keep]
        weight = torch.exp(-3.0 * torch.minimum(p, q.exp()).sum(-1).mean()).detach()
        term = weight * -(p * q).sum(-1) + (1 - weight) * 0.5 * (p - q.exp()).abs().sum(-1)
        total = total + 0.9**k * term.mean()
    torch.testing.assert_close(fast.loss, total)
    parameters = list(module.parameters())
    fast_grads = torch.autograd.grad(fast.loss, parameters, retain_graph=True)
    slow_grads = torch.autograd.grad(total, parameters)
    for a, b in zip(fast_grads, slow_grads, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_counts_lose_one_label_a_step_and_a_document():
    """B15, B20: all supervised, 5 tokens: 3, 2, 1 labels (x_{i+2+k} must exist); per document when packed."""
    module = make_module()
    embeddings, aux, logits, _, _ = make_batch(1)
    everything = torch.ones(1, 5, dtype=torch.bool)
    out = distillation_loss(rollout(module, embeddings[:, :5], aux[:, :5], 3), module, everything, logits[:, :5])
    assert out.valid_counts.tolist() == [3, 2, 1]
    modelopt = distillation_loss(
        rollout(module, embeddings[:, :5], aux[:, :5], 3), module, everything, logits[:, :5], convention="modelopt"
    )
    assert modelopt.valid_counts.tolist() == [4, 3, 2]
    documents = torch.tensor([[0] * 5 + [1] * 9])
    everything = torch.ones(1, 14, dtype=torch.bool)
    out = distillation_loss(rollout(module, embeddings, aux, 3, documents), module, everything, logits)
    assert out.valid_counts.tolist() == [3 + 7, 2 + 6, 1 + 5]


def test_gradient_reaches_exactly_the_anchors_whose_label_is_supervised():
    """B14: reply at tokens 3..5 of 8; at step 0 anchor i learns x_{i+2}, so anchors 1, 2, 3."""
    module = make_module()
    embeddings, aux, logits, _, _ = make_batch(1, 8)
    supervised = torch.zeros(1, 8, dtype=torch.bool)
    supervised[0, 3:6] = True
    output = rollout(module, embeddings, aux, 1)
    output.states[0].retain_grad()
    distillation_loss(output, module, supervised, logits).loss.backward()
    touched = output.rows[output.states[0].grad.abs().sum(-1) > 0]
    assert touched.tolist() == [1, 2, 3]


def test_a_document_is_untouched_by_its_neighbour():
    """B19: changing document A leaves the hidden states of B bit-identical."""
    module = make_module()
    embeddings, aux, _, _, documents = make_batch()
    before = rollout(module, embeddings, aux, 3, documents).hidden
    embeddings[0, :5], aux[0, :5] = 7.0, -3.0
    after = rollout(module, embeddings, aux, 3, documents).hidden
    assert torch.equal(before[:, 0, 5:], after[:, 0, 5:])
    assert not torch.equal(before[:, 0, :3], after[:, 0, :3])


def test_padding_changes_no_loss():
    """B17: the same supervised tokens with more padding give the same loss."""
    module = make_module()
    embeddings, aux, logits, supervised, _ = make_batch(1, 14)
    ids = torch.zeros(1, 14, dtype=torch.int64)
    short = distillation_loss(rollout(module, embeddings, aux, 3, ids), module, supervised, logits).loss
    pad = torch.nn.functional.pad
    ids, supervised = pad(ids, (0, 9), value=-1), pad(supervised, (0, 9), value=True)
    embeddings, aux, logits = (pad(x, (0, 0, 0, 9), value=5.0) for x in (embeddings, aux, logits))
    long = distillation_loss(rollout(module, embeddings, aux, 3, ids), module, supervised, logits).loss
    torch.testing.assert_close(short, long)


def test_restricting_the_anchors_changes_nothing_counted():
    module = make_module()
    embeddings, aux, logits, supervised, documents = make_batch()
    full = rollout(module, embeddings, aux, 3, documents)
    part = rollout(module, embeddings, aux, 3, documents, supervised=supervised)
    assert len(part.rows) < len(full.rows)
    a = distillation_loss(full, module, supervised, logits)
    b = distillation_loss(part, module, supervised, logits)
    torch.testing.assert_close(a.loss, b.loss)
    assert torch.equal(a.valid_counts, b.valid_counts) and torch.equal(a.top1_hits, b.top1_hits)


def test_two_layers_see_the_first_layers_keys_of_every_token():
    module = make_module(num_hidden_layers=2)
    embeddings, aux, _, supervised, documents = make_batch()
    full = rollout(module, embeddings, aux, 3, documents).hidden
    part = rollout(module, embeddings, aux, 3, documents, supervised=supervised)
    for step in range(3):
        exists = part.documents.exists(part.rows, step + 1)
        flat = full[step].flatten(0, 1)
        torch.testing.assert_close(part.states[step][exists], flat[part.rows[exists]])


def test_mixed_states_use_the_true_feature_of_the_position():
    """With a share of 1, step k of anchor i starts from fuse(a_{i+k}), never from a later token."""
    module = make_module()
    embeddings, aux, _, _, documents = make_batch()
    mixed = rollout(module, embeddings, aux, 2, documents, mix_hidden_states=1.0).hidden
    assert not torch.allclose(mixed[1], rollout(module, embeddings, aux, 2, documents).hidden[1])
    aux_later = aux.clone()
    aux_later[0, 7:] += 1.0
    again = rollout(module, embeddings, aux_later, 2, documents, mix_hidden_states=1.0).hidden
    assert torch.equal(mixed[1, 0, 5:6], again[1, 0, 5:6])  # anchor 5 at step 1 reads a_6, not a_7
    assert not torch.equal(mixed[1, 0, 6], again[1, 0, 6])


def test_given_normalizers_make_micro_batches_add_up():
    """B17, B109: two micro-batches with the global count give the gradient of the whole batch."""
    module = make_module()
    embeddings, aux, logits, supervised, documents = make_batch()
    whole = distillation_loss(rollout(module, embeddings, aux, 3, documents), module, supervised, logits)
    parts = [
        distillation_loss(
            rollout(module, embeddings[b : b + 1], aux[b : b + 1], 3, documents[b : b + 1]), module,
            supervised[b : b + 1], logits[b : b + 1], normalizers=whole.valid_counts,
        )
        for b in range(2)
    ]  # fmt: skip
    torch.testing.assert_close(whole.loss, parts[0].loss + parts[1].loss)


def test_an_unset_map_and_bad_shapes_are_refused():
    module = EagleModule(make_module().config)
    embeddings, aux, logits, supervised, _ = make_batch()
    with pytest.raises(CheckpointError, match="never set"):
        distillation_loss(rollout(module, embeddings, aux, 1), module, supervised, logits)
    with pytest.raises(ValueError, match=r"aux_hidden must be \[2, 14, 96\]"):
        rollout(module, embeddings, aux[..., :64], 1)
    with pytest.raises(ValueError, match="at least one step"):
        rollout(module, embeddings, aux, 0)
    with pytest.raises(ValueError, match="known are served"):
        distillation_loss(rollout(make_module(), embeddings, aux, 1), make_module(), supervised, logits, convention="x")
    module = make_module()
    output = rollout(module, embeddings, aux, 1)
    with pytest.raises(ValueError, match=r"supervised must be \[2, 14\], found \[2, 5\]"):
        rollout(module, embeddings, aux, 1, supervised=supervised[:, :5])
    with pytest.raises(ValueError, match=r"supervised must begin with \[2, 14\]"):
        distillation_loss(output, module, supervised.T, logits)
    with pytest.raises(ValueError, match="target_logits must begin with"):
        distillation_loss(output, module, supervised, logits[:, 1:])
    with pytest.raises(ValueError, match="target_logits must end with"):
        distillation_loss(output, module, supervised, logits[..., 1:])
    with pytest.raises(ValueError, match="target_lm_head must have a row"):
        distillation_loss(output, module, supervised, target_hidden=aux[..., :32], target_lm_head=torch.ones(7, 32))
