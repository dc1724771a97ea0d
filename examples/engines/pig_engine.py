"""A game engine in a process of its own, with an opponent, think time and faults: python pig_engine.py --port 20000

The game is Pig: who first banks 50 points wins. On a turn, action 0 throws the die and action 1 holds. A 1 ends the
turn with nothing, 2 to 6 add to the turn's total, and holding banks it; at a total of 0 only throwing is legal. The
agent plays the engine's own player, which holds at 20 or when that wins, and moves first in even seeds. After 1000
dice the game is drawn. A reward comes at the end: 1 won, -1 lost, 0 drawn. A state is [mine, theirs, turn's total].

PigEngine.java is the twin: the same switches, the same games, and at `--think-ms 0` the same bytes for the same seeds.

Messages are JSON objects, one a line; `--framing length` puts 4 bytes of length (big-endian) in front of each
instead, and `--codec msgpack` (here only) packs them. Any number of games follow each other on a connection, and a new
one drops what was unfinished. In decision mode the engine asks:

    → {"type":"new","game":17,"seed":123}
    ← {"type":"note","game":17,"text":"you rolled 4"}    after every die, with --notes; wants no answer
    ← {"type":"decide","game":17,"id":1,"state":[0,0,4],"legal":[0,1],"reward":0.0,"ms":5.01}
    → {"type":"choose","game":17,"id":1,"action":0}
    ← {"type":"refused","game":17,"id":1,"legal":[0,1],"why":"…"}    the same decision stays open
    ← {"type":"over","game":17,"state":[52,31,0],"reward":1.0,"won":true,"ms":5.0}

In request mode the agent does. Several requests may be under way; they are answered in order:

    → {"type":"reset","id":1,"seed":123}
    → {"type":"step","id":2,"action":1}
    ← {"type":"state","id":2,"state":[4,20,0],"legal":[0],"reward":0.0,"over":false,"ms":5.01}    at the end with "won"
    ← {"type":"error","id":2,"why":"…"}    the game goes on as it was

{"type":"ping"} is answered by {"type":"pong"}, anything else by {"type":"error","why":"…"}. A frame of more than 1 MiB
ends the connection. `ms` is how long the engine thought, as measured. `--fault` is drawn once for each decide and state
message: `python pig_engine.py --help` lists the kinds.
"""

import argparse
import asyncio
import contextlib
import json
import math
import os
import selectors
import signal
import socket
import stat
import sys
import time

LIMIT = 1 << 20
MASK = (1 << 64) - 1
NEEDS = {"ping": (), "new": ("game", "seed"), "choose": ("game", "id", "action"), "reset": ("id", "seed"),
         "step": ("id", "action")}  # fmt: skip
KINDS = {
    "crash": "the process exits with code 7", "hang": "the connection stays open and says nothing more",
    "stop": "the process stops itself (SIGSTOP)", "oom": "the process is killed as when memory ran out",
    "slow": "one byte a second", "garbage": "random bytes in a whole frame", "mutate": "1 to 4 bytes changed",
    "truncate": "half a frame, then closed", "deep": "100,000 nested arrays for a state",
    "reorder": "a state comes after the next answer, or 100 ms late; before a decide the previous one comes once more",
    "oversize": "64 MiB announced, or 2 MiB without a newline", "wrong_game": "game + 1 in a decide, id + 1000 else",
    "half_close": "its sending side is shut", "close": "closed", "refuse": "the next legal action is refused, once",
    "illegal_mask": "nothing is legal", "nan": "a NaN in the state", "wrong_shape": "a state of 2 numbers",
}  # fmt: skip

CHANGES = {
    "nan": lambda m: {"state": [math.nan, *m["state"][1:]]}, "wrong_shape": lambda m: {"state": m["state"][:2]},
    "deep": lambda m: {"state": "@"}, "illegal_mask": lambda m: {"legal": []},
    "wrong_game": lambda m: ({"game": m["game"] + 1} if "game" in m
                             else {"id": 1000 + (m["id"] if whole(m["id"]) else 0)}),
}  # fmt: skip


def fail(why):
    sys.stderr.write(f"pig_engine.py: {why}\n")
    sys.exit(2)


class Draws:
    """SplitMix64: a few lines in any language, and the same numbers in each."""

    def __init__(self, seed):
        self.at = seed & MASK

    def next(self):
        self.at = x = (self.at + 0x9E3779B97F4A7C15) & MASK
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
        return x ^ (x >> 31)

    def below(self, n):
        return (self.next() >> 33) % n

    def unit(self):
        return (self.next() >> 11) * 2.0**-53


class Pig:
    """One game, from the agent's side. Between its calls the agent is to move or the game is over."""

    def __init__(self, seed, goal):
        self.draws, self.goal = Draws(seed), goal
        self.mine = self.theirs = self.turn = self.dice = 0
        self.over, self.reward, self.rolls = False, 0.0, []
        if seed % 2:
            self.opponent()

    def state(self):
        return [self.mine, self.theirs, self.turn]

    def legal(self):
        return [] if self.over else [0, 1] if self.turn else [0]

    def act(self, action):
        self.rolls = []
        if action == 1:
            self.mine, self.turn = self.mine + self.turn, 0
            if self.mine >= self.goal:
                self.over, self.reward = True, 1.0
        if not self.over and (action == 1 or not self.throw("you")):
            self.opponent()

    def opponent(self):
        while not self.over:
            if self.turn and (self.turn >= 20 or self.theirs + self.turn >= self.goal):
                self.theirs, self.turn = self.theirs + self.turn, 0
                if self.theirs >= self.goal:
                    self.over, self.reward = True, -1.0
                return
            if not self.throw("the engine"):
                return

    def throw(self, who):
        """Whether the turn goes on."""
        die = 1 + self.draws.below(6)
        self.rolls.append(f"{who} rolled {die}")
        self.turn = 0 if die == 1 else self.turn + die
        self.dice += 1
        self.over = self.dice == 1000
        return die != 1


def json_codec():
    def no_constant(name):
        raise ValueError(name)  # NaN and Infinity are not JSON, though Python reads them

    encode = json.JSONEncoder(separators=(",", ":")).encode
    decode = json.JSONDecoder(parse_constant=no_constant).decode
    deep = (b'"@"', b"[" * 100_000 + b"]" * 100_000)
    return lambda m: encode(m).encode(), lambda payload: decode(payload.decode()), deep


def msgpack_codec():
    try:
        import msgpack  # only who asks for it needs it
    except ImportError:
        fail("--codec msgpack needs the package msgpack: pip install msgpack")
    return msgpack.packb, msgpack.unpackb, (b"\xa1@", b"\x91" * 99_999 + b"\x90")


def whole(x):
    return type(x) is int and -(1 << 63) <= x < 1 << 63


class Connection:
    def __init__(self, number, reader, writer, engine):
        self.number, self.reader, self.writer, self.engine, self.args = number, reader, writer, engine, engine.args
        self.encode, self.decode, self.deep = engine.codec
        self.thinking, self.faults = Draws(self.args.think_seed + number), Draws(self.args.fault_seed + number)
        self.pig, self.game, self.id, self.legal = None, None, 0, []  # legal: of the decision that is open
        self.refuses, self.held, self.previous = False, None, b""
        writer.transport.set_write_buffer_limits(high=0)  # so that drain() means: gone

    async def serve(self):
        while True:
            payload = await self.read()
            self.log("<-", payload)
            try:
                message = self.decode(payload)
            except Exception:  # whatever a codec raises for bytes that are not its own
                await self.send({"type": "error", "why": f"the message is not {self.args.codec}"})
                continue
            await self.handle(message)

    async def read(self):
        if self.args.framing == "lines":
            try:
                line = await self.reader.readline()
            except ValueError:  # longer than the reader's limit
                line = b""
            if not line.endswith(b"\n"):
                raise EOFError
            return line[:-1]
        size = int.from_bytes(await self.reader.readexactly(4), "big")
        if size > LIMIT:
            raise EOFError
        return await self.reader.readexactly(size)

    def framed(self, payload):
        return payload + b"\n" if self.args.framing == "lines" else len(payload).to_bytes(4, "big") + payload

    async def send(self, message):
        payload = self.encode(message)
        self.log("->", payload)
        await self.write(self.framed(payload))

    async def write(self, frame):
        held, self.held = self.held or b"", None
        self.writer.write(frame + held)
        await self.writer.drain()

    def log(self, arrow, payload):
        if self.args.log:
            text = payload[:300].decode(errors="replace") if self.args.codec == "json" else repr(payload[:300])
            sys.stderr.write(f"{self.number} {arrow} {text}\n")

    async def handle(self, message):
        kind = message.get("type") if isinstance(message, dict) else None
        needs = NEEDS.get(kind) if isinstance(kind, str) else None
        if needs is None:
            await self.send({"type": "error", "why": "a message is an object whose type is one of " + ", ".join(NEEDS)})
        elif any(key not in message for key in needs):
            await self.send({"type": "error", "why": f"{kind} needs {', '.join(needs)}"})
        elif kind == "ping":
            await self.send({"type": "pong"})
        elif kind in ("new", "reset"):
            await self.begin(message, message.get("game") if kind == "new" else None)
        else:
            await self.act(message, asked=kind == "choose")

    async def begin(self, message, game):
        if not whole(message["seed"]) or (message["type"] == "new" and not whole(game)):
            echo = {} if message["type"] == "new" else {"id": message["id"]}
            await self.send({"type": "error", **echo, "why": "game and seed are whole numbers of 64 bits"})
            return
        if self.pig and not self.pig.over:
            self.engine.leak()
        self.pig, self.game, self.id = Pig(message["seed"], self.args.goal), game, 0
        await self.present(message.get("id"))

    async def act(self, message, asked):
        action, why, legal = message["action"], None, self.legal
        if not legal or asked != (self.game is not None):
            why, legal = "no decision is open", []
        elif asked and not (whole(message["game"]) and whole(message["id"])
                            and (message["game"], message["id"]) == (self.game, self.id)):  # fmt: skip
            why = "another decision is open"
        elif not whole(action) or action not in legal:
            why = "the action is not legal"
        elif self.refuses:
            why, self.refuses = "the engine thought better of it", False
            legal = self.legal = [other for other in legal if other != action] or legal
        if why is None:
            self.pig.act(action)
            await self.present(message["id"])
        elif asked:
            game, id_ = (self.game, self.id) if legal else (message["game"], message["id"])
            await self.send({"type": "refused", "game": game, "id": id_, "legal": legal, "why": why})
        else:
            await self.send({"type": "error", "id": message["id"], "why": why})

    async def present(self, request):
        """What the agent sees next: the decision or the end of its game, or the answer to its request."""
        pig, asked = self.pig, self.game is not None
        if asked and self.args.notes:
            for text in pig.rolls:
                await self.send({"type": "note", "game": self.game, "text": text})
        ms = await self.think()
        self.legal, self.id = pig.legal(), self.id + 1
        if pig.over:
            self.engine.leak()
        seen = {"state": pig.state(), "legal": self.legal, "reward": pig.reward}
        won = {"won": pig.reward > 0} if pig.over else {}
        if not asked:
            await self.deliver({"type": "state", "id": request, **seen, "over": pig.over, **won, "ms": ms})
        elif pig.over:
            del seen["legal"]
            await self.send({"type": "over", "game": self.game, **seen, **won, "ms": ms})
        else:
            await self.deliver({"type": "decide", "game": self.game, "id": self.id, **seen, "ms": ms})

    async def think(self):
        ms, spread, began = self.args.think_ms, self.args.spread, time.perf_counter()
        if not ms:
            return 0.0
        if self.args.think == "lognormal":
            variance = math.log1p(spread * spread)
            normal = math.sqrt(-2 * math.log(1 - self.thinking.unit())) * math.cos(2 * math.pi * self.thinking.unit())
            ms *= math.exp(math.sqrt(variance) * normal - variance / 2)
        if self.args.compute:
            until = time.thread_time() + ms / 1000
            while time.thread_time() < until:
                pass
        else:
            await asyncio.sleep(ms / 1000)
        return round((time.perf_counter() - began) * 1000, 3)

    async def deliver(self, message):
        """Sends a decide or state message, with the fault that was drawn for it."""
        drawn = [kind for kind, probability in self.args.fault if self.faults.unit() < probability]
        fault = drawn[0] if drawn else None
        if fault in CHANGES:
            message.update(CHANGES[fault](message))
        self.refuses = fault == "refuse"
        payload = self.encode(message)
        if fault == "deep":  # no encoder nests that deep
            payload = payload.replace(*self.deep)
        self.log("->", payload)
        if fault:
            await self.spoil(payload, fault, message["type"] == "decide")
        else:
            await self.write(self.framed(payload))
        self.previous = self.framed(payload)

    async def spoil(self, payload, fault, asked):
        """What happens instead of sending `payload`; EOFError closes the connection."""
        frame = self.framed(payload)
        if fault == "crash":
            os._exit(7)
        elif fault == "oom":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)  # goes on here after SIGCONT
        elif fault == "slow":
            await self.write(b"")  # what is held back does not come in between
            for byte in frame:
                await self.write(bytes([byte]))
                await asyncio.sleep(1)
            return
        elif fault in ("garbage", "mutate"):
            frame = self.framed(self.scrambled(bytearray(payload), everywhere=fault == "garbage"))
        elif fault == "oversize":
            frame = b"x" * (2 << 20) if self.args.framing == "lines" else (64 << 20).to_bytes(4, "big") + payload[:8]
        elif fault == "reorder" and asked:
            frame = self.previous + frame  # in decision mode nothing could overtake it
        elif fault == "reorder" and self.held is None:
            self.held = frame
            asyncio.get_running_loop().call_later(0.1, self.release, frame)
            return
        elif fault in ("hang", "half_close"):
            self.held = None
            if fault == "half_close":
                self.writer.write_eof()
            while await self.reader.read(1 << 16):
                pass
            raise EOFError
        elif fault == "truncate":
            await self.write(frame[: len(frame) // 2])
        if fault in ("truncate", "close"):
            raise EOFError
        await self.write(frame)

    def release(self, frame):
        if self.held is frame:
            self.held = None
            self.writer.write(frame)

    def scrambled(self, payload, everywhere):
        below = self.faults.below
        for place in range(len(payload)) if everywhere else [below(len(payload)) for _ in range(1 + below(4))]:
            payload[place] ^= 1 + below(255)
            if payload[place] == 10 and self.args.framing == "lines":  # the frame is to stay one line
                payload[place] = 11
        return bytes(payload)


class Engine:
    def __init__(self, args):
        self.args, self.codec = args, msgpack_codec() if args.codec == "msgpack" else json_codec()
        self.open = self.accepted = 0
        self.kept = []

    def leak(self):
        self.kept.append(b"\x01" * int(self.args.leak_mb_per_game * (1 << 20)))  # written, so it is really there

    async def accept(self, reader, writer):
        if self.open < self.args.max_connections:
            self.open, self.accepted = self.open + 1, self.accepted + 1
            with contextlib.suppress(OSError, EOFError):  # the peer went, its framing is broken, or a fault closes
                await Connection(self.accepted - 1, reader, writer, self).serve()
            self.open -= 1
        writer.close()

    async def run(self):
        if self.args.stdio:
            loop, reader = asyncio.get_running_loop(), asyncio.StreamReader(limit=LIMIT)
            try:
                await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
                pipe = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, sys.stdout)
            except ValueError:
                fail("--stdio: stdin and stdout must be pipes, sockets or a terminal, not files")
            sys.stderr.write("listening on stdio\n")
            await self.accept(reader, asyncio.StreamWriter(*pipe, reader, loop))
            return
        listener, name = listening(self.args)
        server = await asyncio.start_server(self.accept, sock=listener, limit=LIMIT, backlog=512)
        sys.stderr.write(f"listening on {name}\n")
        await server.serve_forever()


def listening(args):
    try:
        if args.socket is None:
            listener = socket.socket()
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", args.port))
            return listener, f"127.0.0.1:{listener.getsockname()[1]}"
        if os.path.exists(args.socket) and stat.S_ISSOCK(os.stat(args.socket).st_mode):
            with socket.socket(socket.AF_UNIX) as probe:
                if probe.connect_ex(args.socket):  # nobody listens: a killed engine left it
                    os.unlink(args.socket)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(args.socket)
        return listener, args.socket
    except (OSError, OverflowError) as error:
        fail(f"cannot listen on {args.socket or args.port}: {error}")


def fault(text):
    kind, _, probability = text.partition("=")
    if kind not in KINDS or not 0 <= float(probability) <= 1:
        raise ValueError
    return kind, float(probability)


def arguments():
    kinds = "faults:\n" + "\n".join(f"  {kind:12} {text}" for kind, text in KINDS.items())
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(allow_abbrev=False, formatter_class=raw, epilog=kinds)
    parser.error = fail  # one line instead of the usage
    add = parser.add_argument
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--port", type=int, help="TCP on 127.0.0.1; 0: any, which is then printed")
    where.add_argument("--socket", metavar="PATH", help="a unix domain socket")
    where.add_argument("--stdio", action="store_true", help="one connection, on stdin and stdout")
    add("--framing", choices=("lines", "length"), default="lines")
    add("--codec", choices=("json", "msgpack"), default="json")
    add("--goal", type=int, default=50)
    add("--notes", action="store_true", help="decision mode: a notification for every die")
    add("--think-ms", type=float, default=0.0, help="before every decide, state and over")
    add("--think", choices=("constant", "lognormal"), default="constant")
    add("--spread", type=float, default=0.63, help="lognormal: standard deviation / mean")
    add("--think-seed", type=int, default=0)
    add("--compute", action="store_true", help="spend processor time instead of sleeping")
    add("--max-connections", type=int, default=sys.maxsize, help="at once; further ones are closed")
    add("--start-delay-s", type=float, default=0.0, help="before it listens; inf: never")
    add("--leak-mb-per-game", type=float, default=0.0)
    add("--log", action="store_true", help="each message to stderr, 300 characters of it")
    add("--fault", type=fault, action="append", default=[], metavar="KIND=PROBABILITY", help="repeatable")
    add("--fault-seed", type=int, default=0)
    args = parser.parse_args()
    if args.codec == "msgpack" and args.framing == "lines":
        fail("--codec msgpack needs --framing length: its bytes may hold a newline")
    for name in ("port", "goal", "think_ms", "spread", "max_connections", "start_delay_s", "leak_mb_per_game"):
        least, value = int(name in ("goal", "max_connections")), getattr(args, name)
        if value is not None and not least <= value < math.inf and (name, value) != ("start_delay_s", math.inf):
            fail(f"--{name.replace('_', '-')} {value}: must be at least {least} and finite")
    return args


def main():
    args, selector = arguments(), None
    time.sleep(min(args.start_delay_s, 1e9))
    if args.think_ms and not args.compute:
        # epoll sleeps whole milliseconds, rounded up; select is exact, and takes descriptors below 1024 only.
        selector, args.max_connections = selectors.SelectSelector(), min(args.max_connections, 1000)
    try:
        asyncio.SelectorEventLoop(selector).run_until_complete(Engine(args).run())
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
