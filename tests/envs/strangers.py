"""Envs as strangers bring them, one of each shape, none written for fasttrain. What an episode returns is known."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from plain_env import PlainEnv

LENGTH = 5


class Plain(PlainEnv):
    """Five steps; each pays its action."""

    observation_space: Any = spaces.Box(-1, 1, (3,), np.float32)
    action_space: Any = spaces.Discrete(3)
    length = LENGTH

    def seen(self) -> Any:
        return self.np_random.uniform(-1, 1, 3).astype(np.float32)

    def paid(self, action: Any) -> Any:
        return float(action)


class Cards(gymnasium.Env[Any, Any]):
    """Each of five cards is played once: 0 + 1 + 2 + 3 + 4 = 10. The mask's method has another library's name."""

    observation_space: Any = spaces.Box(0, 1, (LENGTH,), np.float32)
    action_space: Any = spaces.Discrete(LENGTH)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.hand = np.ones(LENGTH, np.int8)
        return self.seen(), {}

    def step(self, action: Any) -> Any:
        if not self.hand[action]:
            raise ValueError(f"card {action} was played before")
        self.hand[action] = 0
        return self.seen(), int(action), not self.hand.any(), False, {}

    def seen(self) -> Any:
        return self.hand.astype(np.float32)

    def valid_action_mask(self) -> Any:
        return self.hand


class OldCards:
    """The same by the interface of gym 0.21, with the mask in the infos of steps alone."""

    observation_space, action_space = Cards.observation_space, Cards.action_space

    def __init__(self) -> None:
        self.cards, self.metadata = Cards(), dict[str, Any]()

    def seed(self, seed: int | None = None) -> list[int | None]:
        return [seed]

    def reset(self) -> Any:
        return self.cards.reset()[0]

    def step(self, action: int) -> Any:
        seen, reward, over, _, _ = self.cards.step(action)
        return seen, reward, over, {"action_mask": self.cards.hand.astype(np.float32)}


class Jobs(Cards):
    """The same as a schedule: jobs and mask padded to 51, in a Dict observation; it takes its time."""

    observation_space = spaces.Dict(
        {"jobs": spaces.Box(0, 9, (51, 2), np.float32), "action_mask": spaces.Box(0, 1, (51,), np.int8)}
    )
    action_space = spaces.Discrete(51)

    def seen(self) -> Any:
        jobs, mask = np.zeros((51, 2), np.float32), np.zeros(51, np.int8)
        jobs[:LENGTH, 0], mask[:LENGTH] = self.hand, self.hand
        return {"jobs": jobs, "action_mask": mask}


class Board(Cards):
    """The same, but that the end is found out a step late: the full board's mask allows nothing."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.full = False
        return super().reset(seed=seed)

    def step(self, action: Any) -> Any:
        if self.full:
            return self.seen(), 0.0, True, False, {}
        seen, reward, self.full, _, info = super().step(action)
        return seen, reward, False, False, info

    def action_masks(self) -> Any:
        return self.hand


class War(Plain):
    """Three orders at once, a mask for each, against a scripted opponent that thinks for a millisecond."""

    action_space = spaces.MultiDiscrete([3, 4, 2])

    def step(self, action: Any) -> Any:
        if not all(mask[order] for mask, order in zip(self.action_masks(), action, strict=True)):
            raise ValueError(f"order {action} is none in round {self.time}")
        time.sleep(0.001)
        return super().step(action)

    def paid(self, action: Any) -> Any:
        return float(action[0] + action[1])

    def told(self) -> dict[str, Any]:
        return {"winner": "model" if self.time == LENGTH else None, "orders": [print, None]}

    def action_masks(self) -> Any:
        return [[1, 0, 1], [1, 1, 1, self.time % 2], [0, 1]]


class Network(VectorEnv[Any, Any, Any]):
    """Many hosts of a network in one object, with their masks in the infos: cards again."""

    def __init__(self, num_envs: int = 1) -> None:
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.num_envs, self.hosts = num_envs, [Cards() for _ in range(num_envs)]
        self.single_observation_space, self.single_action_space = Cards.observation_space, Cards.action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return np.stack([host.reset()[0] for host in self.hosts]), self._told()

    def step(self, actions: Any) -> Any:
        came = [host.step(action) for host, action in zip(self.hosts, actions, strict=True)]
        over = np.array([one[2] for one in came])
        last = np.array([one[0] for one in came])
        seen = [host.reset()[0] if ends else one[0] for host, ends, one in zip(self.hosts, over, came, strict=True)]
        final = {"final_obs": np.array([*last, None], object)[:-1], "_final_obs": over} if over.any() else {}
        rewards = np.array([one[1] for one in came], np.float64)
        return np.stack(seen), rewards, over, np.zeros_like(over), {**self._told(), **final}

    def _told(self) -> dict[str, Any]:
        return {"action_mask": np.array([host.hand for host in self.hosts])}


class Robot(Plain):
    """A simulator in double precision."""

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float64)
    action_space = spaces.Box(-0.5, 0.5, (2,), np.float64)

    def seen(self) -> Any:
        return self.np_random.uniform(-1, 1, 3)

    def paid(self, action: Any) -> Any:
        if action.shape != (2,) or np.abs(action).max() > 0.5:
            raise ValueError(f"a torque of {action}")
        return -np.square(action).sum()


class Army(Plain):
    """An observation of parts: flags, a kind, a map."""

    observation_space = spaces.Dict(
        {"flags": spaces.MultiBinary(3), "kind": spaces.Discrete(4), "map": spaces.Box(0, 9, (2, 2), np.int64)}
    )

    def seen(self) -> Any:
        draw = self.np_random.integers
        return {"flags": draw(0, 2, 3).astype(np.int8), "kind": int(draw(4)), "map": draw(0, 10, (2, 2))}


class Two(Plain):
    """Spaces that Stable-Baselines3 has no networks for."""

    def __init__(self, what: str) -> None:
        both = spaces.Tuple((spaces.Discrete(3), spaces.Discrete(2)))
        self.observation_space, self.action_space = (both, Plain.action_space) if what == "seen" else (
            Plain.observation_space, both)  # fmt: skip

    def seen(self) -> Any:
        return (0, 1) if self.observation_space is not Plain.observation_space else super().seen()


class Table(Plain):
    """A game of four seats, which tells of the others in its own words."""

    def told(self) -> dict[str, Any]:
        return {"scores": [self.time, 2, 3], "turn": "white", "score_diff": None, "is_success": "False",
                "reward_terms": [1, 2], "episode": self.time, "perf": 0.9, "board": object()}  # fmt: skip


class Numbers(Plain):
    """Resets without arguments and infos; rewards and ends of other types."""

    def reset(self) -> Any:  # type: ignore[override]
        return super().reset()[0], None

    def step(self, action: Any) -> Any:
        seen, _, over, _, _ = super().step(action)
        return seen, np.array(action, np.float16), np.bool_(over), np.array(False), {}


class Proxy(Plain):
    """Its own table of names raises KeyError. Rewards and ends are arrays, and a lock in the info cannot be copied."""

    def __init__(self) -> None:
        self.__dict__["table"] = {"lock": threading.Lock()}

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["table"][name]

    def step(self, action: Any) -> Any:
        seen, _, over, _, info = super().step(action)
        return seen, np.array([action], np.float32), np.array([over]), np.array([False]), info

    def told(self) -> dict[str, Any]:
        return {"lock": self.lock, "list": [1]}


class Wrong(Plain):
    """What cannot train: `how` says why."""

    def __init__(self, how: str) -> None:
        self.how = how
        if how == "two numbers":
            self.observation_space = spaces.Box(-1, 1, (2,), np.float32)
        if how == "two keys":
            self.observation_space = spaces.Dict({"x": Plain.observation_space, "y": Plain.observation_space})
        if how == "async":
            self.step = self.wait  # type: ignore[method-assign]

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        seen, info = super().reset(seed=seed)
        answers = {"two numbers": seen[:2], "two keys": {"x": seen, "y": seen}, "list at reset": (seen, [1])}
        return answers.get(self.how, (seen, info))

    def step(self, action: Any) -> Any:
        if self.how == "package":
            raise gymnasium.error.DependencyNotInstalled("run `pip install a-display`") from ModuleNotFoundError("a")
        return super().step(action)

    async def wait(self, action: Any) -> Any:
        return super().step(action)

    def told(self) -> Any:
        return {"list": [1], "none": None, "text": "abc"}.get(self.how, {})


class Window(Plain):
    """Prices without an end, as whole numbers in a window of time."""

    observation_space = spaces.Box(0, 1000, (4, 3), np.int64)

    def step(self, action: Any) -> Any:
        self.time += 1
        return self.seen(), np.float64(action), False, False, {}

    def seen(self) -> Any:
        return self.np_random.integers(0, 1000, (4, 3))


class Own(Plain):
    """Hands out its own array, cuts episodes by itself."""

    observation_space = spaces.Box(-99, 99, (1,), np.float32)

    def __init__(self) -> None:
        self.place = np.zeros(1, np.float32)

    def step(self, action: Any) -> Any:
        self.time += 1
        self.place += int(action) - 1
        return self.place, float(action), False, self.time == LENGTH, {}

    def seen(self) -> Any:
        self.place[:] = self.np_random.uniform(-1, 1)
        return self.place


class Ported(Plain):
    """A generator of another kind, and a viewer that was never opened."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            self.np_random: Any = np.random.RandomState(seed)
        self.time = 0
        return self.seen(), {}

    def close(self) -> None:
        self.viewer.close()  # type: ignore[attr-defined]


class Router(Plain):
    """An engine with one seat on this machine: a file stands for its port."""

    def __init__(self) -> None:
        os.close(os.open("seat", os.O_CREAT | os.O_EXCL))

    def close(self) -> None:
        os.remove("seat")


WORLD = {"at": 0}


class World(Plain):
    """All copies of one process are one game."""

    def seen(self) -> Any:
        WORLD["at"] = (7 * WORLD["at"] + 3) % 101 if self.time else int(self.np_random.integers(101))
        return np.full(3, WORLD["at"] / 101, np.float32)


class Strict(Plain):
    """Makes NumPy strict in the process that it is built in."""

    def __init__(self) -> None:
        np.seterr(all="raise")


class Duel(Plain):
    """Takes an object, as notebooks hand it over."""

    def __init__(self, opponent: Any) -> None:
        self.opponent = opponent

    def paid(self, action: Any) -> Any:
        return float(action) - self.opponent.move()


class Opponent:
    """Moves by rule."""

    def __init__(self, strength: float) -> None:
        self.strength = strength

    def move(self) -> float:
        return self.strength
