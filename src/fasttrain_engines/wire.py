"""Frames and messages between trainer and engine. Data of an engine is not trusted, so everything has a limit.

A codec decodes a frame to a message: a str (`Text`), or a value of JSON or msgpack. Decoding executes no code.
"""

from __future__ import annotations

import json
import struct
from importlib import import_module
from typing import NoReturn, Protocol

MOST_BYTES = 1 << 20  # size limit of one frame
MOST_DEPTH = 32  # most levels of nested lists and mappings
MOST_ENTRIES = 1 << 16  # most entries of one list or mapping in msgpack, which sends their number first


class GameLostError(Exception):
    """A game cannot continue because its engine, or the connection to it, failed.

    Args:
        cause: one or two words under which lost games are counted.
    """

    def __init__(self, cause: str, text: str) -> None:
        super().__init__(text)
        self.cause = cause


class Framing(Protocol):
    """Cuts a stream of bytes into frames; each connection has an object of its own."""

    def pack(self, payload: bytes) -> bytes:
        """The frame of a payload."""

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads that are complete now. Raises GameLostError if a frame is too large."""


class Codec(Protocol):
    """Encodes and decodes messages."""

    def encode(self, message: object) -> bytes:
        """The payload of a message."""

    def decode(self, payload: bytes) -> object:
        """The message in a payload. Raises GameLostError if it is no message, or nested too deeply."""


class Lines:
    """A frame is a line of at most `most_bytes`. Empty lines are ignored."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most, self._begun = most_bytes, bytearray()

    def pack(self, payload: bytes) -> bytes:
        if b"\n" in payload:
            raise ValueError("a message in lines must not contain a line break")
        return payload + b"\n"

    def feed(self, data: bytes) -> list[bytes]:
        self._begun += data
        lines = []
        if b"\n" in data:
            *lines, begun = bytes(self._begun).split(b"\n")
            self._begun = bytearray(begun)
        if len(self._begun) > self._most or any(len(line) > self._most for line in lines):
            raise GameLostError("oversize", f"a line of more than {self._most:,} bytes")
        return [line for line in (line.rstrip(b"\r") for line in lines) if line]


class Lengths:
    """Frames. A frame: the payload's length in four bytes (big-endian), then the payload, at most `most_bytes`."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most, self._begun = most_bytes, bytearray()

    def pack(self, payload: bytes) -> bytes:
        return struct.pack(">I", len(payload)) + payload

    def feed(self, data: bytes) -> list[bytes]:
        begun, at, payloads = self._begun, 0, []
        begun += data
        while len(begun) - at >= 4:
            (size,) = struct.unpack_from(">I", begun, at)
            if size > self._most:
                raise GameLostError("oversize", f"a frame of {size:,} bytes, at most {self._most:,} are allowed")
            if len(begun) - at - 4 < size:
                break
            payloads.append(bytes(begun[at + 4 : at + 4 + size]))
            at += 4 + size
        del begun[:at]
        return payloads


class Text:
    """Messages are text."""

    def encode(self, message: object) -> bytes:
        return str(message).encode()

    def decode(self, payload: bytes) -> object:
        try:
            return payload.decode()
        except UnicodeDecodeError as error:
            raise _garbage("text", error) from error


def _constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number of JSON")


class Json:
    """Strict JSON, without NaN and Infinity."""

    def __init__(self, most_depth: int = MOST_DEPTH) -> None:
        self._depth = most_depth
        self._encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
        self._decode = json.JSONDecoder(parse_constant=_constant).decode

    def encode(self, message: object) -> bytes:
        return self._encode(message).encode()

    def decode(self, payload: bytes) -> object:
        try:
            message = self._decode(payload.decode())
        except (ValueError, RecursionError) as error:
            raise _garbage("JSON", error) from error
        if payload.count(b"[") + payload.count(b"{") > self._depth:
            check_depth(message, self._depth)
        return message


class MsgPack:
    """msgpack without its extensions."""

    def __init__(self, most_depth: int = MOST_DEPTH) -> None:
        self._depth = most_depth
        try:
            self._msgpack = import_module("msgpack")
        except ImportError as error:
            raise ModuleNotFoundError('msgpack is not installed: pip install "fasttrain[daemons]"') from error

    def encode(self, message: object) -> bytes:
        packed: bytes = self._msgpack.packb(message)
        return packed

    def decode(self, payload: bytes) -> object:
        most = min(MOST_ENTRIES, len(payload))
        try:
            message = self._msgpack.unpackb(
                payload, strict_map_key=True, max_array_len=most, max_map_len=most, max_ext_len=0, timestamp=0
            )
        except (ValueError, self._msgpack.exceptions.UnpackException, RecursionError) as error:
            raise _garbage("msgpack", error) from error
        check_depth(message, self._depth)
        return message


FRAMINGS: dict[str, type[Framing]] = {"lines": Lines, "length": Lengths}
CODECS: dict[str, type[Codec]] = {"text": Text, "json": Json, "msgpack": MsgPack}


def check_depth(message: object, most: int) -> None:
    """Raises GameLostError if lists and mappings are nested more than `most` deep."""
    level = [message]
    for _ in range(most):
        level = [
            part
            for whole in level
            if isinstance(whole, (list, dict))
            for part in (whole.values() if isinstance(whole, dict) else whole)
        ]
    if any(isinstance(part, (list, dict)) for part in level):
        raise GameLostError("too deep", f"a message nested more than {most} deep")


def _garbage(what: str, error: Exception) -> GameLostError:
    return GameLostError("garbage", f"no {what}: {type(error).__name__}: {str(error)[:200]}")
