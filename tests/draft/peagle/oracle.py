"""P-EAGLE from its equations, an element at a time: no chunk, no cache, no index arithmetic of the package."""

import torch

from modelopt_eagle.draft import DraftVocab
from modelopt_eagle.draft.documents import Documents, WholeAxis
from modelopt_eagle.draft.peagle.config import PEagleConfig
from modelopt_eagle.draft.peagle.module import PEagleModule
from modelopt_eagle.draft.predictions import BatchView

V, H = 40, 24
LATENT = {
    "decoder_type": "kimik2", "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4, "v_head_dim": 6,
}  # fmt: skip


def make_head(seed=0, reduced=True, **overrides):
    """A random head of H numbers whose norms and mask are no ones and zeros."""
    torch.manual_seed(seed)
    sizes = {
        "hidden_size": H, "target_hidden_size": H, "intermediate_size": 40, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 6, "vocab_size": V, "draft_vocab_size": 16 if reduced else V,
        "aux_layer_ids": (0, 2), "mask_token_id": 39,
    }  # fmt: skip
    config = PEagleConfig.from_dict({**sizes, **overrides})
    vocab = DraftVocab.from_counts(torch.arange(V) % 3 + 0.5, 16, [0]) if reduced else None
    module = PEagleModule(config, vocab)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return module.eval()


def make_view(module, lengths, seed=1, supervised=0.8, padding=0):
    """Documents of these lengths in one row, some padding behind them, and their ids and table."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths) + padding
    ids = torch.randint(V - 1, (total,), generator=generator)
    documents = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)] + [torch.full((padding,), -1)])
    table = torch.randn(V, H, generator=generator)

    def embed_ids(tokens):
        return module.embed(tokens) if module.config.own_embedding else table[tokens]

    return BatchView(
        input_ids=ids,
        supervised=torch.rand(total, generator=generator) < supervised,
        documents=Documents.make(1, total, documents[None], "cpu"),
        aux_hidden=torch.randn(total, module.config.fc_input_size, generator=generator),
        final_hidden=torch.randn(total, H, generator=generator),
        embed=lambda places: embed_ids(ids[places]),
        length=total,
        axis=WholeAxis(total, "cpu"),
        embed_ids=embed_ids,
    )


def draft_states(module, embed_ids, tokens, aux, depths):
    """``[K, H]`` after the final norm: a decoder that has read ``tokens [n + 1]`` and has features ``aux [n, A·Ht]``.

    Rows: each position with its feature and the token behind it, then ``depths - 1`` masks; plain causal attention.
    """
    count = len(aux)
    mask = torch.tensor([module.config.mask_token_id] * (depths - 1), dtype=torch.int64)
    embedding = embed_ids(torch.cat((tokens[1 : count + 1], mask)))  # [n+K-1,H]
    raw = torch.cat((aux, module.mask_hidden.expand(depths - 1, -1)))  # [n+K-1,A·Ht]
    state = module.fuse(raw)
    cos, sin = module.rotary(torch.arange(len(state)))
    for index, layer in enumerate(module.layers):
        q, k, v, residual = layer.project(embedding if index == 0 else None, state, cos, sin)
        rows = []
        for row in range(len(state)):
            first = max(0, row + 1 - (module.config.sliding_window or row + 1))
            repeat = q.shape[1] // k.shape[1]
            keys, values = (part[first : row + 1].repeat_interleave(repeat, 1) for part in (k, v))  # [r,h,d]
            weights = (torch.einsum("hd,mhd->hm", q[row], keys) * layer.scale).softmax(-1)
            rows.append(torch.einsum("hm,mhd->hd", weights, values).flatten())
        state = layer.combine(torch.stack(rows), residual)
    return module.norm(state[count - 1 :])


def element(module, view, anchor, depth):
    """``[H]`` state of one element of a batch, from the anchor's document alone."""
    start = int(view.documents.starts[anchor])
    tokens = view.input_ids[start : anchor + 2]
    return draft_states(module, view.embed_ids, tokens, view.aux_hidden[start : anchor + 1], depth + 1)[depth]
