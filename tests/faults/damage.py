"""Damage to the files of a checkpoint, decided by a seed: truncated, flipped, swapped, deleted, and the like."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

KINDS = ("truncate", "flip", "swap bytes", "delete", "empty", "append", "swap files", "older file", "zeros")
SECTOR = 512


def damage(folder: Path, older: Path, rng: random.Random) -> str:
    """Change something in `folder`, surely; `older`: another checkpoint of the same run. What was done."""
    while True:
        kind = rng.choice(KINDS)
        file = rng.choice(sorted(folder.iterdir()))
        before = {path: path.read_bytes() for path in folder.iterdir()}
        if kind == "delete":
            file.unlink()
        elif kind == "swap files":
            other = rng.choice(sorted(folder.iterdir()))
            file.write_bytes(before[other])
            other.write_bytes(before[file])
        elif kind == "older file":
            file.write_bytes((older / file.name).read_bytes())
        else:
            file.write_bytes(CHANGES[kind](before[file], rng))
        if {path: path.read_bytes() for path in folder.iterdir()} != before:  # two bytes swapped may be the same
            return f"{kind} {file.name}"


def _truncated(content: bytes, rng: random.Random) -> bytes:
    return content[: rng.randrange(len(content))]


def _flipped(content: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(content))
    return content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :]


def _swapped(content: bytes, rng: random.Random) -> bytes:
    changed = bytearray(content)
    first, second = rng.sample(range(len(content)), 2)
    changed[first], changed[second] = changed[second], changed[first]
    return bytes(changed)


def _with_zeros(content: bytes, rng: random.Random) -> bytes:
    """A sector that never reached the disk."""
    at = SECTOR * rng.randrange(1 + len(content) // SECTOR)
    part = content[at : at + SECTOR]
    return content[:at] + bytes(len(part)) + content[at + SECTOR :]


CHANGES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "truncate": _truncated,
    "flip": _flipped,
    "swap bytes": _swapped,
    "empty": lambda content, rng: b"",
    "append": lambda content, rng: content + rng.randbytes(1 + rng.randrange(64)),
    "zeros": _with_zeros,
}
