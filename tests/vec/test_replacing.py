from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from vec_toys import Tired

from conftest import RunCommand
from fasttrain.errors import EnvError
from fasttrain_vec.replacing import ASKED, FAILED, MOST_BUILT, SEED_STRIDE, Replacements, built_anew

QUICK = ("+profile=speed", "report=false", "checkup=off", "eval.episodes=2", "torch_threads=1", "num_envs=4",
         "batch_size=32", "total_timesteps=256")  # fmt: skip
TIRED, PPO = "env.entry_point=vec_toys:Tired", ("algo=ppo", "algo.rollout_size=64", "fused_update=off")
DUMMY, SHARED = ("vec_env=dummy",), ("vec_env=shared", "workers=2")
both = pytest.mark.parametrize("vec_env", [DUMMY, SHARED], ids=["dummy", "shared"])


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@both
@pytest.mark.parametrize("normalize", [(), ("env.normalize=[obs,reward]",)], ids=["", "normalised"])
def test_an_env_that_asks_in_a_step_is_replaced_and_the_step_left_out(
    vec_env: tuple[str, ...], normalize: tuple[str, ...], fasttrain: RunCommand
):
    done = fasttrain(*QUICK, TIRED, *PPO, *vec_env, *normalize, "env.kwargs.at=35").ok()
    # 64 steps of each env. Env and successor ask in their 35th step: 4 envs × 1, each after 4 steps of an episode.
    assert "  4 envs or workers were replaced (asked to be replaced: 4); 20 env steps were lost" in done.out
    assert "Traceback" not in done.out + done.err
    assert done.json("perf.json")["total"]["replaced"] == {ASKED: 4}
    assert {row["length"] for row in done.table("episodes.csv")} == {"10"}


@pytest.mark.parametrize("typed", [("algo=dqn",), ("algo=ppo", "engine=stock", "algo.rollout_size=64")], ids=str)
def test_other_algorithms_go_on_too(typed: tuple[str, ...], fasttrain: RunCommand):
    done = fasttrain(*QUICK, TIRED, *typed, *DUMMY, "env.kwargs.at=35", "checkpoint_every=64").ok()
    assert "  4 envs or workers were replaced (asked to be replaced: 4); 20 env steps were lost" in done.out
    fasttrain("resume", f"run={done.folder}", "total_timesteps=320").ok()


@both
def test_an_env_that_asks_in_a_reset_is_replaced(vec_env: tuple[str, ...], fasttrain: RunCommand, tmp_path: Path):
    done = fasttrain(*QUICK, TIRED, *PPO, *vec_env, "env.kwargs.resets=4").ok()
    # Each env and its successor have three episodes of 10 steps. A worker loses the last one together with the env.
    lost = 80 if vec_env == SHARED else 0
    assert f"  8 envs or workers were replaced (asked to be replaced: 8); {lost} env steps were lost" in done.out
    first = ("env.entry_point=vec_toys:TiredAtFirst", f"env.kwargs.once={tmp_path / 'once'}", vec_env[0])
    done = fasttrain(*QUICK, *PPO, *first, *["workers=1"] * len(vec_env[1:])).ok()
    assert "  1 envs or workers were replaced (asked to be replaced: 1); 0 env steps were lost" in done.out


@both
def test_self_play_goes_on_too(vec_env: tuple[str, ...], fasttrain: RunCommand):
    game = ("algo=maskable_ppo", *PPO[1:], "env.game=vec_toys:GAME", "opponent=self")
    done = fasttrain(*QUICK, *vec_env, *game).ok()
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
    done = fasttrain(*QUICK, TIRED, *PPO, *vec_env, f"env.kwargs.{typed}")
    assert done.exit_code in (1, 2)
    assert told in done.err


def test_counts_and_limits(monkeypatch: pytest.MonkeyPatch):
    counts, now = Replacements(most=2, within_s=60.0), [0.0]
    monkeypatch.setattr("fasttrain_vec.replacing.time.monotonic", lambda: now[0])
    assert [counts.add(FAILED), counts.add(ASKED, 3), counts.add(ASKED, 3), counts.add(FAILED)] == [""] * 4
    assert counts.add(ASKED, 3) == "3 restarts within 1 minutes, 2 allowed"
    assert counts.count == 5
    assert counts.why == ((ASKED, 3), (FAILED, 2))
    now[0] = 61.0
    assert counts.add(ASKED, 3) == "", "those of long ago do not count"


def test_a_new_env_gets_a_new_seed_and_may_ask_too():
    noted, made = list[str](), iter([Tired(resets=1), Tired()])
    env, seed, (seen, _) = built_anew(Tired(), lambda: next(made), 7, lambda error: noted.append(str(error)))
    assert noted == ["the env asked to be replaced: tired"]
    assert seed == 7 + 2 * SEED_STRIDE
    assert np.array_equal(seen, Tired().reset(seed=seed)[0])
    with pytest.raises(EnvError, match=f"{MOST_BUILT} new envs in a row"):
        built_anew(env, lambda: Tired(resets=1), None, lambda _: None)
