"""Frames and messages. What an engine sends is hostile until it is decoded: everything has a limit. No sockets here.

A message is what a codec makes of one frame: a str (`Text`), or what JSON and msgpack can say. Neither runs any code.
"""

from __future__ import annotations

import json
import struct
from importlib import import_module
from typing import NoReturn, Protocol

MOST_BYTES = 1 << 20  # of one frame
MOST_DEPTH = 32  # of lists and mappings in each other
MOST_ENTRIES = 1 << 16  # of one list or mapping (msgpack announces them before it sends them)


class GameLostError(Exception):
    """A game cannot go on, by no rule of its own: its engine, or the way to it, failed.

    Args:
        cause: one word or two, by which lost games are counted.
    """

    def __init__(self, cause: str, text: str) -> None:
        super().__init__(text)
        self.cause = cause


class Framing(Protocol):
    """Cuts a stream of bytes into frames; one for each connection."""

    def pack(self, payload: bytes) -> bytes:
        """The frame of a payload."""

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads that are whole now.

        Raises:
            GameLostError: a frame is larger than allowed; nothing after it can be trusted.
        """


class Codec(Protocol):
    """Makes payloads of messages and messages of payloads."""

    def encode(self, message: object) -> bytes:
        """The payload of a message of ours."""

    def decode(self, payload: bytes) -> object:
        """The message.

        Raises:
            GameLostError: it is none, or it is too deep.
        """


class Lines:
    """A frame is a line, of `most_bytes` at most. Empty ones say nothing."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most, self._begun = most_bytes, bytearray()

    def pack(self, payload: bytes) -> bytes:
        if b"\n" in payload:
            raise ValueError("a message in lines must not hold a line break")
        return payload + b"\n"

    def feed(self, data: bytes) -> list[bytes]:
        self._begun += data
        lines = []
        if b"\n" in data:
            *lines, rest = bytes(self._begun).split(b"\n")
            self._begun = bytearray(rest)
        if len(self._begun) > self._most or any(len(line) > self._most for line in lines):
            raise GameLostError("oversize", f"a line of more than {self._most:,} bytes")
        return [line for line in (line.rstrip(b"\r") for line in lines) if line]


class Lengths:
    """A frame is its length in four bytes, the highest first, and the payload, of `most_bytes` at most."""

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
                raise GameLostError("oversize", f"a frame of {size:,} bytes, at most {self._most:,} are taken")
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
    """JSON as its standard has it: no NaN, no Infinity."""

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
    """msgpack; its extensions, which could stand for anything, are refused."""

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
    """Raise `GameLostError` where lists and mappings lie in each other more than `most` deep."""
    level = [message]
    for _ in range(most):
        level = [
            part
            for whole in level
            if isinstance(whole, (list, dict))
            for part in (whole.values() if isinstance(whole, dict) else whole)
        ]
    if any(isinstance(part, (list, dict)) for part in level):
        raise GameLostError("too deep", f"a message more than {most} deep")


def _garbage(what: str, error: Exception) -> GameLostError:
    return GameLostError("garbage", f"no {what}: {type(error).__name__}: {str(error)[:200]}")
