"""A VectorEnv that counts: env i observes (episode, step); its episodes last 3 + i steps, of reward 1 each."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

RESET_REWARD = 1000.0  # what a step that only resets says: a faulty env, whose word must not count


class Counting(VectorEnv[Any, Any, Any]):
    """`masks`: "", "infos", "method" or "dict". In state (episode, step) the action step % 4 alone is legal."""

    def __init__(self, num_envs: int, mode: str = "NextStep", masks: str = "", cut: bool = False) -> None:
        self.num_envs, self.cut, self.masks = num_envs, cut, masks
        self.metadata = {"autoreset_mode": AutoresetMode(mode)}
        box = spaces.Box(0, 1e6, (2,), np.float32)
        shown = {"seen": box, "action_mask": spaces.Box(0, 1, (4,), np.int8)}
        self.single_observation_space = spaces.Dict(shown) if masks == "dict" else box
        self.single_action_space = spaces.Discrete(4)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.episode, self.count = np.zeros(num_envs), np.zeros(num_envs)
        self.over = np.zeros(num_envs, np.bool_)
        self.calls, self.only_resets, self.illegal = 0, 0, 0
        if masks == "method":
            self.action_masks = self._masks  # type: ignore[attr-defined]

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        which = np.ones(self.num_envs, np.bool_) if options is None else options["reset_mask"]
        self._begin(which)
        return self._seen(), self._told()

    def _begin(self, which: Any) -> None:
        self.episode[which] += 1
        self.count[which] = 0
        self.over[which] = False

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        self.calls += 1
        late = self.over.copy()
        if self.masks:
            self.illegal += int(np.count_nonzero((actions != self.count % 4) & ~late))
        self.only_resets += int(late.sum())
        self.count[~late] += 1
        self._begin(late)
        rewards = np.where(late, RESET_REWARD, 1.0)
        ended = ~late & (self.count >= 3 + np.arange(self.num_envs))
        infos: dict[str, Any] = {"score": self.count.copy(), "_score": ended.copy()}
        mode = self.metadata["autoreset_mode"]
        if mode is AutoresetMode.SAME_STEP:
            infos = {"final_obs": self._rows(), "_final_obs": ended.copy(), "final_info": infos} if ended.any() else {}
            self._begin(ended)
        else:
            self.over = ended
        none = np.zeros(self.num_envs, np.bool_)
        ends = (none, ended) if self.cut else (ended, none)
        return self._seen(), rewards, *ends, {**infos, **self._told()}

    def _pairs(self) -> Any:
        return np.stack([self.episode, self.count], 1).astype(np.float32)

    def _rows(self) -> Any:
        """As Gymnasium's own vector envs give final observations: an array of objects."""
        found = np.empty(self.num_envs, object)
        found[:] = [*({"seen": row, "action_mask": None} if self.masks == "dict" else row for row in self._pairs())]
        return found

    def _masks(self) -> Any:
        masks = np.arange(4) == (self.count % 4)[:, None]
        masks[self.over] = False  # nothing is legal in a state that is over
        return masks

    def _seen(self) -> Any:
        return (
            {"seen": self._pairs(), "action_mask": self._masks().astype(np.int8)}
            if self.masks == "dict"
            else self._pairs()
        )

    def _told(self) -> dict[str, Any]:
        return {"action_mask": self._masks()} if self.masks == "infos" else {}


class InTurn(VectorEnv[Any, Any, Any]):
    """Two rows decide in turn, four decisions a game: 1 for one's own, 10 for the other's; both see how many were."""

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012
    num_envs, single_action_space = 2, spaces.Discrete(2)
    single_observation_space = spaces.Box(0, 4, (1,), np.float32)
    observation_space, action_space = batch_space(single_observation_space, 2), batch_space(single_action_space, 2)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.made = 0
        return self._seen()

    def _seen(self) -> tuple[Any, dict[str, Any]]:
        return np.full((2, 1), self.made, np.float32), {"rests": np.arange(2) != self.made % 2}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        rewards = np.where(np.arange(2) == self.made % 2, 1.0, 10.0)
        self.made += 1
        over, last = self.made == 4, {"final_obs": np.full((2, 1), 4.0)}
        self.made %= 4
        seen, told = self._seen()
        return seen, rewards, np.full(2, over), np.zeros(2, np.bool_), {**told, **(last if over else {})}


class Mute(Counting):
    """Does not say how it resets."""

    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs)
        self.metadata = {}
