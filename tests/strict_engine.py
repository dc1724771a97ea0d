"""The reference engine, with habits of real ones: python strict_engine.py MOST GAMES --port …

It takes MOST connections at once and leaves one more without an answer (negative: it closes that one). It closes a
connection after GAMES games (0: never).
"""

import asyncio
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples" / "engines"))
import pig_engine

MOST, GAMES = int(sys.argv[1]), int(sys.argv[2])
sys.argv[1:] = sys.argv[3:]


class Strict(pig_engine.Engine):
    async def accept(self, reader, writer):
        if MOST > 0 and self.open >= MOST:
            await asyncio.sleep(1e6)
        self.args.max_connections = abs(MOST)
        await super().accept(reader, writer)


class Closing(pig_engine.Connection):
    games = 0

    async def present(self, request):
        await super().present(request)
        self.games += self.pig.over
        if GAMES and self.games == GAMES:
            raise EOFError


pig_engine.Engine, pig_engine.Connection = Strict, Closing
pig_engine.main()
