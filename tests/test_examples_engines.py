"""examples/engines: the two programs play the same games; each switch has its effect, each fault is on the wire."""

from __future__ import annotations

import json
import math
import os
import random
import runpy
import select
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

ENGINES = Path(__file__).resolve().parent.parent / "examples" / "engines"
pytestmark = pytest.mark.skipif(os.name != "posix", reason="the engines use unix sockets and signals")
Command = list[str]


class Talk:
    """One connection to an engine: over a socket, or over the pipes of a process of its own."""

    def __init__(self, reads: int, writes: int, process: subprocess.Popen[bytes], framing: str = "lines"):
        self.reads, self.writes, self.process, self.framing = reads, writes, process, framing
        self.got, self.heard = b"", list[bytes]()

    def say_bytes(self, data: bytes) -> None:
        os.write(self.writes, data)

    def say(self, kind: str, **message: Any) -> None:
        payload = json.dumps({"type": kind, **message}).encode()
        self.say_bytes(payload + b"\n" if self.framing == "lines" else len(payload).to_bytes(4, "big") + payload)

    def more(self, wanted: int = 1) -> bool:
        """Read until so many bytes more have come; whether they have."""
        wanted += len(self.got)
        while len(self.got) < wanted:
            try:
                data = os.read(self.reads, 1 << 16)
            except ConnectionResetError:
                data = b""
            self.got += data
            if not data:
                return False
        return True

    def take(self, size: int) -> bytes:
        taken, self.got = self.got[:size], self.got[size:]
        return taken

    def hear_bytes(self) -> bytes:
        """The payload of the next frame; b"" where there is no whole one and there will be none."""
        if self.framing == "lines":
            while b"\n" not in self.got:
                if not self.more():
                    return b""
            self.heard.append(self.take(self.got.index(b"\n") + 1)[:-1])
            return self.heard[-1]
        while len(self.got) < 4 or len(self.got) < 4 + int.from_bytes(self.got[:4], "big"):
            if not self.more():
                return b""
        return self.take(int.from_bytes(self.take(4), "big"))

    def hear(self) -> Any:
        return json.loads(self.hear_bytes())

    def ask(self, kind: str, **message: Any) -> Any:
        self.say(kind, **message)
        return self.hear()

    def silent(self) -> bool:
        return not self.got and not select.select([self.reads], [], [], 0.3)[0]


@pytest.fixture(scope="session")
def java(tmp_path_factory: pytest.TempPathFactory) -> Command:
    if shutil.which("javac") is None or shutil.which("java") is None:
        pytest.skip("javac is not installed")
    classes = tmp_path_factory.mktemp("classes")
    subprocess.run(["javac", "-Xlint:all", "-Werror", "-d", str(classes), str(ENGINES / "PigEngine.java")], check=True)
    return ["java", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xmx256m", "-cp", str(classes), "PigEngine"]


PYTHON = [sys.executable, "-S", str(ENGINES / "pig_engine.py")]


@pytest.fixture(params=["python", "java"])
def command(request: pytest.FixtureRequest) -> Command:
    return PYTHON if request.param == "python" else request.getfixturevalue("java")


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    """Sockets and processes that end with the test."""
    with ExitStack() as stack:
        yield stack


def popen(opened: ExitStack, command: Command) -> Any:
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe)
    opened.callback(process.communicate)
    opened.callback(process.kill)
    return process


@pytest.fixture
def start(opened: ExitStack) -> Callable[..., Talk]:
    """An engine on stdin and stdout."""

    def start(command: Command, *switches: str) -> Talk:
        process = popen(opened, [*command, "--stdio", *switches])
        framing = "length" if "length" in switches else "lines"
        return Talk(process.stdout.fileno(), process.stdin.fileno(), process, framing)

    return start


@pytest.fixture
def serve(opened: ExitStack) -> Callable[..., Callable[[], Talk]]:
    """An engine that listens; what comes back connects to it."""

    def serve(command: Command, *switches: str) -> Callable[[], Talk]:
        process = popen(opened, [*command, *switches])
        said, _, place = process.stderr.readline().decode().strip().partition(" on ")
        assert said == "listening"

        def connect() -> Talk:
            one = opened.enter_context(socket.socket(socket.AF_UNIX if place.startswith("/") else socket.AF_INET))
            one.connect(place if place.startswith("/") else ("127.0.0.1", int(place.rpartition(":")[2])))
            return Talk(one.fileno(), one.fileno(), process)

        return connect

    return serve


Start = Callable[..., Talk]


def decisions(talk: Talk, seed: int) -> list[dict[str, Any]]:
    """A game in decision mode, with random legal actions: what the engine said."""
    agent, heard = random.Random(seed), list[Any]()
    talk.say("new", game=seed, seed=seed)
    while not heard or heard[-1]["type"] != "over":
        heard.append(talk.hear())
        if heard[-1]["type"] == "decide":
            talk.say("choose", game=seed, id=heard[-1]["id"], action=agent.choice([0, 0, *heard[-1]["legal"]]))
    return heard


def requests(talk: Talk, seed: int) -> list[dict[str, Any]]:
    """The same game in request mode."""
    agent = random.Random(seed)
    heard = [talk.ask("reset", id=0, seed=seed)]
    while not heard[-1]["over"]:
        heard.append(talk.ask("step", id=len(heard), action=agent.choice([0, 0, *heard[-1]["legal"]])))
    return heard


SEEDS = (*range(14), -1, -(2**63), 2**63 - 1)


def test_the_twins_send_the_same_bytes(java: Command, start: Start):
    one, other = start(PYTHON, "--notes"), start(java, "--notes")
    for seed in SEEDS:
        for talk in (one, other):
            decisions(talk, seed)
            requests(talk, seed)
    assert one.heard == other.heard
    assert len(one.heard) > 500


def test_the_state_follows_from_the_dice_by_the_rules(start: Start):
    talk, first = start(PYTHON, "--notes"), {0: "", 1: ""}
    ends = set()
    for seed in range(20):
        mine = theirs = turn = 0
        heard = decisions(talk, seed)
        agent, action = random.Random(seed), None
        if heard[0]["type"] == "note":
            first[seed % 2] += heard[0]["text"][:3]
        for message in heard:
            if action == 1:
                mine, turn, action = mine + turn, 0, None
            if message["type"] == "note":
                who, die = message["text"].split(" rolled ")
                turn = 0 if die == "1" else turn + int(die)
                if who == "the engine" and (turn >= 20 or theirs + turn >= 50):
                    theirs, turn = theirs + turn, 0
                continue
            assert message["state"] == [mine, theirs, turn]
            if message["type"] == "decide":
                assert message["legal"] == ([0, 1] if turn else [0])
                assert message["reward"] == 0
                action = agent.choice([0, 0, *message["legal"]])
        assert heard[-1]["reward"] == (1 if mine >= 50 else -1)
        assert heard[-1]["won"] == (mine >= 50)
        assert max(mine, theirs) >= 50
        ends.add(heard[-1]["won"])
    assert ends == {True, False}
    assert first == {0: "", 1: "the" * 10}  # in even seeds the agent is asked before anybody threw


def test_request_mode_plays_the_same_game_and_pipelined_requests_are_answered_in_order(command: Command, start: Start):
    talk = start(command)
    for seed in range(5):
        asked, stepped = decisions(talk, seed), requests(talk, seed)
        assert [one["state"] for one in asked] == [one["state"] for one in stepped]
        assert [stepped[-1][key] for key in ("won", "reward", "legal")] == [asked[-1]["won"], asked[-1]["reward"], []]
    ids = [1, "two", 3.5, None, [4, {"five": True}], 's\u00e9ven\n\U0001f3b2"', 2**70]
    talk.say("reset", id=ids[0], seed=2)
    for id_ in ids[1:]:
        talk.say("step", id=id_, action=0)
    assert [talk.hear()["id"] for _ in ids] == ids


def test_a_game_is_drawn_after_a_thousand_dice(command: Command, start: Start):
    heard = decisions(start(command, "--goal", "1000000", "--notes"), 4)
    assert sum(one["type"] == "note" for one in heard) == 1000
    assert (heard[-1]["reward"], heard[-1]["won"]) == (0, False)


def test_frames_by_length_and_one_that_is_too_long_and_msgpack(command: Command, start: Start):
    talk = start(command, "--framing", "length")
    assert decisions(talk, 3)[-1]["type"] == "over"
    talk.say_bytes(((1 << 20) + 1).to_bytes(4, "big"))
    assert not talk.more()
    if command == PYTHON:
        msgpack = pytest.importorskip("msgpack", reason="msgpack is not installed")
        talk = start([sys.executable, PYTHON[-1]], "--framing", "length", "--codec", "msgpack")
        payload = msgpack.packb({"type": "reset", "id": 1, "seed": 2})
        talk.say_bytes(len(payload).to_bytes(4, "big") + payload)
        assert msgpack.unpackb(talk.hear_bytes())["state"] == [0, 0, 0]


def test_what_is_wrong_is_refused_or_an_error_and_the_game_goes_on(command: Command, start: Start):
    talk = start(command)
    first = talk.ask("new", game=17, seed=2)
    assert list(first) == ["type", "game", "id", "state", "legal", "reward", "ms"]
    for wrong in ({"action": 1}, {"action": 7}, {"action": "x"}, {"action": None}, {"action": False}, {"id": 2},
                  {"game": 18}, {"game": None}, {"id": True}, {"id": 1.0}):  # fmt: skip
        refused = talk.ask("choose", **{"game": 17, "id": 1, "action": 0, **wrong})
        assert {**refused, "why": ""} == {"type": "refused", "game": 17, "id": 1, "legal": [0], "why": ""}
    for text in ("", "nonsense", "[1]", "3", "{}", '{"type":"dance"}', '{"type":["ping"]}', '{"type":"new","seed":1}',
                 '{"type":"choose"}', '{"type":"ping"} x', '{"type":"ping",}', '{"type":NaN}', '{"a":01}', '"\\x"',
                 '{"type":"new","game":1,"seed":1.5}', "[" * 900, '{"type":"new","game":1,"seed":1e3}',
                 "\udcff"):  # fmt: skip
        talk.say_bytes(text.encode(errors="surrogateescape") + b"\n")
        assert talk.hear()["type"] == "error", text
    assert talk.ask("step", id=5, action=0)["type"] == "error"  # the game is one of decision mode
    assert talk.ask("ping") == {"type": "pong"}
    assert talk.ask("choose", game=17, id=1, action=0)["id"] == 2
    assert talk.ask("reset", id=6, seed=2)["state"] == first["state"]
    assert {**talk.ask("step", id=7, action=1), "why": ""} == {"type": "error", "id": 7, "why": ""}
    assert talk.ask("choose", game=17, id=2, action=0)["type"] == "refused"
    assert talk.ask("step", id=8, action=0)["type"] == "state"
    talk.say_bytes(b'"' + b"x" * (1 << 20))
    assert talk.hear_bytes() == b""
    assert talk.process.wait() == 0


@pytest.mark.parametrize("wrong", ["", "--port 70000", "--stdio --fault dance=1", "--stdio --codec msgpack"])
def test_wrong_arguments_end_in_one_line_and_code_2(command: Command, wrong: str):
    done = subprocess.run([*command, *wrong.split()], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr


def test_a_port_serves_connections_apart_and_is_taken_once(command: Command, serve: Any):
    connect = serve(command, "--port", "0", "--max-connections", "2")
    one, two = connect(), connect()
    assert one.ask("reset", id=1, seed=2)["state"] == two.ask("reset", id=1, seed=4)["state"] == [0, 0, 0]
    assert not connect().more()  # the third of two
    assert decisions(one, 6) == decisions(two, 6)
    port = psutil.Process(one.process.pid).net_connections()[0].laddr.port
    done = subprocess.run([*command, "--port", str(port)], capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


def test_a_unix_socket_is_taken_once_and_what_a_killed_engine_left_is_no_hindrance(command, serve, tmp_path):
    path = str(tmp_path / "pig")
    talk = serve(command, "--socket", path)()
    assert talk.ask("ping") == {"type": "pong"}
    assert subprocess.run([*command, "--socket", path], capture_output=True).returncode == 2
    talk.process.kill()
    talk.process.wait()
    assert serve(command, "--socket", path)().ask("ping") == {"type": "pong"}


def expected_ms(seed: int, mean: float, spread: float, count: int) -> list[float]:
    """The think times as pig_engine.py draws them, worked out apart."""
    draws = runpy.run_path(str(ENGINES / "pig_engine.py"))["Draws"](seed)
    variance = math.log(1 + spread**2)
    normals = [math.sqrt(-2 * math.log(1 - draws.unit())) * math.cos(2 * math.pi * draws.unit()) for _ in range(count)]
    return [mean * math.exp(math.sqrt(variance) * normal - variance / 2) for normal in normals]


def test_think_times_are_slept_as_drawn(command: Command, start: Start):
    talk = start(command, "--think-ms", "2", "--think", "lognormal", "--spread", "1.5", "--think-seed", "2")
    said = [one["ms"] for one in decisions(talk, 3)]
    wanted = expected_ms(2, 2.0, 1.5, len(said))
    assert all(ms >= least - 0.1 for ms, least in zip(said, wanted, strict=True))  # none is cut short


def test_games_take_processor_time_and_memory_and_are_logged(command: Command, start: Start):
    talk = start(command, "--think-ms", "40", "--compute", "--leak-mb-per-game", "20", "--log")
    talk.ask("reset", id=1, seed=2)
    process: Any = talk.process
    said = [process.stderr.readline().decode() for _ in range(2)]
    assert said == ["listening on stdio\n", '0 <- {"type": "reset", "id": 1, "seed": 2}\n']
    spent, held = sum(psutil.Process(process.pid).cpu_times()[:2]), psutil.Process(process.pid).memory_info().rss
    for seed in range(6):
        talk.ask("reset", id=1, seed=2 * seed)  # drops the game before
    assert sum(psutil.Process(process.pid).cpu_times()[:2]) - spent > 0.2  # 6 times 40 ms, counted by 10
    assert psutil.Process(process.pid).memory_info().rss - held > 80 << 20


# ---- faults


def clean(**changed: Any) -> dict[str, Any]:
    first = {"type": "decide", "game": 17, "id": 1, "state": [0, 0, 0], "legal": [0], "reward": 0.0, "ms": 0.0}
    return {**first, **changed}


def begun(start: Start, command: Command, fault: str, *switches: str) -> Talk:
    talk = start(command, "--fault", f"{fault}=1", *switches)
    talk.say("new", game=17, seed=2)
    return talk


FAULTS: list[tuple[str, Callable[[Talk], bool]]] = [
    ("crash", lambda talk: (talk.hear_bytes(), talk.process.wait()) == (b"", 7)),
    ("oom", lambda talk: talk.hear_bytes() == b"" and talk.process.wait() in (-9, 3)),
    ("nan", lambda talk: b'"state":[NaN,0,0],' in talk.hear_bytes()),
    ("deep", lambda talk: b'"state":' + b"[" * 100_000 + b"]" * 100_000 + b"," in talk.hear_bytes()),
    ("slow", lambda talk: talk.more() and talk.got == b"{"),
    ("illegal_mask", lambda talk: talk.hear() == clean(legal=[])),
    ("wrong_shape", lambda talk: talk.hear() == clean(state=[0, 0])),
    ("wrong_game", lambda talk: talk.hear() == clean(game=18) and talk.ask("reset", id=1, seed=2)["id"] == 1001),
]


@pytest.mark.parametrize(("fault", "is_there"), FAULTS, ids=[name for name, _ in FAULTS])
def test_each_fault_is_on_the_wire(command: Command, start: Start, fault: str, is_there: Callable[[Talk], bool]):
    assert is_there(begun(start, command, fault))


def test_a_stopped_process_goes_on_when_it_is_continued(command: Command, start: Start):
    talk = begun(start, command, "stop")
    process = psutil.Process(talk.process.pid)
    while process.status() != psutil.STATUS_STOPPED:
        pass
    assert talk.silent()
    process.resume()
    assert talk.hear() == clean()


@pytest.mark.parametrize("fault", ["close", "half_close", "hang", "truncate"])
def test_faults_of_the_connection(command: Command, serve: Any, fault: str):
    talk = serve(command, "--port", "0", "--fault", f"{fault}=1")()
    talk.say("new", game=17, seed=2)
    if fault == "hang":
        talk.say("ping")
        assert talk.silent()
        return
    assert talk.hear_bytes() == b""
    if fault == "truncate":
        whole = json.dumps(clean(), separators=(",", ":")).encode() + b"\n"
        assert talk.got == whole[: len(whole) // 2]
    if fault == "half_close":  # what it is told is still read: a closed peer resets the connection
        for _ in range(3):
            talk.say("ping")
        assert not talk.more()


def test_a_legal_action_is_refused_once(command: Command, start: Start):
    talk = begun(start, command, "refuse")
    assert talk.hear() == clean()
    assert talk.ask("choose", game=17, id=1, action=0)["legal"] == [0]
    again = talk.ask("choose", game=17, id=1, action=0)
    assert (again["type"], again["id"], again["legal"]) == ("decide", 2, [0, 1])
    refused = talk.ask("choose", game=17, id=2, action=1)
    assert (refused["type"], refused["legal"]) == ("refused", [0])
    assert talk.ask("choose", game=17, id=2, action=1)["type"] == "refused"  # it is withdrawn
    assert talk.ask("choose", game=17, id=2, action=0)["id"] == 3


@pytest.mark.parametrize("framing", ["lines", "length"])
def test_oversize(command: Command, start: Start, framing: str):
    talk = begun(start, command, "oversize", "--framing", framing)
    assert talk.more(2 << 20 if framing == "lines" else 12)
    assert talk.got[:12] == (b"x" * 12 if framing == "lines" else b'\x04\x00\x00\x00{"type":')


def test_reordered_answers_and_decisions(command: Command, start: Start):
    talk = start(command, "--fault", "reorder=1")
    for id_ in (1, 2, 3, 4):
        talk.say("reset", id=id_, seed=2)
    assert sorted(talk.hear()["id"] for _ in range(4)) == [1, 2, 3, 4]
    talk.say_bytes(b'{"type":"reset","id":5,"seed":2}\n{"type":"ping"}\n')
    assert [talk.hear()["type"] for _ in range(2)] == ["pong", "state"]
    assert talk.ask("reset", id=6, seed=2)["id"] == 6  # nothing comes: after 100 ms
    talk.say("new", game=1, seed=2)
    assert [talk.hear()["type"] for _ in range(2)] == ["state", "decide"]
    talk.say("choose", game=1, id=1, action=0)
    assert [talk.hear()["id"] for _ in range(2)] == [1, 2]


@pytest.mark.parametrize("fault", ["garbage", "mutate"])
def test_changed_bytes_are_the_same_in_both(java: Command, start: Start, fault: str):
    said = []
    for command in (PYTHON, java):
        for seed in ("1", "2"):
            talk = start(command, "--fault", f"{fault}=1", "--fault-seed", seed)
            for game in range(20):
                talk.say("new", game=game, seed=2)
            said.append([talk.hear_bytes() for _ in range(20)])
    assert said[0] == said[2] != said[1] == said[3]
    whole = [json.dumps(clean(game=game), separators=(",", ":")).encode() for game in range(20)]
    changes = [sum(a != b for a, b in zip(*pair, strict=True)) for pair in zip(said[0], whole, strict=True)]
    assert all(1 <= one <= 4 for one in changes) if fault == "mutate" else min(changes) == len(whole[0])


def test_faults_are_drawn_with_their_probability_the_same_in_both(java: Command, start: Start):
    said = []
    for command in (PYTHON, java):
        talk = start(command, "--fault", "wrong_shape=0.2", "--fault", "wrong_game=0.5", "--fault-seed", "3")
        for game in range(200):
            talk.say("new", game=game, seed=2)
        heard = [talk.hear() for _ in range(200)]
        said.append([(len(one["state"]), one["game"] - game) for game, one in enumerate(heard)])
    assert said[0] == said[1]
    assert 20 <= said[0].count((2, 0)) <= 60
    assert 50 <= said[0].count((3, 1)) <= 110
