"""Sliding windows and the other layers of published heads, in training and in the draft loop."""

import pytest
import torch

from modelopt_eagle.draft import DraftConfig, EagleModule
from modelopt_eagle.draft.eagle3.draft_loop import DraftLoop
from modelopt_eagle.draft.plan import DraftPlan
from modelopt_eagle.errors import CheckpointError, DecodingError
from modelopt_eagle.training import rollout

SIZES = dict(
    hidden_size=32, target_hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
    head_dim=8, vocab_size=40, aux_layer_ids=(1, 3, 4),
)  # fmt: skip


def make(**changes) -> EagleModule:
    torch.manual_seed(0)
    return EagleModule(DraftConfig(**{**SIZES, **changes})).eval()


def inputs(length=300, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, length, 32, generator=generator), torch.randn(1, length, 96, generator=generator)


@torch.no_grad()
@pytest.mark.parametrize("layers", [1, 2])
def test_what_lies_before_the_window_changes_nothing_and_what_lies_in_it_does(layers):
    """Longer than a chunk of queries, so chunks begin at other keys than documents do."""
    embeddings, aux = inputs()
    other = aux.clone()
    other[:, :100] += 1
    head, reach = make(sliding_window=16, num_hidden_layers=layers), layers * 15
    one, two = (rollout(head, embeddings, a, 3).hidden[:, 0] for a in (aux, other))  # [K,S,H]
    assert torch.equal(one[:, 100 + reach : 297], two[:, 100 + reach : 297])
    assert not torch.allclose(one[0, 99 + reach], two[0, 99 + reach], atol=1e-9)
    whole = rollout(make(num_hidden_layers=layers), embeddings, aux, 3).hidden
    wide = rollout(make(sliding_window=400, num_hidden_layers=layers), embeddings, aux, 3).hidden
    assert torch.equal(whole, wide) and not torch.allclose(whole[0, 0, 200], one[0, 200])


@torch.no_grad()
def test_a_window_moves_on_with_the_steps():
    """At step k the query stands k positions further on, and sees k positions less of the prefix."""
    embeddings, aux = inputs(length=30)
    other = aux.clone()
    other[:, 5] += 1
    head = make(sliding_window=8)
    one, two = (rollout(head, embeddings, a, 4).hidden[:, 0] for a in (aux, other))  # [K,S,H]
    for step, last in enumerate((12, 11, 10, 9)):  # the last anchor whose query of this step sees position 5
        changed = [row for row in range(26) if not torch.equal(one[step, row], two[step, row])]
        reached = [row for row in changed if row + step - 5 < 8]
        assert changed and max(reached) == last
    assert not torch.equal(one[3, 12], two[3, 12])  # carried on from step 0


def test_windows_that_hold_no_draft_are_refused():
    embeddings, aux = inputs(length=12)
    with pytest.raises(ValueError, match="4 steps do not fit into the head's window of 3"):
        rollout(make(sliding_window=3), embeddings, aux, 4)
    with pytest.raises(DecodingError, match="drafts of 5 tokens do not fit into the head's window of 3"):
        DraftLoop(make(sliding_window=3), torch.nn.Embedding(40, 32), DraftPlan.chain(5), 1, 16)
    with pytest.raises(CheckpointError, match="sliding_window must be at least 1"):
        make(sliding_window=0)
    with pytest.raises(CheckpointError, match="kimik2 has no qk_norm"):
        make(qk_norm=True, decoder_type="kimik2", q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=4,
             qk_rope_head_dim=4, v_head_dim=4, num_key_value_heads=4)  # fmt: skip


@torch.no_grad()
def test_queries_and_keys_are_normed_before_they_are_turned():
    head = make(qk_norm=True)
    attention = head.layers[0].self_attn
    attention.q_norm.weight.uniform_(0.5, 1.5)
    x = torch.randn(3, 64)
    cos, sin = head.rotary(torch.tensor([5, 6, 7]))
    q = attention.q_proj(x).unflatten(-1, (4, 8))
    q = q / (q.pow(2).mean(-1, keepdim=True) + head.config.rms_norm_eps).sqrt() * attention.q_norm.weight
    a, b = q.chunk(2, -1)
    turned = torch.cat((a * cos[:, None] - b * sin[:, None], b * cos[:, None] + a * sin[:, None]), -1)
    torch.testing.assert_close(attention.queries(x, cos, sin), turned)
