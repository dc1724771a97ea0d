"""Plays Skirmish's plain rules and its kernels side by side and compares all there is after every decision.

The plain rules are an environment of their own (`reference.skirmish_python`); this is the driver.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from fasttrain.batch import Slots
from fasttrain.envs.masks import random_legal_action
from fasttrain_games.skirmish import kernels, state, tables
from fasttrain_games.skirmish.game import SkirmishGame
from fasttrain_games.skirmish.options import SELF
from fasttrain_kernels.threads import new_team
from reference.skirmish_python.battle import Battle
from reference.skirmish_python.bots import expected_damage, melee_margin
from reference.skirmish_python.env import SkirmishPythonEnv
from reference.skirmish_python.units import squared_distance

FLAGS = {
    "advanced": state.ADVANCED, "fell_back": state.FELL_BACK, "charged": state.CHARGED, "shocked": state.SHOCKED,
    "overwatch": state.OVERWATCHING, "smokescreen": state.SMOKED, "bravery": state.BRAVE,
}  # fmt: skip
SAME_NAMES = ("level", "first", "round", "phase", "active", "cp", "vp", "reroll")


def bound(num_envs: int, **options: Any) -> tuple[SkirmishGame, Slots]:
    """A game and its slots, filled with what must be overwritten."""
    game = SkirmishGame(num_envs, **options)
    slots = Slots(
        observations=np.full((num_envs, *game.observation_space.shape), 9, np.float32),
        actions=np.zeros((num_envs, *game.action_space.shape), np.int64),
        rewards=np.full(num_envs, 9, np.float32),
        terminations=np.ones(num_envs, np.bool_),
        truncations=np.ones(num_envs, np.bool_),
        action_masks=np.zeros((num_envs, game.mask_width), np.bool_),
    )
    game.bind(slots)
    return game, slots


def state_differences(game: SkirmishGame, index: int, battle: Battle) -> list[str]:
    """Names of what differs between the record of a game and the plain battle."""
    record = game.records[index]
    differing = [name for name in SAME_NAMES if record[name].tolist() != getattr(battle, name)]
    if battle.options.missions[int(record["mission"])] is not battle.mission:
        differing.append("mission")
    if int(record["rng"]) != battle.stream.state:
        differing.append("rng")
    for unit in (unit for side in battle.units for unit in side):
        where = (unit.side, unit.index)
        if [int(record[name][where]) for name in ("x", "y", "health")] != [unit.x, unit.y, unit.health]:
            differing.append(f"place or health of {where}")
        if int(record["flags"][where]) != sum(bit for name, bit in FLAGS.items() if getattr(unit, name)):
            differing.append(f"flags of {where}")
    return differing


def stale_tables(game: SkirmishGame, index: int, battle: Battle) -> list[str]:
    """Entries of the cached tables that hold and are not what the plain rules compute from nothing."""
    record, stale = game.records[index], []
    for own in battle.living(0):
        for enemy in battle.living(1):
            bit = tables.MAX_UNITS * own.index + enemy.index
            distance = int(record["distance"][own.index, enemy.index])
            if int(record["distance_known"]) >> bit & 1 and distance != squared_distance(own, enemy):
                stale.append(f"distance {own.index}-{enemy.index}")
            if int(record["sight_known"]) >> bit & 1 and bool(int(record["sight"]) >> bit & 1) != battle.sees(
                own, enemy
            ):
                stale.append(f"sight {own.index}-{enemy.index}")
    for unit in battle.living(0) + battle.living(1):
        engaged, targets = int(record["engaged"][unit.side]), int(record["targets"][unit.side, unit.index])
        if record["engaged_known"] and bool(engaged >> unit.index & 1) != battle.engaged(unit):
            stale.append(f"engaged {unit.side}.{unit.index}")
        right = sum(1 << target.index for target in battle.shooting_targets(unit))
        if int(record["targets_known"][unit.side]) >> unit.index & 1 and targets != right:
            stale.append(f"targets {unit.side}.{unit.index}")
    return stale + _stale_plan(record, battle)


def _stale_plan(record: Any, battle: Battle) -> list[str]:
    """The planner's table for one unit, if it holds."""
    if not record["plan_known"]:
        return []
    side, index = divmod(int(record["plan_known"]) - 1, tables.MAX_UNITS)
    unit = battle.units[side][index]
    stale = []
    for number, marker in enumerate(battle.mission.markers):
        own = unit.control if battle.near_marker(unit.x, unit.y, marker) else 0
        right = [battle.control_at(side, marker) - own, battle.control_at(1 - side, marker)]
        if [int(record["plan_friends"][number]), int(record["plan_enemies"][number])] != right:
            stale.append(f"plan of {side}.{index} at marker {number}")
    for enemy in battle.living(1 - side):
        right = [
            expected_damage(unit, enemy, unit.sheet.ranged),
            expected_damage(enemy, unit, enemy.sheet.ranged),
            melee_margin(unit, enemy),
        ]
        if [int(record[name][enemy.index]) for name in ("plan_shot", "plan_threat", "plan_melee")] != right:
            stale.append(f"plan of {side}.{index} against {enemy.index}")
    return stale


class SideBySide:
    """N games of the kernels and as many plain environments, stepped with the same actions."""

    def __init__(self, num_envs: int, seed: int, **options: Any) -> None:
        self.game, self.slots = bound(num_envs, **options)
        self.plain = [SkirmishPythonEnv(on_illegal="raise", **options) for _ in range(num_envs)]
        self.game.reset(np.arange(num_envs), [seed + i for i in range(num_envs)])
        for i, env in enumerate(self.plain):
            self.compare_view(i, env.reset(seed=seed + i)[0])
        self.rng = np.random.default_rng(seed)
        self.reasons: Counter[str] = Counter()
        self.events: Counter[str] = Counter()

    def compare_view(self, index: int, observation: np.ndarray) -> None:
        env, slots = self.plain[index], self.slots
        assert state_differences(self.game, index, env.battle) == []
        assert stale_tables(self.game, index, env.battle) == []
        assert bool(self.game.opponents_turn[index]) is env.opponents_turn
        assert slots.action_masks is not None
        np.testing.assert_array_equal(slots.action_masks[index], env.action_masks())
        np.testing.assert_array_equal(slots.observations[index], observation)

    def draw(self, indices: np.ndarray) -> None:
        """Legal actions for the listed games, uniform in every head."""
        masks = self.slots.action_masks
        assert masks is not None
        for index in indices:
            self.slots.actions[index] = random_legal_action(self.game.action_space, masks[index], self.rng)

    def step(self, indices: np.ndarray | None = None) -> None:
        """One decision in all games, or in the listed ones, compared in everything."""
        chosen = np.arange(self.game.num_envs) if indices is None else indices
        self.draw(chosen)
        if indices is None:
            self.game.step()
        else:
            self.game.step_listed(indices)
        for index in chosen.tolist():
            action = self.slots.actions[index]
            observation, reward, terminated, truncated, info = self.plain[index].step(action)
            assert self.slots.rewards[index] == np.float32(reward)
            assert bool(self.slots.terminations[index]) is terminated
            assert bool(self.slots.truncations[index]) is truncated is False
            if terminated:
                info.pop("perf")
                assert self.game.episode_info(index) == info
                self.reasons[info["end_reason"]] += 1
                np.testing.assert_array_equal(self.game.final_observations[index], observation)
                observation = self.plain[index].reset()[0]
            self.compare_view(index, observation)

    def scatter(self) -> None:
        """Throw every game into some phase of the learner's turn with its units close together, hurt and flagged.

        Random play rarely charges, falls back or fights; this makes every decision one of those. Heads mode only.
        """
        for index, env in enumerate(self.plain):
            battle, rng = env.battle, self.rng
            free = [
                (x, y)
                for x in range(battle.mission.width)
                for y in range(battle.mission.height)
                if not battle.mission.in_terrain(x, y)
            ]
            middle = free[rng.integers(len(free))]
            near = sorted(free, key=lambda cell: (cell[0] - middle[0]) ** 2 + (cell[1] - middle[1]) ** 2)
            units = [unit for side in battle.units for unit in side]
            cells = [near[k] for k in rng.choice(min(len(near), 12 * len(units)), len(units), replace=False)]
            for unit, (unit.x, unit.y) in zip(units, cells, strict=True):
                unit.health = int(rng.integers(0 if unit.index else 1, unit.sheet.health + 1))
                for name in FLAGS:
                    setattr(unit, name, bool(rng.random() < 0.2))
            battle.phase, battle.round = int(rng.integers(3)), int(rng.integers(1, battle.options.rounds + 1))
            battle.cp = rng.integers(0, 5, 2).tolist()
            battle.active = int(rng.integers(2)) if battle.level == SELF else 0
            self._copy(index, battle)
        everyone = np.arange(self.game.num_envs)
        kernels.write_step(self.game.records, self.game.setup, everyone, *self.game.written, new_team(), 0)

    def _copy(self, index: int, battle: Battle) -> None:
        """Make the record of a game the plain battle."""
        record = self.game.records[index]
        for name in SAME_NAMES:
            record[name] = getattr(battle, name)
        for unit in (unit for side in battle.units for unit in side):
            for name in ("x", "y", "health"):
                record[name][unit.side, unit.index] = getattr(unit, name)
            record["flags"][unit.side, unit.index] = sum(bit for name, bit in FLAGS.items() if getattr(unit, name))
        for name in ("distance_known", "sight_known", "engaged_known", "targets_known", "plan_known"):
            record[name] = 0

    def note_events(self) -> None:
        """Count what tests must have seen at least once."""
        for env in self.plain:
            for unit in (unit for side in env.battle.units for unit in side):
                self.events.update(name for name in FLAGS if getattr(unit, name))
            self.events.update(["scored"] if any(env.battle.vp) else [])


def play(num_envs: int, games: int, seed: int, **options: Any) -> Counter[str]:
    """Play until so many games ended; returns how they ended."""
    both = SideBySide(num_envs, seed, **options)
    while both.reasons.total() < games:
        if options.get("opponent") == "self":
            turns = both.game.opponents_turn
            side = turns if both.rng.random() < 0.5 else ~turns
            if side.any() and both.rng.random() < 0.8:
                both.step(np.flatnonzero(side))
                continue
        both.step()
    return both.reasons
