"""Finding the parts of a causal language model by its structure: embedding, decoder layers, final norm, output head."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from modelopt_eagle.errors import TargetError

_FINAL_NORM_NAMES = ("norm", "norm_f", "ln_f", "final_norm", "final_layernorm", "final_layer_norm")


@dataclass(frozen=True)
class TargetParts:
    """The modules of a target, and the name of each inside the model (``""`` is the model itself).

    ``backbone`` owns ``embedding`` [V, Ht], ``layers`` and ``final_norm``, and runs them without the output head;
    ``head`` is the module whose ``weight`` is [V, Ht], tied to the embedding or not.
    """

    backbone: nn.Module
    embedding: nn.Module
    layers: nn.ModuleList
    final_norm: nn.Module
    head: nn.Module
    names: dict[str, str]


def find_parts(model: nn.Module, config) -> TargetParts:
    """Find the parts of a model, also of a text model nested in a vision-language wrapper.

    The backbone is the module that owns, as direct children, a list of ``config.num_hidden_layers`` modules, an
    embedding of ``config.vocab_size`` x ``config.hidden_size`` and a norm of ``config.hidden_size``.

    Args:
        model: a transformers model with an output head; parameters may be on the meta device.
        config: its text config.

    Returns:
        the modules, and the name of each inside the model.

    Raises:
        TargetError: a part was not found, or more than one fits; near matches are listed.
    """
    depth, width, vocabulary = config.num_hidden_layers, config.hidden_size, config.vocab_size
    candidates = []
    for name, owner in model.named_modules():
        for list_name, layers in owner.named_children():
            if not isinstance(layers, nn.ModuleList) or len(layers) != depth:
                continue
            embedding = _embedding(owner, vocabulary, width)
            norm = _final_norm(owner, list_name, width)
            if embedding and norm:
                candidates.append((name, owner, list_name, layers, embedding, norm))
    if len(candidates) > 1:  # two alike: the language table is the one that the model itself calls its input embedding
        own = _table(model, "input")
        candidates = [c for c in candidates if c[4][1] is own] or candidates
    if len(candidates) != 1:
        found = "none" if not candidates else "several: " + ", ".join(c[0] or "(model)" for c in candidates)
        raise TargetError(
            f"{type(model).__name__}: expected one module with {depth} decoder layers, an embedding of "
            f"{vocabulary} x {width} and a final norm of {width}; found {found}.\n"
            f"Near matches:\n{_near_matches(model, depth, width)}\n"
            "Use a causal language model in the transformers layout."
        )
    name, backbone, list_name, layers, (embedding_name, embedding), (norm_name, norm) = candidates[0]
    head_name, head = _head(model, vocabulary, width, embedding)
    prefix = f"{name}." if name else ""
    return TargetParts(
        backbone,
        embedding,
        layers,
        norm,
        head,
        {
            "backbone": name,
            "embedding": prefix + embedding_name,
            "layers": prefix + list_name,
            "final_norm": prefix + norm_name,
            "head": head_name,
        },
    )


def _embedding(owner: nn.Module, vocabulary: int, width: int):
    """The (name, module) of the direct child that is the token table, or None."""
    fitting = [
        (name, child)
        for name, child in owner.named_children()
        if isinstance(child, nn.Embedding) and child.embedding_dim == width and child.num_embeddings >= vocabulary
    ]
    if len(fitting) > 1:  # position tables may be longer than the vocabulary
        own = _table(owner, "input")
        fitting = [pair for pair in fitting if pair[1] is own]
    return fitting[0] if len(fitting) == 1 else None


def _final_norm(owner: nn.Module, list_name: str, width: int):
    """The (name, module) of the norm after the layers, or None. Norms of the embedding stand before the layers."""
    names = [name for name, _ in owner.named_children()]
    norms = {}
    for name, child in owner.named_children():
        weight = getattr(child, "weight", None)
        sized = weight is None or tuple(weight.shape) == (width,)
        if "norm" in type(child).__name__.lower() and sized:
            norms[name] = child
    after = [name for name in norms if names.index(name) > names.index(list_name)]
    for choice in (after, list(norms)):
        named = [name for name in choice if name in _FINAL_NORM_NAMES]
        if len(named or choice) == 1:
            name = (named or choice)[0]
            return name, norms[name]
    return None


def _table(model: nn.Module, side: str) -> nn.Module | None:
    """What a transformers model itself calls its input or output embeddings; None where it does not say."""
    getter = getattr(model, f"get_{side}_embeddings", None)
    return None if getter is None else getter()


def _head(model: nn.Module, vocabulary: int, width: int, embedding: nn.Module):
    """The (name, module) of the output head."""
    head = _table(model, "output")
    weight = getattr(head, "weight", None)
    names = {id(module): name for name, module in model.named_modules()}
    if weight is not None and tuple(weight.shape[1:]) == (width,) and weight.shape[0] >= vocabulary:
        return names[id(head)], head
    linears = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module.in_features == width and module.out_features >= vocabulary
    ]
    if len(linears) == 1:
        return linears[0]
    near = ", ".join(f"{n} {tuple(m.weight.shape)}" for n, m in linears) or "none"
    raise TargetError(
        f"{type(model).__name__}: expected an output head of {vocabulary} x {width}, found "
        f"{'nothing' if weight is None else tuple(weight.shape)}; linear layers of that size: {near}. "
        "Use a model class with a language-model head (…ForCausalLM)."
    )


def _near_matches(model: nn.Module, depth: int, width: int) -> str:
    """One line for each list of modules in the model, with the children that stand beside it."""
    lines = []
    for name, owner in model.named_modules():
        for list_name, layers in owner.named_children():
            if not isinstance(layers, nn.ModuleList) or len(layers) < 2:
                continue
            beside = []
            for child_name, child in owner.named_children():
                weight = getattr(child, "weight", None)
                if weight is not None and not isinstance(child, nn.ModuleList):
                    beside.append(f"{child_name} {tuple(weight.shape)}")
            lines.append(f"  {name + '.' if name else ''}{list_name}: {len(layers)} modules, beside {beside}")
    return "\n".join(lines[:12]) or f"  no list of modules at all (wanted {depth} layers of width {width})"
