"""Spoilt inputs: whole ones of each kind, with bytes turned, cut, doubled and swapped, and JSON values replaced."""

import contextlib
import copy
import json
import resource
import signal
from pathlib import Path

ODD_VALUES = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**63), 0.5, 1e308, "", "x", "\ud800", "../x", "/etc/passwd",
    "a\0b", "\x1b[2J", [], {}, [[]], [None], {"a": None}, [0] * 1000, "9" * 5000,
]  # fmt: skip
ODD_TEXTS = [b"[" * 5000, b"NaN", b"1e999", b"9" * 5000, b"\xff\xfe", b'"\\ud800"', b"\0" * 20, b"{" * 5000]


def places(value, path=()):
    """Every place in nested JSON."""
    yield path
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in list(children)[:50]:
        yield from places(child, (*path, key))


def spoil_json(text, draw):
    """A JSON text with one or several values replaced or removed."""
    value = json.loads(text)
    for _ in range(draw.choice((1, 1, 1, 3))):
        path = draw.choice(list(places(value)))
        if not path:
            return json.dumps(draw.choice(ODD_VALUES)).encode()
        holder = value
        for key in path[:-1]:
            holder = holder[key]
        if draw.random() < 0.2:
            del holder[path[-1]]
        else:
            holder[path[-1]] = copy.deepcopy(draw.choice(ODD_VALUES))
    return json.dumps(value).encode()


def spoil_bytes(content, draw):
    """Bytes with some turned, cut off, left out, doubled, or replaced."""
    content = bytearray(content)
    for _ in range(draw.choice((1, 1, 2, 8))):
        at = draw.randrange(len(content) + 1)
        what = draw.randrange(6)
        if what == 0 and at < len(content):
            content[at] ^= 1 << draw.randrange(8)
        elif what == 1:
            del content[at:]
        elif what == 2:
            del content[at : at + draw.randrange(1, 64)]
        elif what == 3:
            content[at:at] = content[at : at + draw.randrange(1, 64)]
        elif what == 4:
            content[at : at + draw.randrange(16)] = draw.choice(ODD_TEXTS)
        else:
            content[at : at + 8] = draw.choice((0, 1, 2**32, 2**62, 2**64 - 1)).to_bytes(8, "little")
    return bytes(content)


def spoil(content, draw):
    """A spoilt input of any kind; JSON at its front (of safetensors, behind its length) is spoilt as JSON, too."""
    try:
        if content[:1] in (b"{", b"[") and draw.random() < 0.6:
            return spoil_json(content, draw)
        size = int.from_bytes(content[:8], "little")
        if content[8:9] == b"{" and size < len(content) and draw.random() < 0.6:
            header = spoil_json(content[8 : 8 + size], draw)
            return len(header).to_bytes(8, "little") + header + content[8 + size :]
    except ValueError:
        pass
    return spoil_bytes(content, draw)


@contextlib.contextmanager
def bounded(seconds, more_bytes):
    """A body that runs for longer, or takes more memory on top of what is there, gets a Time- or MemoryError."""

    def stop(*_):
        raise TimeoutError(f"not done after {seconds} s")

    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits, handler = resource.getrlimit(resource.RLIMIT_AS), signal.signal(signal.SIGALRM, stop)
    resource.setrlimit(resource.RLIMIT_AS, (taken + more_bytes, limits[1]))
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, limits)
