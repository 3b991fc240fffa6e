"""Decoder layers of the Llama family in some fifteen operations instead of sixty, for float32 decoding on the CPU.

A step of one token is short: the weights are read once, and what stands between the products (norms, rotary positions,
residual sums, reshapes, Python calls) costs as much again. :class:`FusedLayer` is another forward for a layer of a kind
that is known exactly: one product for queries, keys and values, the activation, the gate's product and the residual
sums inside oneDNN's products, one rotation for queries and keys. ``cpu_linear.FastLinears`` lends it while decoding.
A layer is only lent a forward that gave its own numbers on a trial (:meth:`FusedLayer.agrees`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from modelopt_eagle.common.modes import evaluating
from modelopt_eagle.decoding.cpu_product import Product, filled
from modelopt_eagle.decoding.grouped_attention import NAME, grouped_attention
from modelopt_eagle.decoding.row_cache import RowCache

KINDS = {"LlamaDecoderLayer": 0, "MistralDecoderLayer": 0, "Qwen2DecoderLayer": 0, "Qwen3DecoderLayer": 0}
KINDS |= {"GemmaDecoderLayer": 1}
"""Layers of transformers that are known, and what their norms add to their weights."""
GATES = {"SiLU": ("swish", ""), "SiLUActivation": ("swish", ""), "ReLU": ("relu", "")}
GATES |= {"GELUTanh": ("gelu", "tanh"), "PytorchGELUTanh": ("gelu", "tanh"), "GELUActivation": ("gelu", "none")}
"""Activations of the gate by their class (``cpu_product.ACTIVATIONS``)."""
_ATTENTION = AttentionInterface()
_READ = {"cache", "past_key_values", "position_ids", "use_cache", "cache_position"}
_HOOKS = [name for name in vars(nn.Module()) if "hooks" in name and "state_dict" not in name]
_TRIAL = 2  # tokens of a trial


@dataclass(frozen=True)
class Products:
    """The linear layers of a decoder layer; those of queries, keys and values are one."""

    qkv: Product
    out: Product
    gate: Product
    up: Product
    down: Product

    @classmethod
    def of(cls, linears: Sequence[nn.Linear], product: Callable[..., Product]) -> Products:
        """Those of :func:`linears_of`, each made by ``product``."""
        return cls(product(*linears[:3]), *(product(linear) for linear in linears[3:]))


class Step:
    """What all layers of a pass share, made at the first: cosines, signed sines, and the attention in use."""

    def __init__(self):
        self._held: tuple = (None, None, None, None)

    def of(self, tables: tuple[Tensor, Tensor], batch: int, config) -> tuple[Tensor, Tensor, Callable]:
        """``[B·n, 1, d]`` each of the model's ``[B or 1, n, d]``, the sines of the first half negative."""
        given, cos, sin, attend = self._held
        if given is not tables:
            half = tables[1].shape[-1] // 2
            signed = torch.cat((-tables[1][..., :half], tables[1][..., half:]), -1)
            cos, sin = (table.expand(batch, -1, -1).flatten(0, 1)[:, None] for table in (tables[0], signed))
            attend = _ATTENTION[config._attn_implementation]
            self._held = tables, cos, sin, attend  # one assignment, as threads may share a model
        return cos, sin, attend


class FusedLayer:
    """The forward of a known decoder layer over a :class:`RowCache`; every other call takes the layer's own.

    Args:
        layer: of :func:`known`.
        products: its linear layers.
        step: shared by the layers of a model.
    """

    def __init__(self, layer: nn.Module, products: Products, step: Step):
        attention = layer.self_attn
        self.own, self.attention, self.products, self.step = layer.forward, attention, products, step
        self.index, self.width, self.scaling = attention.layer_idx, attention.head_dim, attention.scaling
        self.heads = attention.q_proj.out_features // self.width
        self.turned = self.heads + attention.k_proj.out_features // self.width
        extra = KINDS[type(layer).__name__]
        self.before, self.behind = (
            _norm(part, extra) for part in (layer.input_layernorm, layer.post_attention_layernorm)
        )
        self.activation = GATES[type(layer.mlp.act_fn).__name__]
        self.head_norm: tuple[Tensor, Tensor] | None = None
        if hasattr(attention, "q_norm"):
            (query, eps), (key, _) = _norm(attention.q_norm, extra), _norm(attention.k_norm, extra)
            table = (query.expand(self.heads, -1), key.expand(self.turned - self.heads, -1))
            self.head_norm = torch.cat(table), eps  # [h+hkv,d]

    def __call__(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **more,
    ) -> Tensor:
        """As the layer's own forward, ``[B, n, H]`` to ``[B, n, H]``."""
        cache = more.get("cache", more.get("past_key_values"))
        usual = isinstance(cache, RowCache) and position_embeddings is not None and more.keys() <= _READ
        if not usual or hidden_states.dtype != torch.float32 or torch.is_grad_enabled():
            given = {"attention_mask": attention_mask, "position_embeddings": position_embeddings, **more}
            return self.own(hidden_states, **given)
        batch, count, size = hidden_states.shape
        rows, products = batch * count, self.products
        x = filled(hidden_states.reshape(rows, size))  # [P,H]
        heads = products.qkv(rms_norm(x, *self.before))[:rows].view(rows, -1, self.width)  # [R,h+2·hkv,d]
        cos, sin, attend = self.step.of(position_embeddings, batch, self.attention.config)  # [R,1,d] each
        place = given = heads[:, : self.turned]  # [R,h+hkv,d]
        if self.head_norm is not None:
            given = rms_norm(given, *self.head_norm)
        torch.addcmul(given * cos, given.roll(self.width // 2, -1), sin, out=place)
        by_head = heads.view(batch, count, -1, self.width).transpose(1, 2)  # [B,h+2·hkv,n,d]
        keys, values = cache.layers[self.index].update_both(by_head[:, self.heads :])
        query = by_head[:, : self.heads]  # [B,h,n,d]
        if count == 1 and attention_mask is None and attend is grouped_attention:
            query = query.reshape(batch, keys.shape[1], -1, self.width)  # [B,hkv,g,d]
            read = nn.functional.scaled_dot_product_attention(query, keys, values, scale=self.scaling)
        else:
            read, _ = attend(self.attention, query, keys, values, attention_mask, dropout=0.0, scaling=self.scaling)
        x = products.out.combined(filled(read.reshape(rows, -1)), x, "add")  # [P,H]
        normed = rms_norm(x, *self.behind)
        gate = products.gate(normed, self.activation)  # [P,F]
        x = products.down.combined(products.up.combined(normed, gate, "mul"), x, "add")  # [P,H]
        return x[:rows].view(batch, count, size)

    @torch.inference_mode()
    def agrees(self) -> bool:
        """Whether it gives the layer's own numbers, keys and values on two random tokens.

        A layer of another release of transformers under the same name, that does more, keeps its own forward.
        """
        weight, generator = self.before[0], torch.Generator().manual_seed(0)
        hidden = torch.randn(1, _TRIAL, len(weight), generator=generator)
        angles = 6 * torch.rand(1, _TRIAL, self.width // 2, generator=generator).repeat(1, 1, 2)
        given = {"attention_mask": None, "position_embeddings": (angles.cos(), angles.sin())}
        named = "cache" if "cache" in inspect.signature(self.own).parameters else "past_key_values"
        found = []
        with evaluating(self.attention):
            for forward in (self.own, self):
                cache = RowCache(self.index + 1, _TRIAL)
                with cache.writing([0], _TRIAL, hidden.device):
                    try:
                        output = forward(hidden, **given, **{named: cache})
                    except (TypeError, AttributeError, RuntimeError, ValueError, KeyError):
                        return False  # called in another way than this one
                found.append((output, *cache.tensors()))
        return all(
            isinstance(own, Tensor) and torch.allclose(own, ours, rtol=0, atol=1e-4 * max(1.0, float(own.abs().max())))
            for own, ours in zip(*found, strict=True)
        )


def known(layer: nn.Module) -> bool:
    """Whether a layer is of a kind whose forward is written here, as transformers made it: no part of another class
    (adapted, quantised), none with hooks or a forward of its own."""
    if type(layer).__name__ not in KINDS or not type(layer).__module__.startswith("transformers.models."):
        return False
    if nn.modules.module._has_any_global_hook():
        return False
    if any("forward" in part.__dict__ for part in layer.modules()) or any(
        getattr(part, hooks) for part in layer.modules() if part is not layer for hooks in _HOOKS
    ):
        return False
    return (
        bool(linears_of(layer))
        and type(layer.mlp.act_fn).__name__ in GATES
        and layer.self_attn.config._attn_implementation in ("sdpa", NAME)
    )


def linears_of(layer: nn.Module) -> list[nn.Linear]:
    """Its products in order: queries, keys, values, output, gate, up, down; none if one is no plain ``nn.Linear``."""
    names = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
    names += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    parts = dict(layer.named_modules())
    found = [parts.get(name) for name in names]
    plain = [part for part in found if type(part) is nn.Linear and "weight" in part._parameters]
    return plain if len(plain) == len(names) else []


def rms_norm(x: Tensor, weight: Tensor, eps: Tensor) -> Tensor:
    """``x [..., d]`` over the root of its mean square; in fewer and smaller operations than PyTorch's own on a CPU."""
    scale = torch.add(eps, torch.linalg.vecdot(x, x), alpha=1 / x.shape[-1]).rsqrt_()  # [...]
    return (x * scale[..., None]).mul_(weight)


def _norm(norm: nn.Module, extra: int) -> tuple[Tensor, Tensor]:
    """Weights and epsilon of an RMS norm."""
    eps = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
    weight = norm.weight.detach()
    return (weight + extra if extra else weight), weight.new_tensor(eps)
