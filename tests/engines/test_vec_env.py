"""Games with the reference engine as a vector env: together and each by itself, with faults; what is left behind."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import pig_games
from fasttrain.errors import EnvError, EnvSpecError
from fasttrain_engines import vec_env
from fasttrain_engines.settings import Recycle, Timeouts
from fasttrain_engines.vec_env import DaemonVecEnv
from fasttrain_vec.process import PipedProcess
from pig_games import STRICT, descendants, engines, prudent, settings, until

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs signals")
Make = Callable[..., DaemonVecEnv]
GIVEN = ("kwargs", "workers", "asks_again", "cores", "guests", "guest_kwargs")


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Envs that are closed whatever comes."""
    monkeypatch.chdir(pig_games.ENGINES)
    # A worker is forked from a process that has loaded what it needs: a third of a second less.
    monkeypatch.setattr(PipedProcess, "_context", multiprocessing.get_context("forkserver"))
    multiprocessing.set_forkserver_preload(["fasttrain_engines.games_worker", "fasttrain_vec.worker", "worker_toys"])
    before = {one.pid for one in descendants()}  # of other tests in this process
    made: list[DaemonVecEnv] = []

    def one(num_envs: int = 4, *arguments: Any, game: str = "pig:Pig", **changed: Any) -> DaemonVecEnv:
        where = tmp_path / str(len(made))
        given = {name: changed.pop(name) for name in GIVEN if name in changed}
        made.append(
            DaemonVecEnv(
                game, given.get("kwargs", {}), num_envs, settings(*arguments, **changed), given.get("cores", 2),
                given.get("workers", 1), where, given.get("asks_again", True), guests=given.get("guests", 0),
                guest_kwargs=given.get("guest_kwargs"),
            )
        )  # fmt: skip
        return made[-1]

    yield one
    for env in made:
        env.close()
        env.close()  # a second time changes nothing
    assert until(lambda: not {one.pid for one in descendants()} - before)


def lines(env: DaemonVecEnv, name: str) -> list[dict[str, Any]]:
    path = env.folder / name
    whole = path.read_text().rpartition("\n")[0] if path.exists() else ""  # the last line may be half written
    return [json.loads(line) for line in whole.splitlines()]


class Seen:
    """What one row went through: (observation, mask, action, reward, terminated, truncated, lost)."""

    def __init__(self, num_envs: int) -> None:
        self.rows: list[list[tuple[Any, ...]]] = [[] for _ in range(num_envs)]

    def note(self, env: DaemonVecEnv, row: int, before: Any, action: int) -> None:
        slots = env.slots
        end = (float(slots.rewards[row]), bool(slots.terminations[row]), bool(slots.truncations[row]))
        self.rows[row].append((*before, action, *end, bool(env.arrays.lost[row])))

    def games(self, row: int) -> list[list[tuple[Any, ...]]]:
        """Whole ones, in turn."""
        found: list[list[tuple[Any, ...]]] = [[]]
        for step in self.rows[row]:
            found[-1].append(step)
            if step[4] or step[5]:
                found.append([])
        return found[:-1]


def before_of(env: DaemonVecEnv) -> list[tuple[Any, Any]]:
    masks = env.slots.action_masks
    return [
        (tuple(seen.tolist()), tuple(mask.tolist())) for seen, mask in zip(env.slots.observations, masks, strict=True)
    ]


def together(env: DaemonVecEnv, steps: int) -> Seen:
    """All rows step together."""
    seen = Seen(env.num_envs)
    for _ in range(steps):
        before, actions = before_of(env), prudent(env.slots.observations, env.slots.action_masks)
        env.step_slots(actions)
        for row in range(env.num_envs):
            if env.slots.resets is None or not env.slots.resets[row]:
                seen.note(env, row, before[row], int(actions[row]))
    return seen


def apart(env: DaemonVecEnv, steps: int) -> Seen:
    """Each row takes so many steps by itself."""
    seen, left = Seen(env.num_envs), dict.fromkeys(range(env.num_envs), steps)
    acted: dict[int, Any] = {}

    def act(rows: list[int]) -> None:
        if rows:
            before, actions = before_of(env), prudent(env.slots.observations[rows], env.slots.action_masks[rows])
            acted.update((row, (before[row], int(action))) for row, action in zip(rows, actions, strict=True))
            env.send_all(rows, actions)

    act(list(left))
    while acted:
        ready = env.first_ready(list(acted))
        stepped = {row for one in env.take(ready) for row in one.rows.tolist()}
        for row in ready:
            before, action = acted.pop(row)
            if row in stepped:
                seen.note(env, row, before, action)
                left[row] -= 1
        act([row for row in ready if left[row]])
    return seen


def replayed(games: list[dict[str, Any]], seen: Seen, row: int) -> int:
    """How many of a row's finished games are, step by step, those that the rules make of their seeds."""
    whole = [game for game in seen.games(row) if not game[-1][6]]
    records = sorted((record for record in games if record["row"] == row), key=lambda record: record["game"])
    for record, game in zip(records, whole, strict=False):
        rules = pig_games.Rules(record["seed"], 50)
        for observation, mask, action, reward, terminated, _, _ in game:
            mine, theirs, turn = rules.state()
            expected = np.array([mine, theirs, turn, mine + turn], np.float32) / 50
            assert observation == tuple(expected.tolist())
            assert mask == (True, turn > 0)
            assert mask[action]
            rules.act(action)
            assert (reward, terminated) == (rules.reward, rules.over)
    return min(len(records), len(whole))


def test_the_same_seeds_are_the_same_games_whatever_the_schedule_the_line_and_who_asks(make: Make):
    found: list[Seen] = []
    for play, arguments, given in [
        (together, ("--think-ms", 1, "--think", "lognormal"), {}), (apart, (), {"game": "pig:PigByRequest"}),
        (apart, ("--socket", "{socket}"), {"workers": 2}), (together, ("--stdio",), {"workers": 2}),
    ]:  # fmt: skip
        env = make(2, *arguments, **given)
        env.seed(11)
        env.reset()
        found.append(play(env, 60))
        if not given.get("workers"):
            assert until(lambda env=env: len(lines(env, "games.jsonl")) == env.times().games)
            assert sum(replayed(lines(env, "games.jsonl"), found[-1], row) for row in range(2)) >= 1
        assert [len(steps) for steps in found[-1].rows] == [60] * 2
    assert all(one.rows == found[0].rows for one in found)


def test_it_is_a_vector_env_as_stable_baselines_has_it(make: Make):
    env = make(3, "--goal", 20, kwargs={"goal": 20})
    env.seed(5)
    first = env.reset()
    env.seed(5)
    assert (env.reset() == first).all()
    assert first.shape == (3, 4)
    assert env.env_method("action_masks")[0].tolist() == [True, False]
    ended = []
    for _ in range(60):
        seen = env.slots.observations.copy()
        observations, rewards, dones, infos = env.step((seen[:, 2] > 0).astype(int))
        for row in np.flatnonzero(dones):
            info = infos[row]
            final = info["terminal_observation"]
            assert abs(rewards[row]) == 1.0
            assert info["is_win"] == (rewards[row] > 0)
            assert info["episode"]["r"] == rewards[row]
            assert info["TimeLimit.truncated"] is False
            assert max(final[0], final[1]) >= 1.0, "the final observation is the end of the game"
            assert max(observations[row][:2]) < 1.0, "and the new one the begin of the next"
            ended.append(info["episode"]["l"])
    assert ended
    assert until(lambda: sum(one["decisions"] > 0 for one in lines(env, "games.jsonl")) == len(ended))


FAULTS = ("crash", "garbage", "close", "wrong_game", "nan", "illegal_mask", "half_close", "reorder", "hang")


def test_lost_games_are_cut_counted_and_recorded_never_results(make: Make):
    faults = [word for kind in FAULTS for word in ("--fault", f"{kind}=0.01")]
    env = make(4, *faults, timeouts_s=Timeouts(start=15.0, request=0.3))
    env.reset()
    seen, causes = Seen(4), []
    for _ in range(120):
        before, actions = before_of(env), prudent(env.slots.observations, env.slots.action_masks)
        env.step_slots(actions)
        for episode in env.slots.finished:
            if episode.lost:
                causes.append(episode.info["lost"])
                assert episode.truncated
                assert tuple(episode.final_observation.tolist()) == before[episode.env_index][0]
        for row in range(4):
            seen.note(env, row, before[row], int(actions[row]))
    lost = [step for row in seen.rows for step in row if step[6] and (step[4] or step[5])]
    assert len(lost) == len(causes) > 5
    assert all(step[3:6] == (0.0, False, True) for step in lost)
    assert until(
        lambda: len(lines(env, "failed_games.jsonl")) == sum(env.tally(fresh=True).lost.values()) == env.times().lost
    )
    failed, tally = lines(env, "failed_games.jsonl"), env.tally(fresh=True)
    begun = [record for record in failed if record["actions"]]
    assert {record["cause"] for record in failed} == {*tally.lost}
    assert sum(record["decisions"] for record in failed) == sum(tally.lost_steps.values())
    assert all(record["trace"] and record["seed"] is not None for record in begun)
    assert all(len(record["actions"]) == record["decisions"] for record in failed)
    sum(replayed(lines(env, "games.jsonl"), seen, row) for row in range(4))


def test_a_refused_action_is_asked_again_and_no_step(make: Make):
    env = make(3, "--fault", "refuse=0.3")
    env.seed(3)
    env.reset()
    together(env, 20)
    refused = env.times().refused
    assert refused > 0
    assert [len(steps) for steps in apart(env, 20).rows] == [20] * 3
    assert env.times().refused > refused
    assert until(lambda: sum(env.tally(fresh=True).games.counts.values()) == len(lines(env, "games.jsonl")))
    assert env.times().lost == 0


def test_daemons_are_recycled_while_all_games_go_on(make: Make):
    env = make(4, "--goal", 10, kwargs={"goal": 10}, recycle=Recycle(games=4))
    env.reset()
    assert until(lambda: apart(env, 30) and env.tally(fresh=True).restarts["recycled"] >= 2)
    assert env.times().lost == 0
    assert until(lambda: len(engines()) <= 3), "one is recycled at a time"


def test_a_daemon_that_takes_fewer_games_gets_fewer(make: Make):
    command = (*STRICT, "2", "0", "--port", "{port}", "--think-ms", "20")  # one more has no answer
    times = Timeouts(start=15.0, request=1.0)
    env = make(5, cores=1, command=command, count="auto", games_per_daemon="auto", timeouts_s=times)
    with pytest.warns(UserWarning, match="takes 2 games at once, not .: games_per_daemon is 2 from here on, and"):
        env.reset()
    together(env, 10)
    assert (env.times().lost, env.times().restarts, len(env.tally(fresh=True).daemons)) == (0, 0, 3)


@pytest.mark.parametrize(("play", "given"), [(together, {}), (apart, {"recycle": Recycle(connection_games=2)})])
def test_an_engine_that_closes_after_its_games_loses_none(make: Make, play: Callable[..., Seen], given: dict[str, int]):
    command = (*STRICT, "9", "2", "--port", "{port}", "--goal", "10")
    env = make(3, kwargs={"goal": 10}, command=command, **given)
    env.reset()
    play(env, 60)
    assert env.times().games > 9
    assert (env.times().lost, env.tally(fresh=True).restarts) == (0, {})
    assert until(lambda: {one["game"] for one in lines(env, "games.jsonl") if one["row"] == 0} >= {0, 1, 2, 3})


def test_a_failure_is_told_again(make: Make):
    env = make(2, "--fault", "close=1", max_failures=3)
    assert until(lambda: engines())
    for play in (env.reset, lambda: env.step(np.zeros(2, np.int64))):  # which would wait for ever
        with pytest.raises(EnvError, match="daemons.max_failures"):
            play()


def test_an_engine_that_does_not_start_says_what_it_said(make: Make):
    with pytest.raises(EnvSpecError, match="(?s)ended with exit code 2.*--goal 0: must be at least 1"):
        make(1, "--goal", 0)


def test_a_worker_that_is_killed_is_one_clear_error_and_leaves_no_engine(make: Make):
    env = make(2)
    env.reset()
    engines()[0].parent().kill()
    with pytest.raises(EnvError, match=r"worker \d, which plays the games with the engines, ended with exit code -9"):
        together(env, 50)
    env.close()
    assert until(lambda: not engines())


def test_a_trainer_that_is_killed_leaves_nothing(tmp_path: Path):
    script = tmp_path / "trainer.py"
    script.write_text(
        textwrap.dedent(f"""
        import sys, time
        sys.path.insert(0, {str(Path(pig_games.__file__).parent)!r})
        import pig_games
        from fasttrain_engines.vec_env import DaemonVecEnv
        if __name__ == "__main__":
            env = DaemonVecEnv("pig:Pig", {{}}, 2, pig_games.settings(), 2)
            env.reset()
            print("up", flush=True)
            time.sleep(600)
    """)
    )
    trainer = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, cwd=pig_games.ENGINES)
    try:
        assert trainer.stdout.readline() == b"up\n"
        left = descendants(trainer.pid)
        assert len([one for one in left if "pig_engine.py" in pig_games.said(one)]) == 2
    finally:
        trainer.kill()
        trainer.wait()
        trainer.stdout.close()
    assert until(lambda: not any(pig_games.said(one) for one in left))


@pytest.mark.parametrize(("most", "workers"), [(9, 2), (2, 1)])  # connections; others have no answer
def test_guests_play_as_they_would_alone_and_leave_the_training_as_it_was(make: Make, most: int, workers: int):
    """Where there is no place for them the training's games are ended."""
    command = (*STRICT, str(most), "0", "--port", "{port}")
    given = {"command": command, "workers": workers, "timeouts_s": Timeouts(start=15.0, request=1.0)}
    env, alone = make(4, guests=3, **given), make(4, **given)
    alone.seed(7)
    alone.reset()
    expected = [rows[:20] for rows in together(alone, 20).rows[:3]]
    for one in (env, alone):
        one.seed(5)
        one.reset()
        together(one, 7)
    counted, guests = env.times(), env.guests()
    for _ in range(2):
        guests.seed(7)
        with nullcontext() if most > 2 or env.ended else pytest.warns(UserWarning, match="takes 2 games at once"):
            guests.reset()
        assert together(guests, 20).rows == expected
    guests.close()
    assert sum("strict_engine.py" in pig_games.said(one) for one in descendants()) == 4, "two of each env"
    assert env.ended == (most != 9)
    assert (env.times().decisions, env.times().games, env.times().lost) == (counted.decisions, counted.games, 0)
    if most == 9:
        assert together(env, 20).rows == together(alone, 20).rows
    else:
        env.seed(7)
        env.reset()
        assert together(env, 20).rows[:3] == expected
    assert (env.times().restarts, env.ended) == (0, False)


def test_guests_that_fail_cost_the_training_nothing(make: Make):
    env = make(2, kwargs={"goal": 50}, guests=2, guest_kwargs={"goal": 20}, max_failures=3)  # the engine plays to 50
    env.seed(5)
    env.reset()
    together(env, 5)
    for _ in range(2):
        guests = env.guests()
        with pytest.raises(EnvError, match="3 games with the engine failed in a row"):  # noqa: PT012
            guests.reset()  # on a busy machine games fail already here
            together(guests, 500)
        guests.close()
    together(env, 50)
    assert (env.times().lost, env.tally(fresh=True).lost, env.times().restarts) == (0, {}, 0)
    with pytest.raises(EnvSpecError, match=r"could not be made with env.kwargs=.'lenght': 20"):
        make(1, guests=1, guest_kwargs={"lenght": 20})


def test_shares_fit_the_daemons():
    for num_envs, daemons, workers in [(5, 5, 4), (7, 3, 2), (130, 4, 2), (3, 3, 3), (10, 4, 3)]:
        env: Any = SimpleNamespace(num_daemons=daemons, num_workers=workers)
        counts = [len(share) for share in DaemonVecEnv._shared_out(env, daemons)]
        assert (len(counts), sum(counts)) == (workers, daemons)
        for guests in range(1, num_envs + 1):
            shares = DaemonVecEnv._shared_out(env, guests)
            assert [row for share in shares for row in share] == [*range(guests)]
            for share, count in zip(shares, counts, strict=True):
                assert len(share) <= count * -(-num_envs // daemons), "more games than the daemons take"


def test_a_worker_that_hangs_ends_the_run(make: Make, monkeypatch: pytest.MonkeyPatch):
    env = make(1)
    env.reset()
    monkeypatch.setattr(vec_env, "HUNG_S", 0.2)
    monkeypatch.setattr(vec_env, "LOOK_EVERY_S", 0.1)
    worker = engines()[0].parent()
    worker.suspend()
    try:
        with pytest.raises(EnvError, match="has said nothing for 0.2 s"):
            together(env, 100)
    finally:
        worker.resume()
