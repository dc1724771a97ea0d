"""Campaigns against games with engines: trainings with an engine that does everything wrong, and frames that are wrong.

What was learnt is played again by the rules, from the seeds that the records name: each observation, mask and reward.
Only a number that the fault `mutate` changed into another one of the game's can pass unseen; such games are counted.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil

import pig_games
from fasttrain import MaskablePPO
from fasttrain_engines.game import read_message
from fasttrain_engines.game_row import AGAIN
from fasttrain_engines.settings import DaemonsConfig, Recycle, Timeouts
from fasttrain_engines.vec_env import DaemonVecEnv
from fasttrain_engines.wire import CODECS, FRAMINGS, GameLostError

Result = dict[str, Any]
Say = Callable[[str], None]
KINDS = ("crash", "hang", "stop", "oom", "slow", "garbage", "mutate", "truncate", "reorder", "oversize", "deep",
         "wrong_game", "half_close", "close", "refuse", "illegal_mask", "nan", "wrong_shape")  # fmt: skip
ROWS, STEPS = 16, 25
Step = tuple[tuple[float, ...], tuple[bool, ...], int, float, bool, bool, bool]


class Noted(DaemonVecEnv):
    """Notes what every row went through."""

    steps: list[list[Step]]
    acted: dict[int, Any]

    def _act(self, rows: Any) -> None:
        slots = self.slots
        for row in rows:
            seen, mask = slots.observations[row].tolist(), slots.action_masks[row].tolist()
            self.acted[row] = (tuple(seen), tuple(mask), int(slots.actions[row]))
        super()._act(rows)

    def _came(self, row: int) -> Any:
        again, lost = self._news[row][0] == AGAIN, bool(self.arrays.lost[row])
        if not again:
            slots = self.slots
            ends = (bool(slots.terminations[row]), bool(slots.truncations[row]))
            self.steps[row].append((*self.acted[row], float(slots.rewards[row]), *ends, lost))
        return super()._came(row)


def trainings(count: int, seed: int, folder: Path, say: Say, share: float = 0.002, starts: float = 0.02) -> Result:
    """`count` decisions, half of them with all rows together; each answer has each fault with probability `share`."""
    folder.mkdir(parents=True, exist_ok=True)
    notes, files, result = folder / "faults.txt", psutil.Process().num_fds(), {"decisions": 0, "bad": list[str]()}
    env = _env(folder, notes, share, starts)
    env.steps, env.acted = [[] for _ in range(ROWS)], {}
    try:
        env.seed(seed)
        model = MaskablePPO("MlpPolicy", env, n_steps=STEPS, batch_size=200, n_epochs=1, seed=seed)
        say(f"{count:,} decisions by {ROWS} games")
        for schedule in ("lockstep", "first_ready"):
            model.collector.schedule = schedule
            model.learn(count // 2, reset_num_timesteps=False)
            say(f"{schedule}: {env.times().lost:,} games lost")
        result["decisions"] = sum(map(len, env.steps))
        _counted(env, notes, result)
    finally:
        env.close()
    _learnt(env, result)
    pig_games.until(lambda: not _left(notes) and not _sockets())
    result |= {"processes_left": _left(notes), "sockets_left": _sockets()}
    result["files_left"] = psutil.Process().num_fds() - files
    result["bad"] += [f"{name}: {result[name]}" for name in ("processes_left", "sockets_left") if result[name]]
    if result["files_left"] > 2:  # torch and multiprocessing keep some that they open once
        result["bad"].append(f"files_left: {result['files_left']}")
    return result


def _env(folder: Path, notes: Path, share: float, starts: float) -> Noted:
    engine = Path(__file__).with_name("counted_engine.py")
    faults = [word for kind in KINDS for word in ("--fault", f"{kind}={share}")]
    command = (sys.executable, "-S", str(engine), str(notes), str(starts), str(starts), "--port", "{port}",
               "--max-connections", "4", *faults)  # fmt: skip
    settings = DaemonsConfig(
        command=command, count=4, games_per_daemon=5, ports=pig_games.ports(),
        timeouts_s=Timeouts(start=5.0, request=0.5), recycle=Recycle(games=200), max_failures=10_000,
    )  # fmt: skip
    here = os.getcwd()
    os.chdir(pig_games.ENGINES)
    try:
        return Noted("pig:Pig", {}, ROWS, settings, 2, 1, folder)
    finally:
        os.chdir(here)


def _counted(env: Noted, notes: Path, result: Result) -> None:
    """Whether the records, the tally and the control words tell of the same games."""

    def figures() -> tuple[int, int, int]:
        return len(records(env, "failed_games")), sum(env.tally(fresh=True).lost.values()), env.times().lost

    pig_games.until(lambda: len({*figures()}) == 1)
    recorded, told, lost = figures()
    tally = env.tally()
    result |= {
        "faults": dict(sorted(Counter(notes.read_text().split("\n")[:-1]).items())), "lost": lost,
        "lost_by_cause": dict(sorted(tally.lost.items())), "restarts": dict(sorted(tally.restarts.items())),
    }  # fmt: skip
    if not recorded == told == lost:
        result["bad"].append(f"{recorded} records of {lost} games lost, {told} were told of")


def records(env: Noted, name: str) -> list[dict[str, Any]]:
    found = [env.folder / f"{name}{age}.jsonl" for age in (".1", "")]
    whole = [path.read_text().rpartition("\n")[0] for path in found if path.exists()]  # not what is half written
    return [json.loads(line) for text in whole for line in text.splitlines()]


def _learnt(env: Noted, result: Result) -> None:
    """Play by the rules what was learnt."""
    games, failed = records(env, "games"), records(env, "failed_games")
    counts = Counter[str]()
    for row, steps in enumerate(env.steps):
        whole, lost = _split(steps)
        for found, kept in ((whole, games), (lost, failed)):
            told = sorted((one for one in kept if one["row"] == row and one["decisions"]), key=lambda one: one["game"])
            counts["unmatched"] += abs(len(told) - len(found))
            for record, game in zip(told, found, strict=False):
                counts["transitions"] += record["decisions"]
                counts["altered"] += _differs(record["seed"], game[: record["decisions"]])
        for seen, mask, action, *_ in steps:
            counts["illegal"] += not mask[action] or not _is_state(seen)
    mutated = result["faults"].get("mutate", 0)
    result |= {"transitions": counts["transitions"], "illegal": counts["illegal"], "games_altered": counts["altered"]}
    if counts["altered"] > mutated:
        result["bad"].append(f"{counts['altered']} games are not what the rules make of their seeds, {mutated} mutated")
    for name in ("illegal", "unmatched"):
        if counts[name]:
            result["bad"].append(f"{name}: {counts[name]}")


def _split(steps: list[Step]) -> tuple[list[list[Step]], list[list[Step]]]:
    """Games that ended, and games lost after the first action."""
    whole, lost, game = list[list[Step]](), list[list[Step]](), list[Step]()
    for step in steps:
        game.append(step)
        if step[4] or step[5]:
            if not step[6]:
                whole.append(game)
            elif len(game) > 1:
                lost.append(game)
            game = []
    return whole, lost


def _differs(seed: int, game: list[Step]) -> bool:
    rules = pig_games.Rules(seed, 50)
    for seen, mask, action, reward, terminated, *_ in game:
        mine, theirs, turn = rules.state()
        expected = np.array([mine, theirs, turn, mine + turn], np.float32) / 50
        # After a refusal the refused action is masked.
        if seen != tuple(expected.tolist()) or (mask[1] and not turn) or action not in rules.legal():
            return True
        rules.act(action)
        if (reward, terminated) != (rules.reward, rules.over):
            return True
    return False


def _is_state(seen: tuple[float, ...]) -> bool:
    mine, theirs, turn, both = (50 * number for number in seen)
    whole = all(abs(number - round(number)) < 1e-3 for number in (mine, theirs, turn))
    return whole and mine < 49.5 and theirs < 49.5 and abs(mine + turn - both) < 1e-3


def _left(notes: Path) -> int:
    """Engines that live on, whosever children they are by now."""
    return sum(str(notes) in pig_games.said(one) for one in psutil.process_iter())


def _sockets() -> int:
    """Connections in the engines' ports that are not closed."""
    first, last = map(int, pig_games.ports().split("-"))
    return sum(
        one.status != psutil.CONN_TIME_WAIT and any(end and first <= end.port <= last for end in (one.laddr, one.raddr))
        for one in psutil.net_connections("tcp")
    )


# --- frames

FRAMES = (
    {"type": "decide", "game": 1, "id": 1, "state": [0, 0, 4], "legal": [0, 1], "reward": 0.0, "ms": 5.01},
    {"type": "decide", "game": 1, "id": 2, "state": [0, 0, 9], "legal": [0, 1], "reward": 0.0, "ms": 4.99},
    {"type": "refused", "game": 1, "id": 2, "legal": [0], "why": "the engine thought better of it"},
    {"type": "note", "game": 1, "text": "you rolled 4"},
    {"type": "over", "game": 1, "state": [52, 31, 0], "reward": 1.0, "won": True, "ms": 5.0},
)


def frames(count: int, seed: int, folder: Path, say: Say) -> Result:
    """`count` frames, mutated or out of order, through framing, codec and `read`."""
    rng, process = random.Random(seed), psutil.Process()
    result: Result = {"frames": 0, "understood": 0, "bad": []}
    causes: Counter[str] = Counter()
    packed = {kind: [FRAMINGS[kind]().pack(json.dumps(one).encode()) for one in FRAMES] for kind in FRAMINGS}
    began, slowest_s, before = time.monotonic(), 0.0, 0
    while result["frames"] < count:
        if not before and result["frames"] >= min(20_000, count // 2):  # caches are warm
            before = process.memory_info().rss
        kind = rng.choice([*FRAMINGS])
        sent = rng.sample(packed[kind], rng.randrange(1, 6))
        stream = b"".join(pig_games.mutated(one, rng) if rng.random() < 0.7 else one for one in sent)
        started = time.monotonic()
        try:
            result["understood"] += _read(kind, stream, rng)
        except GameLostError as error:
            causes[error.cause] += 1
        except Exception as error:
            result["bad"].append(f"{type(error).__name__}: {error} of {stream!r:.300}")
        slowest_s = max(slowest_s, time.monotonic() - started)
        result["frames"] += len(sent)
    grown_mb = (process.memory_info().rss - before) / 2**20
    result |= {"lost_by_cause": dict(sorted(causes.items())), "grown_mb": round(max(0.0, grown_mb), 2),
               "slowest_ms": round(1000 * slowest_s, 2)}  # fmt: skip
    say(f"{result['frames']:,} frames in {time.monotonic() - began:.0f} s")
    if grown_mb > 10:
        result["bad"].append(f"memory grew by {grown_mb:.1f} MB")
    return result


def _read(kind: str, stream: bytes, rng: random.Random) -> int:
    """How many messages meant something; the stream comes in two pieces."""
    framing, codec, game, found = FRAMINGS[kind](), CODECS["json"](), pig_games.Pig(), 0
    game.new_game(1, 0)
    cut = rng.randrange(len(stream) + 1)
    for piece in (stream[:cut], stream[cut:]):
        for payload in framing.feed(piece):
            found += read_message(game, codec.decode(payload)) is not None
    return found
