"""Recording a fixed computation and replaying it: CUDA graphs behind a small interface.

A recorded region is a function of tensors that stay at their addresses. It is run once to be recorded; afterwards
``replay()`` repeats its kernels on what the inputs then hold. So a region may depend on nothing else: no Python number
that changes, no value read back from the device.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from modelopt_eagle.errors import DecodingError

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

Region = Callable[..., tuple[Tensor, ...]]
Replay = Callable[[], tuple[Tensor, ...]]

SWITCH = ("auto", True, False)
WARM_UPS = 3


class Recorder(Protocol):
    """Turns a region into its replay."""

    def record(self, region: Region, inputs: Sequence[Tensor]) -> Replay:
        """Record ``region(*inputs)``.

        Returns:
            a function that repeats it; its outputs lie at the same place every time and hold until the next replay.
        """
        ...


class CudaGraphRecorder:
    """Records CUDA graphs, all in one memory pool (so two of them must not run at the same time).

    Args:
        fall_back: a region that cannot be captured is run as it is, with a warning; else it is an error.
    """

    def __init__(self, fall_back: bool = False):
        self.fall_back = fall_back
        self._pool: _POOL_HANDLE | None = None

    def record(self, region: Region, inputs: Sequence[Tensor]) -> Replay:
        """Warm up on a side stream (kernels are compiled, workspaces made), then capture.

        Returns:
            what repeats it, see :class:`Recorder`.

        Raises:
            DecodingError: the capture fails and ``fall_back`` is off.
        """
        with torch.cuda.device(inputs[0].device):
            side, current = torch.cuda.Stream(), torch.cuda.current_stream()
            side.wait_stream(current)
            with torch.cuda.stream(side):
                for _ in range(WARM_UPS):
                    region(*inputs)
            current.wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                    outputs = region(*inputs)
            except RuntimeError as error:
                reason = str(error).strip().splitlines()[0]
                if not self.fall_back:
                    raise DecodingError(
                        f"a round could not be captured in a CUDA graph ({reason}): switch graphs off with "
                        "cuda_graph=False (ar_validate.py: --cuda-graph off)"
                    ) from error
                warnings.warn(f"rounds run without a CUDA graph, as one could not be captured: {reason}", stacklevel=2)
                return lambda: region(*inputs)
        self._pool = graph.pool()

        def replay() -> tuple[Tensor, ...]:
            graph.replay()
            return outputs

        return replay


def strict(recorder: Recorder) -> Recorder:
    """The same kind of recorder, to which a region that cannot be captured is an error in any case."""
    return CudaGraphRecorder() if isinstance(recorder, CudaGraphRecorder) else recorder


def graph_switch(word: str) -> str | bool:
    """The switch of :func:`choose_recorder` from the word of a command line or recipe: auto, on or off."""
    return {"on": True, "off": False}.get(word, word)


def choose_recorder(switch: str | bool, device: torch.device) -> Recorder | None:
    """The recorder of a draft loop on ``device``: CUDA graphs, or ``None`` for running it call by call.

    Args:
        switch: ``"auto"``: graphs on CUDA, and a warning where the loop cannot be captured; ``True``: graphs or an
            error; ``False``: none.
        device: of the head.

    Raises:
        DecodingError: another switch, or graphs asked for without a CUDA device.
    """
    if switch not in SWITCH:
        raise DecodingError(f'cuda_graph must be "auto", True or False, found {switch!r}')
    if switch is True and device.type != "cuda":
        raise DecodingError(
            f'cuda_graph=True needs a head on a CUDA device, found {device.type}: use "auto" or False '
            "(ar_validate.py: --cuda-graph auto or off)"
        )
    if switch is False or device.type != "cuda":
        return None
    return CudaGraphRecorder(fall_back=switch == "auto")
