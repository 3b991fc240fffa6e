"""The target's side of a round: prefill, and verification of a chain or a tree through the model's own attention."""

from __future__ import annotations

import inspect
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor

from modelopt_eagle.common.modes import evaluating
from modelopt_eagle.common.text import first_line
from modelopt_eagle.decoding.capture_buffer import CaptureBuffer
from modelopt_eagle.decoding.grouped_attention import NAME, lent, query_groups
from modelopt_eagle.decoding.masks import (
    STATES,
    attention_kinds,
    causal,
    first_slots,
    fixed_masks,
    kind_masks,
    layer_kinds,
    one_shape,
)
from modelopt_eagle.decoding.recurrent import State, cache_layers, continues, is_recurrent, put_back, states_of
from modelopt_eagle.decoding.row_cache import RowCache
from modelopt_eagle.decoding.supported import run_limit, takes_no_mask
from modelopt_eagle.errors import DecodingError
from modelopt_eagle.target.model import Target

_KNOWN_ATTENTION = ("sdpa", "eager", NAME)


class TargetRunner:
    """Runs a target with a :class:`RowCache`; a context manager, as it changes the model's mode.

    Features are captured by hooks that hang on the model during the runner's own passes only, into one buffer that is
    allocated with the prefill: what a pass returns is overwritten by the next one.

    Args:
        target: the frozen target.
        aux_layer_ids: layers to capture; ``()`` or ``None``: none (plain decoding).
        capacity: slots a row.
        num_nodes: N, most tokens of a row that :meth:`verify` reads.
        lend: let the target's layers run our own attention (``grouped_attention.py``) where they can.
        cache: one of :func:`row_cache` to use again; ``None``: a new one.

    Raises:
        DecodingError: a target without a KV cache, or with an attention that takes no mask of ours.
    """

    def __init__(
        self,
        target: Target,
        aux_layer_ids,
        capacity: int,
        num_nodes: int = 1,
        lend: bool = True,
        cache: RowCache | None = None,
    ):
        self.target, self.model = target, target.model
        self.aux_layer_ids = tuple(aux_layer_ids or ())
        parameters = inspect.signature(self.model.forward).parameters
        self._cache_name = cache_argument(target)
        self._keeps_logits = "logits_to_keep" in parameters
        self.kinds = attention_kinds(target.config)
        self._own_mask = takes_no_mask(target)
        self.position_limit = run_limit(target, capacity - num_nodes)
        self.groups = query_groups(target) if lend else 1
        self.recurrent = is_recurrent(target.config)
        self.cache = row_cache(target, capacity) if cache is None else cache
        self._without_mask = [kind for kind in getattr(target.config, "layer_types", None) or () if kind in STATES]
        self._continues = not self.recurrent or continues(target, self._cache_name)
        self._states: list[State] = []  # before the last verification, or after each of its tokens
        self.num_nodes, self.buffer = num_nodes, None
        self.shift = 0
        self._stack = ExitStack()

    def __enter__(self) -> TargetRunner:
        self._stack.enter_context(evaluating(self.model))
        if self.groups > 1:
            self._stack.enter_context(lent(self.target))
        return self

    def __exit__(self, *exception) -> None:
        self._stack.close()

    def prefill(
        self, tokens: Tensor, lengths: list[int], images: dict[str, Tensor] | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Read prompts padded on the right.

        Args:
            tokens: ``[B, P]`` int64. Padding comes after all real tokens, so the causal mask hides it.
            lengths: B real lengths.
            images: what ``Target.vision`` made of the images of a single prompt. The model then gives the tokens their
                positions, and ``shift`` is by how much those behind the prompt are less than their places (M-RoPE).

        Returns:
            logits ``[B, V]`` after each prompt's last token, and the captured features ``[B, P, A·Ht]``.
        """
        batch, count = tokens.shape
        if self.aux_layer_ids:
            self.buffer = CaptureBuffer(
                self.target.num_layers, self.target.hidden_size, max_tokens=batch * count, max_requests=batch,
                num_nodes=self.num_nodes, aux_layer_ids=self.aux_layer_ids, dtype=self.target.dtype,
                device=tokens.device,
            )  # fmt: skip
        last = torch.tensor(lengths, device=tokens.device) - 1  # [B]
        positions = torch.arange(count, device=tokens.device).expand(batch, -1)  # [B,P]
        chosen = last.unique()  # [u]
        more = {"logits_to_keep": chosen} if self._keeps_logits else {}
        if images is None:
            logits, aux = self._forward(tokens, [0] * batch, None, positions, more)  # [B,u,V] or [B,P,V]
        else:
            more |= self.target.image_arguments(images)
            seen: list = []
            hook = self.target.parts.backbone.register_forward_pre_hook(
                lambda module, given, named: seen.append(named.get("position_ids")), with_kwargs=True
            )
            try:
                logits, aux = self._forward(tokens, [0] * batch, None, None, more, next_input=True)
            finally:
                hook.remove()
            self.shift = 0 if seen[-1] is None else int(seen[-1].max()) + 1 - count
        place = torch.searchsorted(chosen, last) if self._keeps_logits else last  # [B]
        return logits[torch.arange(batch, device=tokens.device), place], aux

    def verify(self, tokens: Tensor, lengths: list[int], sees: Tensor, depths: Tensor) -> tuple[Tensor, Tensor | None]:
        """Read N new tokens a row behind ``lengths``; they are written to the slots that follow, in node order.

        Args:
            tokens: ``[B, N]`` int64, the root first.
            lengths: B tokens already in the cache.
            sees: ``[B or 1, N, N]`` bool, node n sees node m.
            depths: ``[B or 1, N]`` int64, position of a node behind the root.

        Returns:
            logits ``[B, N, V]`` and features ``[B, N, A·Ht]``.
        """
        batch, count = tokens.shape
        if self.recurrent and count > 1:
            if not self._continues:
                return self._token_by_token(tokens, lengths)
            self._states = [states_of(self.cache)]
        even = len(set(lengths)) == 1
        first = lengths[0] if even else torch.tensor(lengths, device=tokens.device)[:, None]
        positions = (depths + first).expand(batch, -1)  # [B,N]
        if self.position_limit is not None and max(lengths) + count > self.position_limit:
            positions = positions.clamp(max=self.position_limit - 1)  # such a node can only draft what is cut off
        positions = positions + self.shift
        alone = count == 1 and self.kinds == {"full_attention": None}  # a single token sees everything
        if even and (alone or self._own_mask):
            return self._forward(tokens, lengths, None, positions, {})
        first = first_slots(self.kinds, lengths)
        masks = kind_masks(self.kinds, lengths, sees, depths, self.target.dtype, first, self.groups)
        return self._forward(tokens, lengths, masks, positions, {}, first=first)

    def verify_fixed(
        self, tokens: Tensor, lengths: Tensor, sees: Tensor, depths: Tensor, pools: list[Tensor], width: int
    ) -> tuple[Tensor, Tensor]:
        """:meth:`verify` over the first ``width`` slots, lengths as a tensor: its shapes never change and nothing of it
        is read back. Not for targets that must be run without a mask of ours, nor for recurrent ones.

        Args:
            tokens, sees, depths: as for :meth:`verify`.
            lengths: ``[B]`` int64 tokens already in the cache, at most ``width - N``.
            pools: the cache's buffers, the first B rows of each.
            width: slots that are read.

        Returns:
            logits ``[B, N, V]`` and features ``[B, N, A·Ht]``, in memory of their own.
        """
        batch, count = tokens.shape
        positions = (depths + lengths[:, None]).expand(batch, -1)  # [B,N]
        if self.position_limit is not None:
            positions = positions.clamp(max=self.position_limit - 1)  # such a node can only draft what is cut off
        masks = fixed_masks(self.kinds, lengths, sees, depths, self.target.dtype, width, self.groups)
        with ExitStack() as stack:
            stack.enter_context(self.cache.writing_fixed(pools, lengths, count, width))
            captured = stack.enter_context(self.target.capture(self.aux_layer_ids))
            output = self._call(tokens, masks, positions, {})
        return output.logits, captured.aux_hidden

    def settle(self, tokens: Tensor, lengths: list[int], accepted: list[int]) -> None:
        """Lead recurrent layers back to the accepted tokens of the last verification; nothing to do for others.

        Args:
            tokens: ``[1, N]`` that were verified, a chain.
            lengths: tokens before them.
            accepted: drafted tokens that were taken.
        """
        if not self.recurrent or not self._states or accepted[0] + 1 == tokens.shape[1]:
            self._states = []
            return
        count = accepted[0] + 1
        if not self._continues:
            put_back(self.cache, self._states[accepted[0]])
        else:
            put_back(self.cache, self._states[0])
            buffer, self.buffer = self.buffer, None  # what was captured is still to be read
            try:
                sees, depths = causal(count, tokens.device)
                self.verify(tokens[:, :count], lengths, sees, depths)
            finally:
                self.buffer = buffer
        self._states = []

    def _token_by_token(self, tokens: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor | None]:
        """A chain read one token a pass, the recurrent states after each of them kept."""
        sees, depths = causal(1, tokens.device)
        logits, features, states = [], [], []
        for place in range(tokens.shape[1]):
            one, aux = self.verify(tokens[:, place : place + 1], [length + place for length in lengths], sees, depths)
            logits.append(one)
            features.append(None if aux is None else aux.clone())
            states.append(states_of(self.cache))
        self._states = states
        captured = [aux for aux in features if aux is not None]
        return torch.cat(logits, 1), torch.cat(captured, 1) if captured else None

    def _forward(self, tokens, lengths, masks, positions, more, next_input=False, first=None):
        with ExitStack() as stack:
            stack.enter_context(self.cache.writing(lengths, tokens.shape[1], tokens.device, first))
            captured = None
            if self.buffer is not None:
                captured = stack.enter_context(
                    self.target.capture(self.aux_layer_ids, into=self.buffer, next_input=next_input)
                )
            try:
                output = self._call(tokens, masks, positions, more)
            except torch.OutOfMemoryError:
                raise
            except (KeyError, TypeError, AttributeError, RuntimeError) as error:  # code of any model
                raise DecodingError(
                    f"{self.target.name}: {type(self.model).__name__} cannot read tokens behind a cache by masks of "
                    f"ours: {type(error).__name__}: {first_line(error)}. A head for it can be trained and exported "
                    "unmeasured (validation.mode: none)"
                ) from error
        return output.logits, None if captured is None else captured.aux_hidden

    def _call(self, tokens: Tensor, masks, positions: Tensor | None, more: dict):
        if isinstance(masks, dict):  # the model asks by the kind of each layer; a recurrent one hides nothing
            masks = dict.fromkeys(self._without_mask) | masks
        return self.model(
            input_ids=tokens,
            attention_mask=masks,
            position_ids=positions,
            use_cache=True,
            **{self._cache_name: self.cache},
            **more,
        )


def row_cache(target: Target, capacity: int, held_rows: int | None = None) -> RowCache:
    """A target's cache of ``capacity`` slots a row, with memory for ``held_rows`` rows or for those that come first."""
    recurrent = is_recurrent(target.config)
    return RowCache(
        target.num_layers,
        capacity,
        alike=one_shape(target.config) and not recurrent,
        kinds=layer_kinds(target.config, attention_kinds(target.config), target.num_layers),
        make=partial(cache_layers, target.config) if recurrent else None,
        held_rows=held_rows,
    )


def cache_argument(target: Target) -> str:
    """The name under which the model's forward takes its KV cache, after checking that it can be used here.

    Raises:
        DecodingError: no KV cache, recurrent or unknown layers, or an attention other than sdpa and eager.
    """
    name = cache_name(target)
    if is_recurrent(target.config):
        continues(target, name)
    implementation = getattr(target.config, "_attn_implementation", None) or "eager"
    if implementation not in _KNOWN_ATTENTION:
        raise DecodingError(
            f"{target.name} runs attention {implementation!r}, which takes no tree mask: "
            f"load it with attn_implementation one of sdpa, eager"
        )
    return name


def cache_name(target: Target) -> str:
    """The same by the model's code and configuration alone, which need no weights.

    Raises:
        DecodingError: no KV cache that can go back, or unknown layers.
    """
    parameters = inspect.signature(target.model.forward).parameters
    name = next((n for n in ("cache", "past_key_values") if n in parameters), None)
    if name is None or (getattr(target.model, "_is_stateful", False) and not is_recurrent(target.config)):
        raise DecodingError(
            f"{target.name}: {type(target.model).__name__} has no KV cache that can go back to an earlier token "
            "(its forward takes no past_key_values, or it keeps a recurrent state): it cannot verify drafts"
        )
    attention_kinds(target.config)
    return name
