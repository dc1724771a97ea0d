"""cluster=ray with DQN and SAC: actors act and step, and the learner stores their transitions and learns.

An actor gets requests for some vector steps, with the newest weights of the network that acts. It chooses actions as
one process does, from the same number of env steps: random ones, exploration rate, masks, noise. To the learner the
actors look like a vector env that has chosen its actions already. Each of its vector steps has one step of each env. So
the loop of `off_policy.py` stores, updates and calls callbacks as in one process, and as often. But the policy that
acts is a few messages older.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs

from fasttrain.algos.off_policy import OffPolicy
from fasttrain.batch import FinishedEpisode, each_array, select_rows
from fasttrain.errors import ConfigError
from fasttrain.saving.env_state import lifted
from fasttrain.spec.config import Config
from fasttrain.vec.base import copy_observations
from fasttrain_integrations.ray_actors import ActorVecEnv
from fasttrain_integrations.ray_collector import Actor, News
from fasttrain_integrations.ray_requests import MOST, Answer, Requests

MOST_STEPS = 32  # most vector steps in a message, so that the policy that acts is fresh


class Steps(NamedTuple):
    """T vector steps of an actor's n envs."""

    arrays: dict[str, Any]  # names of `Slots`, and `chosen`: actions in the form of the replay buffer; (T, n, ...)
    finished: list[list[FinishedEpisode]]  # of each step
    news: News
    seconds: float


def acting(policy: Any) -> Any:
    """The network that chooses actions."""
    return policy.q_net if hasattr(policy, "q_net") else policy.actor


class ReplayActor(Actor):
    """Envs and a model that only acts."""

    def __init__(self, config: Config, seed: int, places: Sequence[str]) -> None:
        small: dict[str, Any] = {"buffer_size": 1, "n_steps": 1}
        small |= {"prioritized": False} if hasattr(config.algo, "prioritized") else {}
        algo = dataclasses.replace(config.algo, **small)
        super().__init__(dataclasses.replace(config, algo=algo, prefetch="off"), seed, places)

    def spaces(self) -> tuple[Any, Any, int]:
        """As of `Actor`; images are transposed here, not by the learner."""
        _, actions, width = super().spaces()
        return self.model.env.observation_space, actions, width

    def reset(self, seed: int | None) -> tuple[Any, tuple[str, int]]:
        first, place = super().reset(seed)
        self.model._last_obs = lifted(self.model.env, [*range(self.env.num_envs)], first).observations
        return self.model._last_obs, place

    def act(self, weights: Any, settings: Any, steps: int, begun: int, total: int, each: int) -> Steps:
        """Make `steps` vector steps with these weights.

        Args:
            settings: the learner's `EngineSettings`.
            begun: env steps of the training before these steps.
            total: env steps of the whole training, for schedules.
            each: env steps of the training in a vector step.
        """
        began, model = time.perf_counter(), self.model
        source = model.collector.source_of(model.env)
        if model.engine.settings != settings:
            self._use_engine(settings, settings.kind == "kernels")
        acting(model.policy).load_state_dict(weights)
        model.policy.set_training_mode(False)
        masked, rows, finished = model.use_masking and source.masked, list[Any](), list[Any]()
        for step in range(steps):
            model.num_timesteps = begun + step * each
            model._update_current_progress_remaining(model.num_timesteps, total)
            if hasattr(model, "exploration_schedule"):
                model.exploration_rate = model.exploration_schedule(model._current_progress_remaining)
            actions, chosen = model._choose(source, model.action_noise, model.learning_starts)
            made, slots = model.collector.step(source, actions), source.slots
            model._last_obs = made.observations
            rows.append(
                {"observations": made.observations, "actions": actions, "chosen": chosen, "rewards": made.rewards,
                 "terminations": slots.terminations.copy(), "truncations": slots.truncations.copy(),
                 "action_masks": np.array(source.read_masks()) if masked else None}
            )  # fmt: skip
            finished.append(slots.finished)
            if model.action_noise is not None:
                for index in np.flatnonzero(made.dones).tolist():
                    model.action_noise.reset(**({"indices": [index]} if source.num_envs > 1 else {}))
        arrays = each_array(lambda *parts: np.stack(parts), *rows)
        return Steps(arrays, finished, self._news(), time.perf_counter() - began)


class ReplayVecEnv(ActorVecEnv):
    """The learner's view of all actors' envs: a vector env that has chosen its actions already."""

    actor = ReplayActor

    def __init__(self, config: Config, num_envs: int) -> None:
        super().__init__(config, num_envs)
        self._begin()

    def _begin(self) -> None:
        self.requests = Requests(self, MOST_STEPS)
        self.queues = [deque[Any]() for _ in self.sizes]  # steps of each actor that are not stored yet
        self.weights, self.weights_of = None, -1

    def check_algorithm(self, model: Any) -> None:
        if type(model).collect_rollouts is not OffPolicy.collect_rollouts:
            name = f"{type(model).__name__}.collect_rollouts"
            raise ConfigError(f"cluster=ray with {name}: actors collect by fasttrain's own loop; remove one of them")

    def reset(self) -> VecEnvObs:
        self._begin()
        observations = super().reset()
        each_array(np.copyto, self.slots.observations, observations)
        self.clear_slots()
        return observations

    def fill(self, model: Any) -> Any:  # type: ignore[override]
        """Wait for the next vector step. Returns its actions (N, ...), and the same for the replay buffer."""
        model.collector.clock.enter("env_step")
        self._ask(model)
        while not all(self.queues):
            if (answer := self.requests.answer(0.5)) is not None:
                self._receive(answer, model)
                self._ask(model)
        self.present = [queue.popleft() for queue in self.queues]
        joined = [np.concatenate([row[name] for row, _ in self.present]) for name in ("actions", "chosen")]
        return tuple(joined)

    def _ask(self, model: Any) -> None:
        """Ask the actors with few steps that wait for the learner."""
        for number, queue in enumerate(self.queues):
            steps, asked = self.requests.length(number), self.requests.of(number)
            if len(asked) >= MOST or len(queue) > steps // 2:
                continue
            if self.weights_of != model._n_updates:
                weights = {name: part.cpu() for name, part in acting(model.policy).state_dict().items()}
                self.weights, self.weights_of = self.shared(weights), model._n_updates
            begun = model.num_timesteps + (len(queue) + sum(asked)) * self.num_envs
            settings = dataclasses.replace(model.engine.settings, threads=1, pin_memory=False)
            reply = self.actors[number].act.remote(
                self.weights, settings, steps, begun, model._total_timesteps, self.num_envs
            )
            self.requests.add(number, steps, reply, None)

    def _receive(self, answer: Answer, model: Any) -> None:
        queue, size = self.queues[answer.number], self.sizes[answer.number]
        if answer.sent is not None:
            arrays, finished = answer.sent.arrays, answer.sent.finished
            self.note(answer.number, answer.sent.news, model.collector.empty_masks)
            queue.extend((select_rows(arrays, step), ended) for step, ended in enumerate(finished))
            return
        row = {name: np.zeros_like(getattr(self.slots, name)[:size]) for name in ("actions", "rewards", "terminations")}
        row |= {"chosen": row["actions"], "truncations": np.ones(size, np.bool_), "observations": answer.first}
        queue.append((row, None))  # a step that is not learned from

    def step_slots(self, actions: NDArray[Any]) -> None:
        slots, before = self.slots, copy_observations(self.slots.observations)
        slots.actions[...] = actions
        for number, (row, _) in enumerate(self.present):
            rows, seen = self.rows_of(number), row["observations"]
            each_array(lambda every, own, at=rows: every.__setitem__(at, own), slots.observations, seen)
            for name in ("rewards", "terminations", "truncations", "action_masks"):
                if row.get(name) is not None:
                    getattr(slots, name)[rows] = row[name]
        self.count_step()
        slots.finished = []
        for first, (row, finished) in zip(self.firsts, self.present, strict=True):
            for episode in finished or ():
                slots.finished.append(episode._replace(env_index=first + episode.env_index))
            if finished is None:  # the actor was lost
                lost = {"lost": "the actor of the env was lost and replaced"}
                slots.finished += [
                    self.end_episode(index, select_rows(before, index), lost, True)
                    for index in range(first, first + len(row["rewards"]))
                ]
        self.begin_episodes([episode.env_index for episode in slots.finished])


VEC_ENV = ReplayVecEnv
