"""Go against GNU Go 3.8, over the Go Text Protocol (GTP) on its pipes. One process plays on one board.

All commands for one decision are written at once: the learner's move, the engine's answer, the legal moves, the stones.
The engine knows legality, captures and the score; this module only makes observations of the board. GTP:
https://www.lysator.liu.se/~gunnar/gtp/gtp2-spec-draft2/gtp2-spec.html, GNU Go's own commands: its `gtp.c`.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Mapping
from typing import Any, Literal, NoReturn

import numpy as np
from gymnasium import spaces

from fasttrain.batch import Float32Array
from fasttrain_engines.channel import Channel
from fasttrain_engines.game import Decision, EngineGame, Over
from fasttrain_engines.wire import MOST_BYTES, GameLostError

LETTERS = "ABCDEFGHJKLMNOPQRST"  # I is left out
# With perfect play Black wins 5×5 by 25 points and 7×7 by 9 (https://webdocs.cs.ualberta.ca/~games/go/smallboard/).
KOMI = {5: 24.5, 7: 8.5, 9: 7.5}
COLOURS = ("both", "black", "white")
PASS, RESIGN = "PASS", "RESIGN"
ERR_STEPS = 40  # wins after which the opponent makes no more random moves (`errs`)
PLANES = 7  # own stones with 1, 2 and more liberties; the same for the opponent; the opponent's last move
MOST_SEED = 2**31 - 1


class Replies:
    """A frame is the reply to one command: `=12 C3` or `?12 illegal move`, ended by an empty line."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most, self._begun = most_bytes, b""

    def pack(self, payload: bytes) -> bytes:
        return payload + b"\n"

    def feed(self, data: bytes) -> list[bytes]:
        *whole, self._begun = (self._begun + data.replace(b"\r", b"")).split(b"\n\n")
        if max(map(len, (*whole, self._begun))) > self._most:
            raise GameLostError("oversize", f"a reply of more than {self._most:,} bytes")
        return [reply.strip() for reply in whole if reply.strip()]


class Go(EngineGame):
    """A game of Go. Actions are the points, row by row from the top left, and the pass.

    The observation (7 size² + 3,) holds planes of the board, whether the opponent has passed, whether the learner is
    Black, and the share of `most_moves` that were made. The reward is 1 or -1 at the end, by area (Chinese rules,
    positional superko), which GNU Go counts. The last info has `is_win`, `score_diff` (points ahead), `colour`,
    `result` and `errs`.

    Args:
        size: size of the board, 5 to 19.
        level: GNU Go's strength, 1 to 10.
        komi: points that White gets; None: half a point less than Black's lead in perfect play (KOMI), else 7.5.
        colour: the learner's colour; both: in turn. The seed of the first game decides the first colour.
        most_moves: moves of both sides after which the game is truncated; None: 3 size².
        errs: share of the opponent's moves that are random at the beginning, because a learner that never wins cannot
            learn. Each win with a colour reduces the share for this colour by errs / 40, each loss raises it by a
            third of that, so that the learner wins a quarter of the games until the share is 0.
    """

    framing, codec = Replies, "text"

    def __init__(
        self,
        size: int = 9,
        level: int = 1,
        komi: float | None = None,
        colour: Literal["both", "black", "white"] = "both",
        most_moves: int | None = None,
        errs: float = 0.0,
    ) -> None:
        if size not in range(5, len(LETTERS) + 1) or level not in range(1, 11) or colour not in COLOURS:
            typed = f"size={size}, level={level}, colour={colour}"
            raise ValueError(f"{typed}: a size is from 5 to 19, a level from 1 to 10, a colour both, black or white")
        if komi is not None and not isinstance(komi, (int, float)):
            raise ValueError(f"komi={komi} is no number")
        if not 0.0 <= errs <= 1.0 or (most_moves is not None and most_moves < 1):
            raise ValueError(
                f"errs={errs}, most_moves={most_moves}: expected a share from 0 to 1, and at least one move"
            )
        self._size, self._level, self._colour = size, level, colour
        self._komi = KOMI.get(size, 7.5) if komi is None else komi
        self._most = 3 * size * size if most_moves is None else most_moves
        self._errs, self._shares, self._rng = errs, {"black": errs, "white": errs}, np.random.default_rng()
        self._names = [f"{letter}{size - row}" for row in range(size) for letter in LETTERS[:size]]
        self._points = {name: point for point, name in enumerate(self._names)}
        self._id, self._games = 0, -1
        self.observation_space = spaces.Box(0.0, 1.0, (PLANES * size * size + 3,), np.float32)
        self.action_space = spaces.Discrete(size * size + 1)
        self._mine, self._theirs = "black", "white"
        self._moves: list[str] = []
        self._result = ""

    async def hello(self, channel: Channel) -> None:
        for command in ("all_legal", "set_random_seed"):  # only GNU Go has both commands
            if await self._asked(channel, f"known_command {command}") != ["true"]:
                raise GameLostError("start", f"the engine knows no {command}: is it GNU Go 3.8?")

    async def begin(self, channel: Channel, game: int, seed: int) -> Decision | Over:
        self._games = seed % 2 if self._games < 0 else self._games + 1
        black = self._colour == "black" or (self._colour == "both" and self._games % 2 == 0)
        self._mine, self._theirs = ("black", "white") if black else ("white", "black")
        self._moves, self._result = [], ""
        # By default GNU Go seeds with the time in seconds, so that processes that start together play equal games.
        seeded = (f"set_random_seed {seed % MOST_SEED}", "clear_board")
        commands = [f"boardsize {self._size}", f"komi {self._komi:g}", f"level {self._level}", *seeded]
        self._rng = np.random.default_rng(seed)
        return await (self._answered if black else self._they_move)(channel, *commands)

    async def play(self, channel: Channel, action: int) -> Decision | Over:
        move = PASS if action == len(self._names) else self._names[action]
        second_pass = move == PASS and self._moves[-1:] == [PASS]
        self._moves.append(move)
        ours = f"play {self._mine} {move}"
        if second_pass:  # the game ends, but GNU Go would continue
            return await self._over(channel, ours)
        return await self._they_move(channel, ours)

    async def _they_move(self, channel: Channel, *commands: str) -> Decision | Over:
        if self._rng.random() >= self._shares[self._mine]:
            return await self._answered(channel, *commands, f"genmove {self._theirs}")
        *_, legal = await self._asked(channel, *commands, f"all_legal {self._theirs}")
        move = self._rng.choice(sorted(legal.upper().split()) or [PASS])
        return await self._answered(channel, f"play {self._theirs} {move}")

    async def _answered(self, channel: Channel, *commands: str) -> Decision | Over:
        """Send commands and return the decision that follows. The last may be the opponent's `genmove` or `play`."""
        seen = (f"all_legal {self._mine}", "list_stones black", "list_stones white")
        *_, last, legal, black, white = await self._asked(channel, *commands, *seen)
        if self._theirs in commands[-1].split():
            self._moves.append((last or commands[-1].split()[-1]).upper())
            if self._moves[-1] not in (PASS, RESIGN):
                self._point(self._moves[-1])
            if self._moves[-1] == RESIGN:
                self._result = f"{self._mine[0].upper()}+R"
                return self._ended(self._seen(black, white), 1.0, {})
            if self._moves[-2:] == [PASS, PASS]:
                return await self._over(channel)
        observation = self._seen(black, white)
        if len(self._moves) >= self._most:
            return Over(observation, truncated=True, info={"colour": self._mine})
        points = [*map(self._point, legal.split()), len(self._names)]  # GNU Go never lists the pass
        return Decision(observation, points)

    async def _over(self, channel: Channel, *commands: str) -> Over:
        """The end of the game after both sides passed, with the engine's score."""
        *_, self._result, black, white = await self._asked(
            channel, *commands, "final_score", "list_stones black", "list_stones white"
        )
        counted = re.fullmatch(r"0|([BW])\+(\d+(?:\.\d+)?)", self._result) or _unknown("final_score", self._result)
        ahead = float(counted[2] or 0) * (1 if counted[1] == self._mine[0].upper() else -1)
        return self._ended(self._seen(black, white), float(np.sign(ahead)), {"score_diff": ahead})

    def _ended(self, observation: Float32Array, reward: float, info: Mapping[str, Any]) -> Over:
        share, less = self._shares[self._mine], self._errs / ERR_STEPS * (1 if reward > 0 else -1 / 3)
        self._shares[self._mine] = min(self._errs, max(0.0, share - less))
        told = {"is_win": reward > 0, "colour": self._mine, "result": self._result, "errs": share, **info}
        return Over(observation, reward, info=told)

    async def _asked(self, channel: Channel, *commands: str) -> list[str]:
        """Send commands in one write and return the engine's replies, without their heads.

        Raises:
            GameLostError: the engine refuses a command, or sends something else than replies.
        """
        if channel.unread():
            raise GameLostError("wrong answer", "the engine sent more replies than there were commands")
        first, self._id = self._id + 1, self._id + len(commands)
        channel.send("\n".join(f"{first + place} {command}" for place, command in enumerate(commands)))
        until, replies = time.monotonic() + self.timeout_s, []
        for place, command in enumerate(commands):
            reply = await channel.receive(max(0.0, until - time.monotonic()))
            found = re.fullmatch(r"=(\d+)(?: (.*))?", reply, re.DOTALL) or _unknown(command, reply)
            if int(found[1]) != first + place:
                raise GameLostError("wrong answer", f"the engine answered command {found[1]}, not {first + place}")
            replies.append((found[2] or "").strip())
        return replies

    def _point(self, name: str) -> int:
        point = self._points.get(name.upper())
        return _unknown("a point", name) if point is None else point

    def _seen(self, black: str, white: str) -> Float32Array:
        """The observation of a board with stones at these points."""
        area, stones = self._size * self._size, dict[int, int]()
        for side, names in enumerate((black, white) if self._mine == "black" else (white, black)):
            stones |= dict.fromkeys(map(self._point, names.split()), side)
        planes = np.zeros((PLANES, area), np.float32)
        for point, free in liberties(stones, self._size).items():
            planes[3 * stones[point] + min(free, 3) - 1, point] = 1.0
        last = self._moves[-1] if self._moves else ""
        if last in self._points:
            planes[6, self._points[last]] = 1.0
        near = min(1.0, len(self._moves) / self._most)
        return np.concatenate([planes.reshape(-1), np.array([last == PASS, self._mine == "black", near], np.float32)])

    def record(self) -> str:
        """The game as SGF (https://www.red-bean.com/sgf/go.html)."""
        nodes = []
        for number, move in enumerate(self._moves):
            point = self._points.get(move)
            at = "" if point is None else "".join(chr(97 + place) for place in divmod(point, self._size)[::-1])
            if move != RESIGN:
                nodes.append(f";{'BW'[number % 2]}[{at}]")
        players = ("fasttrain", f"GNU Go level {self._level}")
        names = players if self._mine == "black" else players[::-1]
        head = f";GM[1]FF[4]SZ[{self._size}]KM[{self._komi:g}]RU[Chinese]PB[{names[0]}]PW[{names[1]}]"
        return f"({head}{f'RE[{self._result}]' if self._result else ''}{''.join(nodes)})"


@functools.cache
def neighbours(size: int) -> list[list[int]]:
    """Point → the points beside it."""
    found = []
    for row, column in np.ndindex(size, size):
        beside = ((row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1))
        found.append([r * size + c for r, c in beside if 0 <= r < size and 0 <= c < size])
    return found


def liberties(stones: Mapping[int, int], size: int) -> dict[int, int]:
    """Stone → the number of free points that touch its group (liberties). The stones are given as point → side."""
    beside, found = neighbours(size), dict[int, int]()
    for start, side in stones.items():
        if start in found:
            continue
        group, free = [start], set[int]()
        for point in group:  # `group` grows in this loop
            for other in beside[point]:
                if other not in stones:
                    free.add(other)
                elif stones[other] == side and other not in group:
                    group.append(other)
        found |= dict.fromkeys(group, len(free))
    return found


def _unknown(what: str, said: str) -> NoReturn:
    raise GameLostError("bad message", f"{what}: the engine says {said!s:.100}")
