"""cluster=ray: actors collect the rollouts of PPO and its variants, each with envs and a copy of the policy.

Once per rollout the learner sends weights and random numbers, and each actor sends back its part of the rollout. With
compiled kernels the random numbers are those that one process would use, so the training has the same numbers as in one
process with the same envs. With PyTorch each actor draws its own numbers.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs

from fasttrain.algos.engine import note_episodes
from fasttrain.algos.ppo import _PPO, has_stock_buffer
from fasttrain.batch import each_array, select_rows
from fasttrain.buffers.rollout import RolloutStorage
from fasttrain.envs.user_code import blame
from fasttrain.errors import ConfigError, EnvError, FastTrainError
from fasttrain.saving.env_state import lifted
from fasttrain.spec.config import Config
from fasttrain.terminal import tell
from fasttrain.vec.base import EmptyMasks, SlotVecEnv, empty_slots
from fasttrain_integrations.ray_collector import NO_NEWS, STORED, Actor, News, Part, Work, statistics_of
from fasttrain_integrations.ray_requests import ENDED, FULL, NO_ANSWER, Lost
from fasttrain_vec.replacing import Replacements

LOOPBACK = ("local", "auto", "127.0.0.1", "localhost", "[::1]")
REACHED_S = 5.0  # limit for an answer of cluster.address
# Ray gives its workers a low priority, and will hide GPUs otherwise than today.
ENVIRONMENT = {"RAY_worker_niceness": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
START_S = 120.0  # limit for starting an actor
CLOSE_S = 10.0  # limit for closing the envs
STRIDE = 7_000_003  # added to the seeds of an actor that replaces another one; not `eval.seed`
PUTS, PUT_AGAIN_S = 10, 2.0  # how often weights are offered to a full object store, and the pauses between
SLOW = 10.0  # an actor may take this many times the longest rollout so far, in addition to env.step_timeout_s


class ActorVecEnv(SlotVecEnv):
    """The learner's view of all actors' envs. It gives whole rollouts (`fill`) and cannot make single steps.

    Raises:
        ConfigError: Ray is missing, the cluster cannot be reached, or it has too few cores.
        EnvError: the envs cannot be built.
    """

    actor: Any = Actor
    elsewhere = "cluster=ray: the envs are in actors"

    def __init__(self, config: Config, num_envs: int) -> None:
        if config.vec_env not in ("dummy", "native", "shared", "daemons"):
            raise ConfigError(f"cluster=ray with vec_env={config.vec_env}: use vec_env=dummy, shared or native")
        self.config, self.actors = config, list[Any]()
        self.sizes = [len(part) for part in np.array_split(np.arange(num_envs), config.cluster.actors)]
        self.firsts = np.cumsum([0, *self.sizes[:-1]]).tolist()
        self.longest_s, self.lost_steps = 0.0, 0
        self.places = dict[int, tuple[str, int]]()  # machine and process of each actor
        self.replacements = Replacements(max(10, 2 * len(self.sizes)))  # all actors of a machine may be lost at once
        self.ray = connected(config)
        try:
            self.actors = [self._start(number) for number in range(len(self.sizes))]
            asked = [_spaces(actor) for actor in self.actors]
            spaces = [self._answer(number, _spaces, reply) for number, reply in enumerate(asked)]
            seen, actions, width = spaces[0]
        except BaseException:
            self.close()
            raise
        self.slots = empty_slots(seen, actions, num_envs, width)
        super().__init__(num_envs, seen, actions)

    def _start(self, number: int) -> Any:
        size, seed = self.sizes[number], self.config.seed + self.firsts[number] + STRIDE * self.replacements.count
        cluster: Any = type(self.config.cluster)()
        own = dataclasses.replace(self.config, num_envs=size, device="cpu", cluster=cluster)
        if isinstance(own.workers, int):
            own = dataclasses.replace(own, workers=max(1, min(size, own.workers // len(self.sizes))))
        daemons: Any = getattr(own, "daemons", None)
        if isinstance(engines := getattr(daemons, "count", None), int):
            share: Any = {"daemons": dataclasses.replace(daemons, count=max(1, min(size, engines // len(self.sizes))))}
            own = dataclasses.replace(own, **share)
        remote = self.ray.remote(num_cpus=1, max_restarts=0)(self.actor)
        return remote.remote(own, seed % 2**31, [os.getcwd(), *filter(None, sys.path)])

    def check_algorithm(self, model: Any) -> None:
        """Raises ConfigError if the user's subclass collects otherwise than actors do."""
        if not has_stock_buffer(model):
            name = type(model.rollout_buffer).__name__
            raise ConfigError(f"cluster=ray with rollout_buffer_class={name}: actors fill fasttrain's own; remove it")
        if type(model).collect_rollouts is not _PPO.collect_rollouts:
            name = f"{type(model).__name__}.collect_rollouts"
            raise ConfigError(f"cluster=ray with {name}: actors collect by fasttrain's own loop; remove one of them")

    def _answer(self, number: int, ask: Callable[[Any], Any], asked: Any = None) -> Any:
        """The answer of an actor that starts. An actor that is lost meanwhile is replaced, and asked again.

        Args:
            asked: the answer to come, if the actor was asked already.
        """
        limit_s, hung = max(START_S, self.config.env.step_timeout_s * self.sizes[number]), False
        while True:
            answer, lost = self.result(number, ask(self.actors[number]) if asked is None else asked, limit_s)
            if lost is None:
                return answer
            if lost.cause == NO_ANSWER and hung:
                why = "the cluster has no free core, or building them takes longer"
                raise EnvError(f"{self._name(number)} did not start its envs within {limit_s:.0f} s, twice: {why}")
            hung = hung or lost.cause == NO_ANSWER
            self._renew(number, lost)
            asked = None

    def result(self, number: int, reply: Any, limit_s: float) -> tuple[Any, Lost | None]:
        """An actor's answer, or why the actor is lost. Raises FastTrainError: an env or fasttrain raised an error."""
        errors, began = self.ray.exceptions, time.monotonic()
        try:
            return self.ray.get(reply, timeout=max(0.1, limit_s)), None
        except errors.GetTimeoutError:
            return None, Lost(NO_ANSWER, f"{time.monotonic() - began:.0f} s waited, see env.step_timeout_s")
        except errors.RayError as error:
            cause = getattr(error, "cause", None) or error
            if isinstance(cause, (errors.ObjectStoreFullError, errors.OutOfDiskError)):
                return None, Lost(FULL, type(cause).__name__)
            if not isinstance(cause, errors.RayError):
                raise self._cause(number, error) from error
            return None, Lost(ENDED, type(cause).__name__)

    def _renew(self, number: int, lost: Lost) -> None:
        """Start a new actor in place of a lost one. Raises EnvError if too many were lost."""
        told = f"{self._name(number)}: {lost.cause} ({lost.detail})"
        if too_many := self.replacements.add(lost.cause):
            raise EnvError(f"{too_many}; the last: {told}")
        tell(f"fasttrain: warning: {told}; its part of the rollout is lost, and a new actor continues")
        self.ray.kill(self.actors[number])
        host, pid = self.places.pop(number, ("", 0))
        if lost.cause == NO_ANSWER and host == socket.gethostname():  # if Ray does not reach it, it would keep its core
            with suppress(psutil.Error):
                if (process := psutil.Process(pid)).name().startswith("ray::"):
                    process.kill()
        self.actors[number] = self._start(number)

    def reset(self) -> VecEnvObs:
        asks = [_resetting(self._seeds[first]) for first in self.firsts]
        asked = [ask(actor) for ask, actor in zip(asks, self.actors, strict=True)]
        parts = [self._answer(number, ask, asked[number]) for number, ask in enumerate(asks)]
        self.places = {number: place for number, (_, place) in enumerate(parts)}
        self._reset_seeds()
        observations: VecEnvObs = _joined([first for first, _ in parts], 0)
        return observations

    def fill(self, model: Any, engine: Any, rollout: RolloutStorage, use_masking: bool, callback: BaseCallback) -> bool:
        """Let the actors collect the rollout, and call the callback for each step. False: it asked to stop."""
        clock = model.collector.clock
        clock.enter("env_step")
        weights = self.shared({name: part.cpu() for name, part in model.policy.state_dict().items()})
        stepped = 0  # envs that have made their steps
        while not stepped:  # again if all actors were lost
            parts, stepped = self._collected(model, engine, rollout, use_masking, weights)
            model._last_obs = _joined([part.last for part in parts], 0)
        clock.enter("buffer")
        for name, axis in STORED.items():
            if parts[0].stored[name] is not None:
                rollout.assign(name, _joined([part.stored[name] for part in parts], axis))
        rollout.rewards[...] = _joined([part.rewards for part in parts], 1)
        rollout.episode_starts[...] = _joined([part.episode_starts for part in parts], 1)
        if (left_out := _joined([part.left_out for part in parts], 1)).any():
            rollout.leave_out(slice(None), left_out)
        rollout.complete()
        if (memory := _joined([part.memory for part in parts], 1)) is not None:
            model.remember(each_array(lambda part: torch.from_numpy(part).to(model.device), memory))
        return self._report(model, callback, stepped, parts)

    def _collected(
        self, model: Any, engine: Any, rollout: RolloutStorage, use_masking: bool, weights: Any
    ) -> tuple[list[Part], int]:
        """The parts of all actors, and the number of envs in actors that were not lost."""
        settings = dataclasses.replace(engine.settings, threads=1, pin_memory=False)
        steps, normal, asked = rollout.num_steps, statistics_of(model), []
        for number, actor in enumerate(self.actors):
            last, noise = select_rows(model._last_obs, self.rows_of(number)), self._noise(engine, number)
            work = Work(settings, noise, steps, use_masking, model.num_timesteps, last, normal)
            asked.append(actor.collect.remote(weights, work))
        replies = [*self._replies(asked, steps)]
        parts = [
            reply if isinstance(reply, Part) else self._replaced(number, reply, rollout, model)
            for number, reply in enumerate(replies)
        ]
        for number, part in enumerate(parts):  # in the actors' order
            if part.statistics is not None:
                each_array(lambda whole, its: whole.combine(its), normal, part.statistics)
            self.note(number, part.news, model.collector.empty_masks)
        return parts, sum(size for size, reply in zip(self.sizes, replies, strict=True) if isinstance(reply, Part))

    def shared(self, weights: Any) -> Any:
        """The weights in Ray's object store. It may be full for a while."""
        for _ in range(PUTS):
            try:
                return self.ray.put(weights)
            except (self.ray.exceptions.ObjectStoreFullError, self.ray.exceptions.OutOfDiskError):  # noqa: PERF203
                time.sleep(PUT_AGAIN_S)
        raise EnvError("Ray's object store is full: give it more memory (ray start --object-store-memory=BYTES)")

    def note(self, number: int, news: News, empty_masks: EmptyMasks) -> None:
        """Add what happened in an actor to the counts of the training."""
        self.replacements.causes.update(news.replaced)
        self.lost_steps += news.lost_steps
        if news.warnings and not empty_masks.count:
            empty_masks.warn(f"{self._name(number)}: {news.warnings[0]}")
        empty_masks.count += news.empty_masks

    def _noise(self, engine: Any, number: int) -> Any:
        """The random numbers of an actor: a part of those of the learner's engine, or a seed."""
        if (drawn := getattr(engine, "noise", None)) is None:
            return int(torch.randint(2**31, ()))
        return np.ascontiguousarray(drawn[:, self.rows_of(number)])

    def rows_of(self, number: int) -> slice:
        return slice(self.firsts[number], self.firsts[number] + self.sizes[number])

    def _name(self, number: int) -> str:
        first = self.firsts[number]
        return f"actor {number} (envs {first} to {first + self.sizes[number] - 1})"

    def _replies(self, asked: list[Any], steps: int) -> Iterator[Any]:
        """Each actor's part, or why it was lost."""
        began, step_s = time.monotonic(), self.config.env.step_timeout_s
        for number, reply in enumerate(asked):
            longest_s = step_s + SLOW * self.longest_s if self.longest_s else step_s * steps
            part, lost = self.result(number, reply, began + longest_s - time.monotonic())
            if lost is None:
                self.longest_s = max(self.longest_s, part.seconds)
            yield lost or part

    def renewed(self, number: int, lost: Lost, steps: int) -> Any:
        """Replace an actor that was lost with `steps` vector steps. Returns the first observations of the new envs."""
        self.lost_steps += steps * self.sizes[number]
        self._renew(number, lost)
        first, self.places[number] = self._answer(number, _resetting(None))
        return first

    def _replaced(self, number: int, lost: Lost, rollout: RolloutStorage, model: Any) -> Part:
        """Replace a lost actor. Returns a part without transitions, with the first observations of the new envs."""
        steps, size, rows = rollout.num_steps, self.sizes[number], self.rows_of(number)
        first = lifted(model.env, [*range(rows.start, rows.stop)], self.renewed(number, lost, steps)).observations
        stored = {name: _ones(getattr(rollout, name, None), size, axis) for name, axis in STORED.items()}
        nothing, every = np.zeros((steps, size), np.float32), np.ones((steps, size), np.bool_)
        states = _ones(each_array(lambda part: part.cpu().numpy(), getattr(model.memory(), "states", None)), size, 1)
        return Part(stored, nothing, nothing, nothing + 1, every, ~every, [], first, states, None, NO_NEWS, 0.0)

    def _report(self, model: Any, callback: BaseCallback, stepped: int, parts: Sequence[Part]) -> bool:
        """Call the callback once per step, as if the envs had stepped here. `stepped`: envs that have made the step."""
        rewards, dones = (_joined([getattr(part, name) for part in parts], 1) for name in ("plain_rewards", "dones"))
        infos: list[list[dict[str, Any]]] = [[{}] * self.num_envs] * len(dones)
        for first, part in zip(self.firsts, parts, strict=True):
            for step, index, info in part.infos:
                infos[step] = [*infos[step]]
                infos[step][first + index] = info
        for step, told in enumerate(infos):
            model.num_timesteps += stepped
            callback.update_locals({"n_steps": step, "rewards": rewards[step], "dones": dones[step], "infos": told})
            model.collector.clock.enter("log")
            if not callback.on_step():
                return False
            model.collector.clock.enter("buffer")
            if dones[step].any():
                note_episodes(model, told, dones[step])
        model._last_episode_starts = dones[-1]
        return True

    def _cause(self, number: int, error: Exception) -> FastTrainError:
        """The error of an actor, as the error of a training in one process would be, with the actor's name."""
        cause = getattr(error, "cause", None) or error
        cause = getattr(cause, "cause", None) or cause
        kind = type(cause) if isinstance(cause, (ConfigError, EnvError)) else EnvError
        return kind(f"{self._name(number)}: {cause if isinstance(cause, FastTrainError) else blame(cause)}")

    def step_slots(self, actions: NDArray[Any]) -> None:
        raise RuntimeError("the envs of cluster=ray step in actors: only whole rollouts can be collected")

    def close(self) -> None:
        """Close the envs, and end the actors, and Ray if it was started for this training."""
        if self.actors:
            self.ray.wait(
                [actor.close.remote() for actor in self.actors], num_returns=len(self.actors), timeout=CLOSE_S
            )
        for actor in self.actors:
            self.ray.kill(actor)
        self.actors = []
        self.ray.shutdown()


def _spaces(actor: Any) -> Any:
    return actor.spaces.remote()


def _resetting(seed: int | None) -> Callable[[Any], Any]:
    return lambda actor: actor.reset.remote(seed)


def env_of(config: Config, num_envs: int) -> ActorVecEnv:
    """The learner's view of the actors' envs, as the algorithm and the schedule need it."""
    own = "continuous" if config.schedule == "continuous" else "replay" if config.algo.spec.off_policy else ""
    return import_module(f".ray_{own}", __package__).VEC_ENV(config, num_envs) if own else ActorVecEnv(config, num_envs)


def _joined(parts: Sequence[Any], axis: int) -> Any:
    """The arrays of all actors, or their dicts of arrays, as one."""
    return each_array(lambda *own: np.concatenate(own, axis), *parts)


def _ones(arrays: Any, size: int, axis: int) -> Any:
    """Ones for `size` envs in place of the arrays of all envs. `axis`: that of the envs."""
    return each_array(lambda whole: np.ones_like(whole.take(np.arange(size), axis)), arrays)


def connected(config: Config) -> Any:
    """Ray, connected to the cluster. Raises ConfigError."""
    own = config.cluster
    address = os.environ.get("RAY_ADDRESS", "auto") if own.address == "auto" else own.address
    host, _, port = address.removeprefix("ray://").rpartition(":")
    host = host or address
    if host not in LOOPBACK and os.environ.get("RAY_AUTH_MODE") != "token":
        raise ConfigError(
            f"cluster.address={address} is another machine, and anybody who reaches its port can run code there: "
            "start the cluster with RAY_AUTH_MODE=token, and set it here too"
        )
    try:
        ray: Any = import_module("ray")
    except ImportError as error:
        raise ConfigError(f"cluster=ray needs Ray ({error}): pip install 'fasttrain[ray]'") from error
    if port.isdigit():
        try:  # Ray itself would try for minutes
            socket.create_connection((host.strip("[]"), int(port)), REACHED_S).close()
        except OSError as error:
            raise ConfigError(f"cluster.address={own.address}: nothing answers there ({error})") from error
    files = {"working_dir": os.getcwd(), "excludes": ["/outputs/", "/multirun/", "/.git/", "/.venv/"]}
    more: dict[str, Any] = {"include_dashboard": False} if own.address == "local" else {"runtime_env": files}
    if "working_dir" in os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", ""):  # `ray job submit` has sent it
        more = {}
    for name, usual in ENVIRONMENT.items():
        os.environ.setdefault(name, usual)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(own.address, logging_level="error", log_to_driver=False, **more)
    except Exception as error:  # RuntimeError of another version, ValueError of an address
        reason = str(error).strip().partition("\n")[0]
        if isinstance(error, ConnectionError) and address == "auto":
            reason = "no Ray cluster runs on this machine; start one with `ray start --head`, or remove cluster.address"
        if isinstance(error, ConnectionError) and os.environ.get("RAY_AUTH_MODE") != "token":
            reason += "; if the cluster has a token, set RAY_AUTH_MODE=token here too"
        raise ConfigError(f"cluster.address={own.address}: {type(error).__name__}: {reason}") from error
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)  # Ray's would end the training at once
    if own.actors > (cores := int(ray.cluster_resources().get("CPU", 0))):
        ray.shutdown()
        raise ConfigError(f"cluster.actors={own.actors}: the cluster has {cores} cores, and each actor uses one")
    return ray
