"""Whether states that a server sent can be those of the text: a checksum says only that they came as they were sent.

Two things are known without running the target. Its final states must find the text likely: not by a wide margin less
than the same states read in another way (the other way about, a position off, as another number format, with the norm
applied or not). And states add up from layer to layer, from the tokens' embeddings on, so that a state resembles the
one below it at its own position more than at others.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from modelopt_eagle.errors import StreamError

WORSE_NATS = 2.0
"""Text that a target reads this much better, a token, after another reading says that this was the right one."""
WORSE_COSINE = (0.1, 0.05)
"""States that resemble those below them this much better in another order lie in that order: for the first layer sent,
which is held against the embeddings, and for the others. Measured on SmolLM2: 0.0 over the embeddings, 0.2 to 0.8 over
layers, 0.1 to 0.3 less in another order; its text is 4 nats a token as it is, and 9 or more in every other reading."""
ENOUGH_TOKENS = 128
"""Tokens looked at before a judgement, pooled over rows."""
FIRST_ROWS, EVERY_ROWS = 8, 50
"""Rows of each server process that are looked at from its first one on, and then every so many."""
_MOST_POSITIONS = 256
"""Positions of one row that are looked at."""

_OTHER_FORMAT = {torch.bfloat16: torch.float16, torch.float16: torch.bfloat16}


class Plausibility:
    """Looks at some rows of each server process, and refuses one whose states are not of the text.

    Args:
        embedding: [V, Ht] the target's token table.
        final_norm, head: of the target.
    """

    def __init__(self, embedding: Tensor, final_norm: Callable, head: Callable):
        self._embedding, self._norm, self._head = embedding, final_norm, head
        self._lock = threading.Lock()
        self._seen: Counter[str] = Counter()  # rows by server process
        self._pools: dict[str, Counter[str]] = {}  # sums by what is summed

    def look(self, server: str, url: str, row_id: str, input_ids: Tensor, states: Tensor, normed: bool) -> None:
        """Count a row; look at it if its turn has come.

        Args:
            server: name of the process that sent the states.
            url, row_id: for messages.
            input_ids: [s].
            states: [s, A+1, Ht] as they came.
            normed: whether the server says that the final states are post-norm.

        Raises:
            StreamError: the rows looked at are far more plausible in another reading, which is named.
        """
        with self._lock:
            number = self._seen[server]
            self._seen[server] += 1
        if number >= FIRST_ROWS and number % EVERY_ROWS:
            return
        sums = self._sums(input_ids.cpu(), states.cpu(), normed)
        with self._lock:
            pool = self._pools.setdefault(server, Counter())
            pool.update(sums)
            if pool["tokens"] < ENOUGH_TOKENS:
                return
            del self._pools[server]
        if reason := judge(pool):
            raise StreamError(
                f"{url} sent states that are not those of the text, up to row {row_id!r}: {reason}; its checksums are "
                "right, so it makes them wrong: look at its version and its options"
            )

    @torch.no_grad()
    def _sums(self, ids: Tensor, states: Tensor, normed: bool) -> dict[str, float]:
        """Sums over a row's positions, to be pooled: nats of each reading, resemblance of each layer and order."""
        count = len(ids) - 1
        if count < 2:
            return {"tokens": 0}
        chosen = torch.linspace(0, count - 1, min(count, _MOST_POSITIONS)).long().unique()  # [n]
        guess = math.log(len(self._head.weight))  # of who knows nothing: a target without a clue tells nothing either
        sums: dict[str, float] = {"tokens": len(chosen), "guess": guess * len(chosen)}
        for name, final, norm in self._readings(states[:, -1], normed):
            sums[f"nats {name}"] = self._nats(final[chosen], ids[1:][chosen], norm) * len(chosen)
        below = self._embedding.cpu()[ids].float()  # [s,Ht]
        for layer in range(states.shape[1]):
            own = states[:, layer].float()  # [s,Ht]
            for name, other in (("as sent", own), *_orders(own)):
                sums[f"cosine {layer} {name}"] = _resemblance(below, other) * len(chosen)
            below = own
        return sums

    def _readings(self, final: Tensor, normed: bool) -> Iterator[tuple[str, Tensor, bool]]:
        """(name, final states [s, Ht], whether to apply the norm): as sent first."""
        yield "as sent", final, not normed
        yield "pre-norm" if normed else "normed", final, normed
        for name, other in _orders(final):
            yield name, other, not normed
        if final.dtype in _OTHER_FORMAT:
            other = _OTHER_FORMAT[final.dtype]
            yield f"as {str(other).removeprefix('torch.')}", final.contiguous().view(other), not normed

    def _nats(self, final: Tensor, following: Tensor, norm: bool) -> float:
        """Mean of the negative log-likelihood of tokens [n] by the states [n, Ht] before them; inf if it is none."""
        weight = self._head.weight
        states = final.to(weight)
        logits = self._head(self._norm(states) if norm else states).float()  # [n,V]
        value = float(torch.nn.functional.cross_entropy(logits, following.to(logits.device)))
        return value if value == value else float("inf")


def _orders(states: Tensor) -> tuple[tuple[str, Tensor], ...]:
    """States [s, Ht] in the orders that go wrong."""
    return (
        ("in reversed order", states.flip(0)),
        ("one position later", states.roll(-1, 0)),
        ("one position earlier", states.roll(1, 0)),
    )


def _resemblance(below: Tensor, above: Tensor) -> float:
    """Mean cosine of [s, Ht] states, what all have in common taken away; 0 if they hold anything not finite."""
    below, above = (states - states.mean(0) for states in (below, above))
    value = float(torch.nn.functional.cosine_similarity(below, above, dim=-1).mean())
    return value if value == value else 0.0


def judge(pool: dict[str, float]) -> str | None:
    """What another reading explains far better, or ``None``.

    Args:
        pool: sums over rows, see :class:`Plausibility`.
    """
    tokens = pool["tokens"]
    said = pool["nats as sent"] / tokens
    others = {name.removeprefix("nats "): value / tokens for name, value in pool.items() if name.startswith("nats ")}
    best = min(others, key=others.__getitem__)
    if said > others[best] + WORSE_NATS and others[best] < pool["guess"] / tokens:
        return f"read {best}, the target finds the text {said - others[best]:.1f} nats a token likelier"
    for layer in range(sum(name.startswith("cosine ") and name.endswith(" as sent") for name in pool)):
        start = f"cosine {layer} "
        orders = {name.removeprefix(start): value / tokens for name, value in pool.items() if name.startswith(start)}
        best = max(orders, key=orders.__getitem__)
        if orders[best] > orders["as sent"] + WORSE_COSINE[min(layer, 1)]:
            return (
                f"layer {layer + 1} of those sent resembles what is below it by {orders['as sent']:.2f}, {best} by "
                f"{orders[best]:.2f}"
            )
    return None
