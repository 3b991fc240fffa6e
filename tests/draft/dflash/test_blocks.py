"""Blocks: attention against its dense reference, the pass against the equations, training rows against served ones."""

import pytest
import torch

from modelopt_eagle.draft import DraftVocab
from modelopt_eagle.draft.algorithm import random_module
from modelopt_eagle.draft.attention import QueryPlan
from modelopt_eagle.draft.dflash import block
from modelopt_eagle.draft.dflash.block import (
    BlockSettings,
    block_attention,
    block_drafts,
    block_states,
    dense_block_attention,
    dpace_weights,
    plan_blocks,
    run_blocks,
)
from modelopt_eagle.draft.dflash.config import DFlashConfig
from modelopt_eagle.draft.dflash.draft_loop import BlockDrafter
from modelopt_eagle.draft.documents import Documents, WholeAxis
from modelopt_eagle.draft.plan import DraftPlan
from modelopt_eagle.draft.predictions import BatchView
from modelopt_eagle.draft.projections import rotate

V, VD, H, HT, A = 48, 20, 16, 12, 2


def make_head(causal=False, layers=2, size=4, **fields):
    config = DFlashConfig(
        hidden_size=H, target_hidden_size=HT, intermediate_size=24, num_attention_heads=4, num_key_value_heads=2,
        head_dim=6, num_hidden_layers=layers, vocab_size=V, draft_vocab_size=VD, aux_layer_ids=(1, 3), block_size=size,
        causal=causal, mask_token_id=5, own_embedding=True, **fields,
    )  # fmt: skip
    head = random_module(config, DraftVocab.from_counts(torch.arange(V), VD), 3)
    with torch.no_grad():
        for layer in head.layers:  # other norms a layer: an engine that mixes them up would show
            layer.self_attn.k_norm.weight.uniform_(0.5, 2.0)
    return head.eval()


def make_view(head, lengths=(9, 4, 12), prompt=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    ids = torch.randint(V, (total,), generator=generator)
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    place = torch.cat([torch.arange(n) for n in lengths])
    return BatchView(
        input_ids=ids,
        supervised=place >= prompt,
        documents=Documents.make(1, total, documents[None], "cpu"),
        aux_hidden=torch.randn(total, A * HT, generator=generator),
        final_hidden=None,
        embed=lambda places: head.embed(ids[places]),
        length=total,
        axis=WholeAxis(total, "cpu"),
        embed_ids=head.embed,
    )


def settings(size=4, anchors=512, **fields):
    given = {"gamma": 2.0, "dpace": False, "dpace_alpha": 0.5, "convention": "served", **fields}
    return BlockSettings(block_size=size, anchors=anchors, **given)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("heads", "groups", "size", "blocks"), [(4, 2, 4, 7), (3, 1, 2, 1), (6, 6, 5, 13)])
def test_one_operation_equals_the_dense_reference_in_values_and_gradients(causal, heads, groups, size, blocks):
    generator = torch.Generator().manual_seed(blocks)
    rows = torch.randperm(30, generator=generator)[:blocks].sort().values
    plan = QueryPlan.make(rows, torch.where(rows >= 11, 11, 0))
    shapes = [(blocks, size, heads, 5), (30, groups, 5), (30, groups, 5), (blocks, size, groups, 5)]
    one = [torch.randn(s, generator=generator, requires_grad=True) for s in (*shapes, shapes[-1])]
    two = [t.detach().clone().requires_grad_() for t in one]
    weight = torch.randn(blocks, size, heads, 5, generator=generator)
    fast, plain = (f(*t, plan, 0.4, causal) for f, t in ((block_attention, one), (dense_block_attention, two)))
    torch.testing.assert_close(fast, plain, rtol=1e-5, atol=1e-5)
    (fast * weight).sum().backward()
    (plain * weight).sum().backward()
    for a, b in zip(one, two, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)


def one_block(head, ids, aux, root, size, causal):
    """The equations, a block at a time: context ``0 .. len(aux)-1``, then the root and the masks, written plainly."""
    count = len(aux)
    fused = head.hidden_norm(head.fc(aux))  # [S,H]
    state = head.embed(torch.tensor([root, *[head.config.mask_token_id] * (size - 1)]))  # [B,H]
    where = torch.arange(count), torch.arange(count, count + size)
    for layer in head.layers:
        attention, x = layer.self_attn, layer.input_layernorm(state)

        def heads(matrix, norm, values, places, number, attention=attention):
            y = norm(matrix(values).view(len(values), number, attention.dim))
            return y if places is None else rotate(y, *head.rotary(places))

        none = torch.nn.Identity()
        q = heads(attention.q_proj, attention.q_norm, x, where[1], attention.heads)
        k = torch.cat([heads(attention.k_proj, attention.k_norm, v, p, attention.kv_heads)
                       for v, p in zip((fused, x), where, strict=True)])  # fmt: skip
        v = torch.cat([heads(attention.v_proj, none, u, None, attention.kv_heads) for u in (fused, x)])
        out = torch.zeros(size, attention.heads, attention.dim)
        for slot in range(size):
            last = count + (slot if causal else size - 1)
            for h in range(attention.heads):
                g = h * attention.kv_heads // attention.heads
                weights = (k[: last + 1, g] @ q[slot, h] * attention.scale).softmax(0)
                out[slot, h] = weights @ v[: last + 1, g]
        state = layer.combine(out.flatten(1), state)
    return head.norm(state)


@pytest.mark.parametrize("causal", [False, True])
def test_the_pass_is_that_of_the_equations_in_packed_rows(causal):
    head = make_head(causal)
    view = make_view(head)
    anchors = torch.tensor([2, 6, 10, 15, 23])  # in all three documents, next to their ends too
    with torch.no_grad():
        rows = run_blocks(head, view, anchors, 4)
        for row, anchor in zip(rows, anchors.tolist(), strict=True):
            start = int(view.documents.starts[anchor])
            root = int(view.input_ids[anchor + 1])
            expected = one_block(head, view.input_ids, view.aux_hidden[start : anchor + 1], root, 4, causal)
            torch.testing.assert_close(row, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_training_rows_are_the_served_rows(causal):
    """Slot k in training = slot k in the loop, over rounds that accept different numbers of tokens."""
    head = make_head(causal)
    view = make_view(head, lengths=(14, 14))
    ids, aux = view.input_ids.view(2, 14), view.aux_hidden.view(2, 14, -1)
    loop = BlockDrafter(head, torch.nn.Identity(), DraftPlan.chain(3)).loop(2, 20)
    committed = [0, 0]
    with torch.no_grad():
        for counts in ([4, 2], [1, 3], [3, 1]):
            tokens, features = torch.zeros(2, max(counts), dtype=torch.int64), torch.zeros(2, max(counts), A * HT)
            for row, (done, count) in enumerate(zip(committed, counts, strict=True)):
                features[row, :count] = aux[row, done : done + count]
            loop.commit(tokens, features, committed, counts)
            committed = [done + count for done, count in zip(committed, counts, strict=True)]
            drafted = loop.draft(committed, torch.stack([ids[row, done] for row, done in enumerate(committed)]))
            anchors = torch.tensor([committed[0] - 1, 14 + committed[1] - 1])
            expected = head.target_ids[head.lm_head(run_blocks(head, view, anchors, 4)[:, 1:]).argmax(-1)]
            assert torch.equal(drafted, expected)
        loop.keep(torch.tensor([1]))
        again = loop.draft([committed[1]], ids[1, committed[1]][None])
        assert torch.equal(again, expected[1:])


def test_neighbours_in_a_packed_row_are_never_seen():
    head = make_head()
    view, other = make_view(head), make_view(head)
    changed = other.aux_hidden.clone()
    changed[:9] += 5
    other = BatchView(**{**vars(other), "aux_hidden": changed})
    with torch.no_grad():
        kept, moved = (run_blocks(head, v, torch.tensor([4, 16]), 4) for v in (view, other))
    assert torch.equal(kept[1], moved[1]) and not torch.allclose(kept[0], moved[0])


def test_anchors_are_drawn_anew_and_the_same_for_the_same_generator():
    head = make_head()
    view = make_view(head, lengths=(60, 5, 60))

    def draw(seed):
        plan = plan_blocks(view, settings(anchors=10), torch.Generator().manual_seed(seed))
        return plan, sorted(set(plan.anchor.tolist()))

    plan, anchors = draw(1)
    assert anchors == draw(1)[1] != draw(2)[1]
    everything = plan_blocks(view, settings(), None)
    per_row = [sum(lo <= a < hi for a in anchors) for lo, hi in ((0, 60), (60, 65), (65, 125))]
    assert per_row == [10, 2, 10]  # the short row has two: all of them
    for a in anchors:  # every slot of a chosen anchor that counts at all
        depths = sorted(plan.depth[plan.anchor == a].tolist())
        assert depths == sorted(everything.depth[everything.anchor == a].tolist()) and depths[0] == 0
    assert torch.equal(plan.teacher, plan.anchor + 1 + plan.depth)
    counted = torch.zeros(125)
    for seed in range(400):
        counted[draw(seed)[1]] += 1
    assert counted[2:58].min() > 30 and counted[2:58].max() < 120  # 400 · 10 / 56 = 71 each


def test_drafts_of_the_walk_are_those_of_the_trained_block():
    head = make_head()
    view = make_view(head)
    with torch.no_grad():
        predictions, states = block_drafts(head, view, 3)
        trained = block_states(head, view, predictions, settings())
    torch.testing.assert_close(states, trained)
    assert predictions.depths == 3 and len(predictions) == len(states) > 10


def test_dpace_weights_are_those_of_their_formula():
    head = make_head()
    view = make_view(head)
    predictions, states = block_drafts(head, view, 3)
    states = states.detach()
    weights = dpace_weights(head, view, predictions, states, settings(dpace=True))
    q = head.lm_head(states).softmax(-1).detach()
    ids = head.target_ids.tolist()
    for n in range(len(predictions)):
        anchor, depth = int(predictions.anchor[n]), int(predictions.depth[n])
        terms, product = [], 1.0
        for k in range(3):
            mine = ((predictions.anchor == anchor) & (predictions.depth == k)).nonzero()
            if not len(mine):
                break
            label = int(view.input_ids[anchor + 2 + k])
            likely = float(q[int(mine), ids.index(label)]) if label in ids else 0.0
            product *= 0.5 * likely + 0.5
            terms.append(product)
        assert float(weights[n]) == pytest.approx(sum(terms[depth:]), rel=1e-5)
    assert dpace_weights(head, view, predictions, states, settings()) is None


def test_memory_grows_with_blocks_and_context_and_not_with_their_product():
    from tests.training.test_mode_and_memory import Largest

    def largest(length):
        generator = torch.Generator().manual_seed(0)
        rows = torch.arange(0, length, 4)
        shapes = [(len(rows), 4, 2, 4), (length, 1, 4), (length, 1, 4), (len(rows), 4, 1, 4), (len(rows), 4, 1, 4)]
        tensors = [torch.randn(s, generator=generator, requires_grad=True) for s in shapes]
        with Largest() as seen:
            block.block_attention(*tensors, QueryPlan.make(rows, torch.zeros_like(rows)), 0.5, True).sum().backward()
        return seen.numel

    assert largest(8192) <= 1.1 * largest(4096) < 4096 * 1024  # chunks of a fixed size
