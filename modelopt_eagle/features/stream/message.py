"""One message of the stream: the states of one request, said so fully that the trainer can refuse a wrong one.

Two frames. The first is a UTF-8 JSON object with ``version, request, token_ids, aux_layer_ids, final_is_normed, shape,
dtype, bytes, checksum, server``; the second the states, ``shape = [T, A+1, Ht]`` (auxiliary layers in the order of
their ids, then the final state), row-major, little-endian. ``checksum`` is blake2b of 16 bytes over the second frame,
in hex. Through shared memory the second frame is a file in ``/dev/shm``, named by ``segment``.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from modelopt_eagle.common.dtypes import MODEL_DTYPES, dtype_name
from modelopt_eagle.common.strict_json import parse_json
from modelopt_eagle.errors import StreamError

MESSAGE_VERSION = 1
_FIELDS = {
    "version": int,
    "request": str,
    "token_ids": list,
    "aux_layer_ids": list,
    "final_is_normed": bool,
    "shape": list,
    "dtype": str,
    "bytes": int,
    "checksum": str,
    "server": str,
}


@dataclass
class FeatureMessage:
    """States of one request.

    Attributes:
        request: the server's id of the request.
        token_ids: the T tokens that the states belong to.
        aux_layer_ids: canonical ids of the first A states.
        final_is_normed: whether the last state is after the final norm.
        states: [T, A+1, Ht] floating.
        server: random name of the server process, told by ``hello`` too; the mailbox sets it.
        where: address that it was fetched from, for messages.
    """

    request: str
    token_ids: list[int]
    aux_layer_ids: list[int]
    final_is_normed: bool
    states: Tensor
    server: str = ""
    where: str = ""


def checksum(payload) -> str:
    """Hex blake2b of 16 bytes."""
    return hashlib.blake2b(payload, digest_size=16).hexdigest()


def encode(message: FeatureMessage) -> tuple[dict, bytes]:
    """Header and payload of a message; the states must be on the CPU."""
    states = message.states.contiguous()
    payload = states.view(torch.uint8).numpy().tobytes() if states.numel() else b""
    header = {
        "version": MESSAGE_VERSION,
        "request": message.request,
        "token_ids": message.token_ids,
        "aux_layer_ids": message.aux_layer_ids,
        "final_is_normed": message.final_is_normed,
        "shape": list(states.shape),
        "dtype": dtype_name(states.dtype),
        "bytes": len(payload),
        "checksum": checksum(payload),
        "server": message.server,
    }
    return header, payload


def parse_header(frame, where: str) -> dict:
    """The JSON object of a frame.

    Raises:
        StreamError: it is not one.
    """
    try:
        value = parse_json(frame)
    except ValueError as error:
        raise StreamError(f"{where} sent a malformed message: no JSON ({error})") from error
    if not isinstance(value, dict):
        raise StreamError(f"{where} sent a malformed message: an object expected, {type(value).__name__} found")
    return value


def check_header(header: dict, where: str) -> torch.dtype:
    """Check everything that a header says by itself; returns the dtype of the states.

    Args:
        header: first frame.
        where: the server, for messages.

    Raises:
        StreamError: a field is missing or of another kind, or sizes do not fit together.
    """
    for name, kind in _FIELDS.items():
        if type(header.get(name)) is not kind:
            raise StreamError(
                f"{where} sent a malformed message: {name} of type {kind.__name__} expected, {header.get(name)!r} found"
            )
    if header["version"] != MESSAGE_VERSION:
        raise StreamError(
            f"{where} speaks message version {header['version']}, this trainer version {MESSAGE_VERSION}: "
            "run the same modelopt_eagle on both sides"
        )
    for name in ("token_ids", "aux_layer_ids"):
        if not all(type(value) is int for value in header[name]):
            raise StreamError(f"{where} sent a malformed message: {name} must be integers")
    shape, dtype = header["shape"], MODEL_DTYPES.get(header["dtype"])
    if dtype is None:
        raise StreamError(f"{where} sent dtype {header['dtype']!r}; one of {', '.join(MODEL_DTYPES)} expected")
    wanted = [len(header["token_ids"]), len(header["aux_layer_ids"]) + 1]
    if len(shape) != 3 or not all(type(n) is int and n >= 0 for n in shape) or shape[:2] != wanted:
        raise StreamError(
            f"{where} sent a malformed message: shape {[*wanted, 'Ht']} expected for its tokens and layers, "
            f"{shape} found"
        )
    size = math.prod(shape) * dtype.itemsize
    if size != header["bytes"]:
        raise StreamError(
            f"{where} sent a malformed message: {size} bytes expected for {shape} {header['dtype']}, header says "
            f"{header['bytes']}"
        )
    return dtype


def decode(header: dict, payload, where: str) -> FeatureMessage:
    """A message from its two frames; the states are views of ``payload``.

    Args:
        header: first frame.
        payload: second frame, a buffer.
        where: the server, for messages.

    Raises:
        StreamError: see :func:`check_header`; or the payload is of another size, or its checksum differs.
    """
    dtype, shape, size = check_header(header, where), header["shape"], header["bytes"]
    if size != len(payload):
        raise StreamError(
            f"{where} sent a malformed message: {size} bytes expected for {shape} {header['dtype']}, "
            f"{len(payload)} arrived"
        )
    if checksum(payload) != header["checksum"]:
        raise StreamError(f"{where} sent states whose checksum differs from the header's; the transport damaged them")
    buffer = payload if isinstance(payload, bytearray) else bytearray(payload)
    states = (
        torch.frombuffer(buffer, dtype=torch.uint8).view(dtype).view(shape) if size else torch.empty(shape, dtype=dtype)
    )
    return FeatureMessage(
        header["request"],
        header["token_ids"],
        header["aux_layer_ids"],
        header["final_is_normed"],
        states,
        header["server"],
        where,
    )
