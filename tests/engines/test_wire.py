"""What an engine sends is cut into frames and decoded, or the game is lost: nothing else may come of any bytes."""

from __future__ import annotations

import struct
import sys
from importlib.util import find_spec
from typing import Any

import pytest

from fasttrain_engines.wire import FRAMINGS, MOST_DEPTH, GameLostError, Json, Lengths, Lines, MsgPack, Text, check_depth

PAYLOADS = [b'{"a":1}', b"x", b'{"b":[1,2,3]}']


@pytest.mark.parametrize("kind", ["lines", "length"])
def test_a_stream_may_be_cut_anywhere(kind: str):
    stream = b"".join(FRAMINGS[kind]().pack(payload) for payload in PAYLOADS)
    for first in range(len(stream) + 1):
        for second in range(first, len(stream) + 1):
            framing = FRAMINGS[kind]()
            parts = (stream[:first], stream[first:second], stream[second:])
            assert [payload for part in parts for payload in framing.feed(part)] == PAYLOADS
    framing = FRAMINGS[kind]()
    assert [payload for byte in stream for payload in framing.feed(bytes([byte]))] == PAYLOADS


def test_a_line_may_end_as_on_windows_and_empty_ones_say_nothing():
    assert Lines().feed(b"\n\r\na\r\n\nb\n") == [b"a", b"b"]


def test_a_message_with_a_line_break_is_no_line():
    with pytest.raises(ValueError, match="must not contain a line break"):
        Lines().pack(b"a\nb")


@pytest.mark.parametrize(
    ("framing", "begun", "goes_on"),
    [
        (Lines(10), b"x" * 10, b"x"),
        (Lines(10), b"x" * 5, b"x" * 6 + b"\n"),
        (Lines(10), b"a\nb\n", b"y" * 11 + b"\nc\n"),
        (Lengths(10), b"", struct.pack(">I", 11)),
        (Lengths(10), struct.pack(">I", 3) + b"abc" + b"\xff\xff\xff", b"\xff"),
    ],
)
def test_a_frame_that_is_too_large_ends_the_game_before_it_is_there(framing: Any, begun: bytes, goes_on: bytes):
    assert framing.feed(framing.pack(b"0123456789")) == [b"0123456789"], "the largest"
    framing.feed(begun)
    with pytest.raises(GameLostError, match="more than 10 bytes|at most 10") as lost:
        framing.feed(goes_on)
    assert lost.value.cause == "oversize"


@pytest.mark.parametrize(
    "payload",
    [
        b"", b"{", b"NaN", b"-Infinity", b'{"a":Infinity}', b"[1,]", b"\xff", b'"\xed\xa0\x80"', b"{'a':1}", b"1 2",
        b"[" * 100_000, b"[" * 100_000 + b"]" * 100_000, b'{"a":' * 5000 + b"1" + b"}" * 5000,
        pytest.param(b"9" * 5000, marks=pytest.mark.skipif(sys.version_info < (3, 11), reason="no limit of digits")),
    ],
    ids=lambda payload: payload[:12].decode(errors="replace"),
)  # fmt: skip
def test_what_is_no_json_is_garbage(payload: bytes):
    with pytest.raises(GameLostError) as lost:
        Json().decode(payload)
    assert lost.value.cause in ("garbage", "too deep")
    assert len(str(lost.value)) < 300


def test_json_goes_both_ways_and_refuses_our_own_nan():
    message = {"a": [1, 2.5, None, True], "ü": "é\n"}
    assert Json().decode(Json().encode(message)) == message
    assert b"\n" not in Json().encode(message)
    with pytest.raises(ValueError, match="not JSON compliant"):
        Json().encode({"a": float("nan")})


def test_text_is_utf8():
    assert Text().decode(Text().encode("héllo")) == "héllo"
    with pytest.raises(GameLostError):
        Text().decode(b"\xff\xfe")


def test_depth_has_a_limit():
    assert Json().decode(b"[" * MOST_DEPTH + b"]" * MOST_DEPTH) is not None
    with pytest.raises(GameLostError, match="more than 32 deep") as lost:
        Json().decode(b'{"a":[0],"b":' + b"[" * MOST_DEPTH + b"1" + b"]" * MOST_DEPTH + b"}")
    assert lost.value.cause == "too deep"
    assert Json().decode(b"[" + b"[],{}," * 1000 + b"1]") is not None, "wide is not deep"
    check_depth([[1]], 2)
    with pytest.raises(GameLostError):
        check_depth([[1]], 1)


def test_msgpack_that_is_not_installed_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "msgpack", None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "fasttrain\[daemons\]"'):
        MsgPack()


@pytest.mark.skipif(find_spec("msgpack") is None, reason="msgpack is not installed: pip install msgpack")
def test_msgpack_refuses_extensions_depth_and_halves():
    import msgpack

    codec = MsgPack()
    assert codec.decode(codec.encode({"a": [1, 2.5, "x"]})) == {"a": [1, 2.5, "x"]}
    for payload in (msgpack.packb(msgpack.ExtType(5, b"x")), b"", codec.encode([1, 2])[:-1], b"\xdd\xff\xff\xff\xff"):
        with pytest.raises(GameLostError):
            codec.decode(payload)
    with pytest.raises(GameLostError):
        codec.decode(b"\x91" * 99_999 + b"\x90")
