"""States over NIXL: the trainer reads them from the server's memory (UCX: RDMA where there is some, else TCP).

The first frame of a message travels through the mailbox as always. In place of the second one it carries ``nixl``:
``agent``, ``metadata`` and ``descriptors`` (base64, of NIXL) and ``offer``, the note by which the server's NIXL hears
that the read is done and lets go of the memory.
"""

from __future__ import annotations

import base64
import importlib
import secrets
import threading
import time

import torch
from torch import Tensor

from modelopt_eagle.errors import MissingExtraError, StreamError

_MODULES = ("nixl_cu12._api", "nixl_cu13._api", "nixl_rocm._api")
OFFER_LIFE = 300.0
"""Seconds after which an offer is taken to be left by a trainer that was killed."""


class NixlLost(Exception):
    """The other side has gone, or did not come to an end in time."""


def _new_agent():
    """A NIXL agent with UCX.

    Raises:
        MissingExtraError: NIXL is not installed.
    """
    for name in _MODULES:
        try:
            api = importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        name = f"modelopt-eagle-{secrets.token_hex(8)}"
        return api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"]))
    raise MissingExtraError("transport nixl needs NIXL on both sides, and here it is missing: pip install nixl-cu12")


class NixlSender:
    """The server's side: memory that trainers may read, until they have."""

    def __init__(self):
        self._agent = _new_agent()
        self._offers: dict[str, tuple[Tensor, object, float]] = {}

    def offer(self, payload: bytes) -> dict:
        """Let a trainer read ``payload``; the value of ``nixl`` in the message's header.

        Returns:
            the value of ``nixl`` in the message's header.
        """
        memory = torch.frombuffer(bytearray(payload), dtype=torch.uint8)  # [bytes]
        registered = self._agent.register_memory(memory)
        offer = secrets.token_hex(8)
        self._offers[offer] = memory, registered, time.monotonic() + OFFER_LIFE
        return {
            "agent": self._agent.name,
            "metadata": base64.b64encode(self._agent.get_agent_metadata()).decode(),
            "descriptors": base64.b64encode(self._agent.get_serialized_descs(registered.trim())).decode(),
            "offer": offer,
        }

    def release(self) -> None:
        """Let go of what has been read, and of what nobody has read in time."""
        now = time.monotonic()
        done = [note.decode() for notes in self._agent.get_new_notifs().values() for note in notes]
        done += [offer for offer, (_, _, until) in self._offers.items() if until <= now]
        for offer in done:
            if offer in self._offers:
                self._agent.deregister_memory(self._offers.pop(offer)[1])

    @property
    def held(self) -> int:
        """Offers that have not been read."""
        return len(self._offers)


class NixlReceiver:
    """The trainer's side; may be used by several threads."""

    def __init__(self):
        self._agent = _new_agent()
        self._lock = threading.Lock()

    def read(self, where: dict, size: int, timeout: float) -> bytearray:
        """The bytes of an offer.

        Args:
            where: ``nixl`` of a message's header.
            size: bytes.
            timeout: seconds.

        Raises:
            StreamError: ``where`` is malformed.
            NixlLost: the server has gone, or the read did not end in time.
        """
        payload = bytearray(size)
        try:
            metadata, descriptors = (base64.b64decode(where[name]) for name in ("metadata", "descriptors"))
            note = where["offer"].encode()
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise StreamError(
                f"a malformed message: nixl with metadata, descriptors and offer expected ({error})"
            ) from error
        memory = torch.frombuffer(payload, dtype=torch.uint8)  # [bytes]
        with self._lock:
            registered = self._agent.register_memory(memory)
            transfer = None
            try:
                peer = self._agent.add_remote_agent(metadata)
                remote = self._agent.deserialize_descs(descriptors)
                transfer = self._agent.initialize_xfer("READ", registered.trim(), remote, peer, note)
                self._finish(transfer, timeout)
            except NixlLost:
                raise
            except Exception as error:  # NIXL raises kinds of its own for each status
                raise NixlLost(f"NIXL: {error}") from error
            finally:
                if transfer is not None:
                    self._agent.release_xfer_handle(transfer)
                self._agent.deregister_memory(registered)
        return payload

    def _finish(self, transfer, timeout: float) -> None:
        until = time.monotonic() + timeout
        state = self._agent.transfer(transfer)
        while state == "PROC":
            if time.monotonic() > until:
                raise NixlLost(f"NIXL: no end of the read within {timeout:g} s")
            time.sleep(0.0002)
            state = self._agent.check_xfer_state(transfer)
        if state != "DONE":
            raise NixlLost(f"NIXL: the read ended as {state}")
