"""The checkup of games with an external engine: one game after another, through the door that training uses."""

from __future__ import annotations

import dataclasses
from typing import Any

import gymnasium
import numpy as np

from fasttrain.batch import Observations
from fasttrain.envs.checkup import CheckupResult, checkup
from fasttrain.envs.findings import found
from fasttrain.envs.masks import random_legal_action
from fasttrain.vec.base import SlotVecEnv, copy_observations

OF_SEEDS = ("unseeded_randomness", "state_left_over", "renumbered")
MANY_REFUSED = 0.05  # of the decisions: the rules of some games hide now and then that an action is not legal


class OneGame(gymnasium.Env[Any, Any]):
    """The one row of `games`, as the checkup plays envs. To close it leaves the engine up."""

    def __init__(self, games: SlotVecEnv) -> None:
        self.games, self._ended = games, False
        self.decisions = self.refused = self.played = 0
        self.lost: list[str] = []  # why each lost game was
        self.observation_space, self.action_space = games.observation_space, games.action_space
        if games.masked:
            self.action_masks = lambda: np.array(self._mask())

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Where a game has ended, the next one has begun already; elsewhere one of another seed is begun."""
        if seed is not None or not self._ended:
            super().reset(seed=seed)
            self.games.seed(int(self.np_random.integers(1 << 31)))
            self.games.reset()
        self._ended = False
        return self._row(self.games.slots.observations), {}

    def step(self, action: object) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """A refused action is answered by another one, as in training. A lost game is cut there."""
        slots = self.games.slots
        self.games.step_slots(np.asarray(action)[None])
        while slots.resets is not None:
            self.refused += 1
            self.games.step_slots(
                np.asarray(random_legal_action(self.action_space, self._mask(), self.np_random))[None]
            )
        self.decisions += 1
        reward, terminated, truncated = float(slots.rewards[0]), bool(slots.terminations[0]), bool(slots.truncations[0])
        self._ended = bool(slots.finished)
        if not self._ended:
            return self._row(slots.observations), reward, terminated, truncated, {}
        episode = slots.finished[0]
        self.played += 1
        if episode.lost:
            self.lost.append(str(episode.info.get("lost")))
        return episode.final_observation, reward, terminated, truncated, dict(episode.info)

    def _mask(self) -> Any:
        masks = self.games.read_masks()
        return None if masks is None else masks[0]

    def _row(self, observations: Observations) -> Any:
        copied: Any = copy_observations(observations)
        return {name: part[0] for name, part in copied.items()} if isinstance(copied, dict) else copied[0]


def looked_at(games: SlotVecEnv, use_masks: bool, **limits: Any) -> CheckupResult:
    """The checkup of the one row of `games`. No engine need take a seed: one that does not is no finding."""
    game = OneGame(games)
    result = checkup(lambda: game, use_masks=use_masks, copies=False, **limits)
    findings = [one for one in result.findings if one.code not in OF_SEEDS]
    unseeded = len(findings) < len(result.findings)
    if game.lost:
        text = f"{len(game.lost)} of {game.played} games were lost ({', '.join(sorted({*game.lost}))})"
        findings.append(found("lost_games", text))
    if games.masked and game.refused > MANY_REFUSED * game.decisions:
        text = f"the engine refused {game.refused} actions in {game.decisions} decisions that had named them legal"
        findings.append(found("mask_not_respected", text, severity="warning"))
    unknown = "what other actions change: with the same seed the engine plays another game"
    not_checked = (*result.not_checked, *([unknown] if unseeded and not game.lost else []))
    return dataclasses.replace(result, findings=tuple(findings), not_checked=not_checked)
