"""Which code runs a tree operation: the Triton kernel or its plain PyTorch reference.

One rule for every operation of this package, chosen by the keyword ``backend``:

=============  ===============================  ==================================================
backend        CUDA tensors                     CPU tensors
=============  ===============================  ==================================================
``auto``       Triton kernel                    PyTorch reference
``triton``     Triton kernel                    Triton's interpreter (``TRITON_INTERPRET=1``)
``reference``  PyTorch reference                PyTorch reference
=============  ===============================  ==================================================

The environment variable ``MODELOPT_EAGLE_KERNELS=reference`` makes ``auto`` the reference everywhere: the way out if a
kernel fails on some GPU or driver. Triton is imported at the first launch and not before, so this package imports
without it.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from modelopt_eagle.common.package import require_extra
from modelopt_eagle.errors import DecodingError

BACKENDS = ("auto", "triton", "reference")
SWITCH = "MODELOPT_EAGLE_KERNELS"
"""The environment variable that says what ``auto`` means: ``auto`` (default) or ``reference``."""


_AS_ON_GPU: ContextVar[bool] = ContextVar("as_on_gpu", default=False)


@contextlib.contextmanager
def as_on_gpu() -> Iterator[None]:
    """Inside, tensors of any device are taken for ones on a GPU: for who goes through shapes without numbers."""
    token = _AS_ON_GPU.set(True)
    try:
        yield
    finally:
        _AS_ON_GPU.reset(token)


def on_gpu(device: torch.device) -> bool:
    """Whether tensors on ``device`` are worked on as on a GPU, or another accelerator."""
    return device.type != "cpu" or _AS_ON_GPU.get()


def choose_backend(backend: str, device: torch.device) -> str:
    """Return ``"triton"`` or ``"reference"`` for tensors on ``device``, by the table above.

    Raises:
        DecodingError: an unknown backend, one in ``SWITCH``, or ``triton`` asked for where it cannot run.
        MissingExtraError: Triton is needed and not installed.
    """
    if backend not in BACKENDS:
        raise DecodingError(f"backend must be one of {', '.join(BACKENDS)}, found {backend!r}")
    if backend == "auto":
        backend = os.environ.get(SWITCH) or "auto"
        require(backend in ("auto", "reference"), f"{SWITCH} must be auto or reference, found {backend!r}")
    if _AS_ON_GPU.get() and backend == "auto":
        return "triton"
    if backend == "auto":
        backend = "triton" if device.type == "cuda" else "reference"
    if backend == "triton" and device.type != "cuda":
        _require_interpreter(device)
    return backend


def _require_interpreter(device: torch.device) -> None:
    """Raise unless Triton's interpreter can run kernels on CPU tensors in this process."""
    if os.environ.get("TRITON_INTERPRET", "0").lower() not in ("1", "true", "on", "yes", "y"):
        raise DecodingError(
            f'backend="triton" needs CUDA tensors, found {device.type}: use backend="reference" or "auto", '
            "or start the process with TRITON_INTERPRET=1 to run the kernels in Triton's interpreter"
        )
    language = require_extra("triton.language", "kernels")
    if type(language.sum).__name__ == "JITFunction":
        raise DecodingError(
            "TRITON_INTERPRET=1 was set after triton was imported, which is too late: "
            'set it in the environment that starts Python, or use backend="reference"'
        )


class TritonKernel:
    """A Triton function that is handed to ``triton.jit`` at its first use.

    The function's module names ``triton.language`` only for type checkers; ``load`` puts it there as ``tl``,
    together with the compiled form of every other kernel function that this one calls.
    """

    def __init__(self, function: Callable[..., Any]):
        functools.update_wrapper(self, function)
        self.function: Any = function
        self.compiled: Any = None

    if TYPE_CHECKING:

        def __call__(self, *arguments: Any, **options: Any) -> Any:
            """Only other kernels call a kernel, and they call its compiled form."""

    def load(self) -> Any:
        """Return the ``triton.jit`` function, making it at the first call."""
        if self.compiled is None:
            triton = require_extra("triton", "kernels")
            scope = self.function.__globals__
            scope["tl"] = require_extra("triton.language", "kernels")
            for name in self.function.__code__.co_names:
                if isinstance(scope.get(name), TritonKernel):
                    scope[name] = scope[name].load()
            self.compiled = triton.jit(self.function)
        return self.compiled

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        """The launcher of this grid; it launches on the device of its first argument, which is always a tensor."""

        def launch(*arguments, **options):
            with torch.cuda.device_of(arguments[0]):
                return self.load()[grid](*arguments, **options)

        return launch


def power_of_two(number: int) -> int:
    """Smallest power of two that is at least ``number`` (1 for 0 and 1): the sizes Triton's tiles can have."""
    return 1 << max(0, int(number) - 1).bit_length()


def warps_for(elements: int) -> int:
    """Warps of 32 threads for a tile of ``elements``: about eight elements a thread, between 1 and 16 warps."""
    return min(16, max(1, power_of_two(elements) // 256))


def require(condition: bool, message: str | Callable[[], str]) -> None:
    """Raise ``DecodingError(message)`` unless the condition holds.

    A message with sizes in it is a function: writing a size into a string would bake it into a compiled graph.
    """
    if not condition:
        raise DecodingError(message if isinstance(message, str) else message())


def require_integers(name: str, tensor: Tensor, *shape: int | None) -> None:
    """Raise unless ``tensor`` is int32 or int64 and has this shape (``None`` stands for any length)."""
    if tensor.dtype not in (torch.int32, torch.int64):
        raise DecodingError(f"{name} must be int32 or int64, found {tensor.dtype}: cast it with .to(torch.int32)")
    require_shape(name, tensor, *shape)


def require_shape(name: str, tensor: Tensor, *shape: int | None) -> None:
    """Raise unless ``tensor`` has this shape (``None`` stands for any length)."""
    found = tuple(tensor.shape)
    if len(found) != len(shape) or any(w is not None and w != f for w, f in zip(shape, found, strict=True)):
        wanted = ", ".join("any" if w is None else str(w) for w in shape)
        raise DecodingError(f"{name} must have shape [{wanted}], found {list(found)}")
