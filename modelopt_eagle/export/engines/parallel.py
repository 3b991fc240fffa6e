"""Which tensor-parallel sizes a head can be served with: what its sizes divide into, and where engines pad."""

from __future__ import annotations

from modelopt_eagle.draft import DraftConfig
from modelopt_eagle.draft.decoders import DECODERS
from modelopt_eagle.errors import ExportError
from modelopt_eagle.export.engines import ENGINES

SIZES = (2, 4, 8)
"""Those that are spoken of unasked."""


def indivisible(config: DraftConfig, size: int) -> list[str]:
    """What of a head cannot be cut into ``size`` equal parts; engines stop on each of these when they start."""
    found = []
    if config.num_attention_heads % size:
        found.append(f"{config.num_attention_heads} attention heads")
    shared = DECODERS[config.decoder_type].shares_keys
    keys = config.num_key_value_heads
    if shared and keys % size and size % keys:  # fewer heads than parts are repeated
        found.append(f"{keys} key and value heads")
    if config.intermediate_size % size:
        found.append(f"a feed-forward width of {config.intermediate_size}")
    return found


def padded(config: DraftConfig, size: int) -> list[str]:
    """What engines pad inside for this size."""
    rows, lines = config.draft_vocab_size, []
    for engine in ENGINES.values():
        multiple = engine.parallel.vocab_multiple if engine.parallel else None
        if multiple and rows % size and -rows % multiple:
            lines.append(f"{engine.name} pads the {rows} rows of lm_head to {rows + -rows % multiple}")
    return lines


def parallel_text(config: DraftConfig, sizes: tuple[int, ...] = SIZES) -> str:
    """A sentence for each size: whether the head fits, and the way out where it does not."""
    ways = [f"{e.name}: {e.parallel.alone}" for e in ENGINES.values() if e.parallel and e.parallel.alone]
    parts, failing = [], False
    for size in sizes:
        wrong, more = indivisible(config, size), padded(config, size)
        failing |= bool(wrong)
        if wrong:
            parts.append(f"{size} fails ({' and '.join(wrong)} do not divide)")
        else:
            parts.append(f"{size} fits" + (f" ({', '.join(more)})" if more else ""))
    way = f"; the head can stay whole beside a divided target ({', '.join(ways)})" if failing and ways else ""
    return "; ".join(parts) + way


def check_parallel(config: DraftConfig, size: int) -> None:
    """Refuse a size that the head cannot be divided by.

    Raises:
        ExportError: below 1, or one that does not divide the head, with the way out.
    """
    if size < 1:
        raise ExportError(f"--tensor-parallel must be at least 1, found {size}")
    if wrong := indivisible(config, size):
        raise ExportError(
            f"--tensor-parallel {size}: {' and '.join(wrong)} of the head do not divide by {size}, and engines stop on "
            f"that: {parallel_text(config, (size,))}; or train a head of other sizes (eagle.num_attention_heads, "
            "eagle.num_key_value_heads, eagle.intermediate_size)"
        )
