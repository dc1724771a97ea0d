"""The reference engine, which notes each of its faults in a file, and whose start may fail too.

python counted_engine.py NOTES NEVER TAKEN --port …: with probability NEVER it never listens, with TAKEN somebody
else has its port by then
"""

import fcntl
import random
import socket
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent.parent / "examples" / "engines"))
import pig_engine

NOTES, NEVER, TAKEN = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
sys.argv[1:] = sys.argv[4:]


def note(kind):
    with open(NOTES, "a", encoding="utf-8") as file:
        file.write(kind + "\n")


class Counted(pig_engine.Connection):
    async def spoil(self, payload, fault, asked):
        note(fault)
        await super().spoil(payload, fault, asked)


class Refusing(pig_engine.Engine):
    async def accept(self, reader, writer):
        if self.open >= self.args.max_connections:
            note("connection refused")
        await super().accept(reader, writer)


# The very first start comes up: else the run is told that its settings are wrong.
try:
    Path(NOTES).touch(exist_ok=False)
    first = True
except FileExistsError:
    first = False
with open(NOTES + ".starts", "ab") as starts:  # which start this is: each has faults of its own, the same in every run
    fcntl.flock(starts, fcntl.LOCK_EX)
    start = starts.tell()
    starts.write(b".")
drawn = 1.0 if first else random.Random(start).random()
pig_engine.Connection, pig_engine.Engine = Counted, Refusing
if drawn < NEVER:
    note("start never ends")
    time.sleep(1e6)
elif drawn < NEVER + TAKEN:
    note("port taken")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])))
        taken.listen()
        pig_engine.main()
else:
    # Else each process would draw the same faults at the same places.
    sys.argv += ["--fault-seed", str(start)]
    pig_engine.main()
