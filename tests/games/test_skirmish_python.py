"""The plain Python environment by itself: its random stream, its reports of time, and that it needs no compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from fasttrain_games.skirmish.game import SkirmishGame
from reference.skirmish import bound
from reference.skirmish_python.env import SkirmishPythonEnv
from reference.skirmish_python.stream import Stream


def test_the_stream_is_that_of_the_kernels() -> None:
    game, _ = bound(3)
    game.reset(np.arange(3), [0, 2**64 - 1, -7])
    for index, seed in enumerate([0, 2**64 - 1, -7]):
        env = SkirmishPythonEnv()
        env.reset(seed=seed if seed >= 0 else None)
        if seed < 0:
            continue
        assert int(game.records["rng"][index]) == env.battle.stream.state


def test_dice_are_fair_and_neighbouring_seeds_unrelated() -> None:
    stream = Stream(1)
    counts = np.bincount([stream.die() for _ in range(6000)], minlength=7)
    assert counts[0] == 0
    assert abs(counts[1:] - 1000).max() < 150
    assert 0.45 < np.mean([stream.unit() for _ in range(2000)]) < 0.55
    assert len({Stream(seed).bits() >> 32 for seed in range(100)}) == 100


def test_it_reports_what_the_opponents_turn_took() -> None:
    env = SkirmishPythonEnv(opponent="planner")
    env.reset(seed=1)
    perf = [env.step(np.zeros(8, int))[4]["perf"] for _ in range(9)]
    assert sum(one.get("enemy_turn_ms", 0.0) > 0 for one in perf) == 3, "in the step that ends the learner's turn"


def test_it_loads_no_compiler() -> None:
    code = (
        "import sys\n"
        "from reference.skirmish_python.env import SkirmishPythonEnv\n"
        "env = SkirmishPythonEnv()\n"
        "env.reset(seed=0)\n"
        "assert 'numba' not in sys.modules"
    )
    path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200, env={**os.environ, "PYTHONPATH": path})


def test_a_game_won_before_the_first_decision_does_not_count(tmp_path: Path) -> None:
    """An opponent that goes first and shoots across the board may leave nobody: then another game is begun."""
    weapon = "{attacks: 1, skill: 6, strength: 1, ap: 0, damage: 1}"
    (tmp_path / "lone.yaml").write_text(
        "units: [{name: lone, models: 1, wounds: 1, move: 6, toughness: 1, save: 7, invulnerable: 0, leadership: 7, "
        f"control: 1, ranged: {weapon.replace('{', '{range: 1, ')}, melee: {weapon}}}]"
    )
    options = {"roster": str(tmp_path / "lone.yaml"), "enemy_roster": "company", "width": 30, "height": 26}
    env = SkirmishPythonEnv(**options)
    begun = 0
    original = env._begin

    def counted() -> None:
        nonlocal begun
        begun += 1
        original()

    env._begin = counted  # type: ignore[method-assign]
    game, slots = bound(1, **options)
    for seed in range(60):
        observation, _ = env.reset(seed=seed)
        assert env.battle.living(0)
        game.reset(np.arange(1), [seed])
        np.testing.assert_array_equal(observation, slots.observations[0])
    assert begun > 60


def test_the_shipped_rosters_can_be_played() -> None:
    for roster in ("duel", "patrol", "raiders", "company"):
        assert SkirmishGame(1, roster=roster).mask_width > 0
        env = SkirmishPythonEnv(enemy_roster=roster)
        assert env.observation_space.contains(env.reset(seed=0)[0])
