"""Envs that ask to be replaced (`fasttrain.ReplaceEnv`), and the limits of replacing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import fasttrain
from conftest import RunCommand
from duels import Duel
from fasttrain.errors import EnvError
from fasttrain.native import GameSpec
from fasttrain_vec.replacing import ASKED, FAILED, MOST_BUILT, SEED_STRIDE, Replacements, built_anew

QUICK = ("+profile=speed", "report=false", "checkup=off", "eval.episodes=2", "torch_threads=1", "fused_update=off",
         "env.entry_point=test_replacing:Tired", "algo=ppo", "num_envs=4", "algo.rollout_size=64", "batch_size=32",
         "total_timesteps=256")  # fmt: skip
DUMMY = ("vec_env=dummy",)
SHARED = ("vec_env=shared", "workers=2")


class Tired(gymnasium.Env[Any, Any]):
    """Asks to be replaced in its step `at`, or in its reset number `resets`. Episodes have 10 steps."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, at: int = 0, resets: int = 0) -> None:
        self.at, self.resets, self.total, self.begun = at, resets, 0, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps, self.begun = 0, self.begun + 1
        if self.begun == self.resets:
            raise fasttrain.ReplaceEnv("tired")
        return self.np_random.uniform(-1, 1, 2).astype(np.float32), {}

    def step(self, action: Any) -> Any:
        self.steps, self.total = self.steps + 1, self.total + 1
        if self.total == self.at:
            raise fasttrain.ReplaceEnv("tired")
        return self.np_random.uniform(-1, 1, 2).astype(np.float32), 1.0, self.steps >= 10, False, {}


class TiredAtFirst(Tired):
    """Asks in its first reset, if it finds the file `once` missing."""

    def __init__(self, once: str) -> None:
        super().__init__()
        self.once = Path(once)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if not self.once.exists():
            self.once.touch()
            raise fasttrain.ReplaceEnv("tired")
        return super().reset(seed=seed)


class TiredDuel(Duel):
    """Asks to be replaced after each 23 decisions of both sides."""

    def step(self, action: Any) -> Any:
        if len(self.seen) == 23:
            raise fasttrain.ReplaceEnv("tired")
        return super().step(action)


GAME = GameSpec(env="test_replacing:TiredDuel", opponent_key="opponent", eval_opponent="zero")


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.mark.parametrize("vec_env", [DUMMY, SHARED], ids=["dummy", "shared"])
@pytest.mark.parametrize("normalize", [(), ("env.normalize=[obs,reward]",)], ids=["", "normalised"])
def test_an_env_that_asks_in_a_step_is_replaced_and_the_step_left_out(
    vec_env: tuple[str, ...], normalize: tuple[str, ...], fasttrain: RunCommand
):
    done = fasttrain(*QUICK, *vec_env, *normalize, "env.kwargs.at=35").ok()
    # 64 steps of each env. Env and successor ask in their 35th step: 4 envs × 1, each after 4 steps of an episode.
    assert "  4 envs or workers were replaced (asked to be replaced: 4); 20 env steps were lost" in done.out
    assert "Traceback" not in done.out + done.err
    assert done.json("perf.json")["total"]["replaced"] == {ASKED: 4}
    assert {row["length"] for row in done.table("episodes.csv")} == {"10"}


@pytest.mark.parametrize(
    "typed", [("algo=dqn",), ("algo=ppo", "engine=stock", "algo.rollout_size=64")], ids=["dqn", "stock"]
)
def test_other_algorithms_go_on_too(typed: tuple[str, ...], fasttrain: RunCommand):
    general = [text for text in QUICK if text.split("=")[0] not in ("algo", "algo.rollout_size", "fused_update")]
    done = fasttrain(*general, *typed, *DUMMY, "env.kwargs.at=35", "checkpoint_every=64").ok()
    assert "  4 envs or workers were replaced (asked to be replaced: 4); 20 env steps were lost" in done.out
    fasttrain("resume", f"run={done.folder}", "total_timesteps=320").ok()


@pytest.mark.parametrize(("vec_env", "lost"), [(DUMMY, 0), (SHARED, 80)], ids=["dummy", "shared"])
def test_an_env_that_asks_in_a_reset_is_replaced(vec_env: tuple[str, ...], lost: int, fasttrain: RunCommand):
    done = fasttrain(*QUICK, *vec_env, "env.kwargs.resets=4").ok()
    # Each env and its successor have three episodes of 10 steps. A worker loses the last one together with the env.
    assert f"  8 envs or workers were replaced (asked to be replaced: 8); {lost} env steps were lost" in done.out


@pytest.mark.parametrize("vec_env", [DUMMY, SHARED], ids=["dummy", "shared"])
def test_an_env_that_asks_in_the_first_reset_is_counted(
    vec_env: tuple[str, ...], fasttrain: RunCommand, tmp_path: Path
):
    env = ("env.entry_point=test_replacing:TiredAtFirst", f"env.kwargs.once={tmp_path / 'once'}", "workers=1")
    general = [text for text in (*QUICK, *vec_env) if text.split("=")[0] not in ("env.entry_point", "workers")]
    done = fasttrain(*general, *(env if vec_env == SHARED else env[:2])).ok()
    assert "  1 envs or workers were replaced (asked to be replaced: 1); 0 env steps were lost" in done.out


@pytest.mark.parametrize("vec_env", [DUMMY, SHARED], ids=["dummy", "shared"])
def test_self_play_goes_on_too(vec_env: tuple[str, ...], fasttrain: RunCommand):
    general = [text for text in QUICK if text.split("=")[0] not in ("algo", "env.entry_point")]
    done = fasttrain(*general, *vec_env, "algo=maskable_ppo", "env.game=test_replacing:GAME", "opponent=self").ok()
    assert done.json("perf.json")["total"]["replaced"] == {ASKED: 20}
    assert {row["length"] for row in done.table("episodes.csv")} == {"2", "3"}


@pytest.mark.parametrize(
    ("vec_env", "typed", "told"),
    [
        (DUMMY, "at=2", "error: env 0, step 2 of its episode: 11 restarts within 10 minutes, 10 allowed; the last"),
        (SHARED, "at=2", "11 restarts within 10 minutes, 10 allowed; the last: env"),
        (DUMMY, "resets=1", "env 0, its reset: 11 restarts within 10 minutes, 10 allowed; the last: the env asked"),
        (SHARED, "resets=1", f"{MOST_BUILT} new envs in a row asked to be replaced in their first reset"),
    ],
)
def test_an_env_that_asks_again_and_again_ends_the_run(
    vec_env: tuple[str, ...], typed: str, told: str, fasttrain: RunCommand
):
    done = fasttrain(*QUICK, *vec_env, f"env.kwargs.{typed}")
    assert done.exit_code in (1, 2)
    assert told in done.err


def test_counts_and_limits():
    counts = Replacements(most=2, within_s=60.0)
    assert [counts.add(FAILED), counts.add(ASKED, 3), counts.add(ASKED, 3), counts.add(FAILED)] == [""] * 4
    assert counts.add(ASKED, 3) == "3 restarts within 1 minutes, 2 allowed"
    assert counts.count == 5
    assert counts.why == ((ASKED, 3), (FAILED, 2))


def test_a_new_env_gets_a_new_seed_and_may_ask_too():
    noted, made = list[str](), iter([Tired(resets=1), Tired()])
    env, seed, (seen, _) = built_anew(Tired(), lambda: next(made), 7, lambda error: noted.append(str(error)))
    assert noted == ["the env asked to be replaced: tired"]
    assert seed == 7 + 2 * SEED_STRIDE
    assert np.array_equal(seen, Tired().reset(seed=seed)[0])
    with pytest.raises(EnvError, match=f"{MOST_BUILT} new envs in a row"):
        built_anew(env, lambda: Tired(resets=1), None, lambda _: None)
