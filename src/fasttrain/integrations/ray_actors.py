"""cluster=ray: actors collect the rollouts of PPO and MaskablePPO, each with envs and a copy of the policy.

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
import warnings
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices, VecEnvObs

from fasttrain.algos.engine import note_episodes
from fasttrain.batch import BoolArray, Float32Array, each_array
from fasttrain.buffers.rollout import RolloutStorage
from fasttrain.envs.user_code import blame
from fasttrain.errors import ConfigError, EnvError, FastTrainError
from fasttrain.spec.config import Config
from fasttrain.vec.base import SlotVecEnv, empty_slots

STORED = ("observations", "actions", "values", "log_probs", "masks")  # attributes of a `RolloutStorage`, (T, N, ...)
LOOPBACK = ("local", "auto", "127.0.0.1", "localhost", "[::1]")
REACHED_S = 5.0  # limit for an answer of cluster.address
# Ray gives its workers a low priority, and will hide GPUs otherwise than today.
ENVIRONMENT = {"RAY_worker_niceness": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
START_S = 120.0  # limit for starting an actor
MOST_LOST, WITHIN_S = 10, 600.0  # more lost actors within this time end the run
SLOW = 10.0  # an actor may take this many times the longest rollout so far, in addition to env.step_timeout_s


class Part(NamedTuple):
    """An actor's part of a rollout: T steps of n envs."""

    stored: dict[str, Any]  # name of `STORED` → (T, n, ...)
    rewards: Float32Array  # (T, n) with the values of truncated episodes added
    plain_rewards: Float32Array  # (T, n) as the envs gave them
    episode_starts: Float32Array  # (T, n)
    left_out: BoolArray | None  # (T, n) True: no transition
    dones: BoolArray  # (T, n)
    infos: list[tuple[int, int, dict[str, Any]]]  # step, env and info of each episode's end
    last: Any  # (n, ...) observations after the last step
    seconds: float


class Recorder(BaseCallback):
    """Keeps what the learner's callbacks get at each step."""

    def _on_rollout_start(self) -> None:
        self.rewards, self.dones = list[Any](), list[Any]()
        self.ends = list[tuple[int, int, dict[str, Any]]]()

    def _on_step(self) -> bool:
        self.rewards.append(self.locals["rewards"].copy())
        self.dones.append(np.array(self.locals["dones"], np.bool_))
        for index in np.flatnonzero(self.dones[-1]).tolist():
            self.ends.append((len(self.dones) - 1, index, self.locals["infos"][index]))
        return True


class Actor:
    """Envs and a model that only collects. It runs in a process of the cluster.

    Args:
        config: the training's configuration, with this actor's number of envs.
        seed: of the first env; the next one has seed + 1, and so on.
        places: folders of the learner's `sys.path`, for the modules of the user.
    """

    def __init__(self, config: Config, seed: int, places: Sequence[str]) -> None:
        from fasttrain.perf.clock import PhaseClock
        from fasttrain.runs.envs import build_vec_env
        from fasttrain.runs.models import build_algorithm

        sys.path += [place for place in places if place not in sys.path and os.path.isdir(place)]
        torch.set_num_threads(1)
        self.env = build_vec_env(config, config.num_envs, seed)
        self.config = config
        self.model = cast(Any, build_algorithm(config, self.env, PhaseClock()))
        self.env.seed(seed)  # SB3's constructor has seeded it with the training's seed
        self.model.collector.lends_observations = False
        self.recorder = Recorder()
        self._compile(config.fused_update == "on")

    def _compile(self, wanted: bool) -> None:
        from fasttrain.kernel_cache import compile_all
        from fasttrain.runs.engine import learner_calls

        compile_all(learner_calls(dataclasses.replace(self.config, fused_update="on")) if wanted else [])

    def spaces(self) -> tuple[Any, Any, int]:
        """Observation space, action space, and width of the masks (0: the envs have none)."""
        masks = self.model.collector.source_of(self.env).read_masks()
        return self.env.observation_space, self.env.action_space, 0 if masks is None else masks.shape[1]

    def reset(self) -> Any:
        """Begin new episodes in all envs; returns their observations."""
        self.model._setup_learn(1, self.recorder)  # as SB3's `learn` begins
        self.recorder.init_callback(self.model)
        return self.model._last_obs

    def collect(self, weights: Any, settings: Any, noise: Any, steps: int, masked: bool) -> Part:
        """Collect `steps` vector steps with these weights.

        Args:
            settings: the learner's `EngineSettings`.
            noise: random numbers (T, n, K) for the actions, or a seed for an engine that draws its own.
        """
        from fasttrain.algos.ppo import collect

        began, model = time.perf_counter(), self.model
        model.policy.load_state_dict(weights)
        if model.engine.settings != settings:
            self._compile(settings.kind == "kernels")
            model.use_engine(settings)
        if isinstance(noise, int):
            torch.manual_seed(noise)
        else:
            model.engine_now().given = noise
        collect(model, self.env, self.recorder, steps, masked)
        storage, recorder = model.rollout_buffer.storage, self.recorder
        return Part(
            {name: getattr(storage, name) for name in STORED}, storage.rewards, np.stack(recorder.rewards),
            storage.episode_starts, storage._left_out, np.stack(recorder.dones), recorder.ends, model._last_obs,
            time.perf_counter() - began,
        )  # fmt: skip


class ActorVecEnv(SlotVecEnv):
    """The learner's view of all actors' envs. It gives whole rollouts (`fill`) and cannot make single steps.

    Raises:
        ConfigError: Ray is missing, the cluster cannot be reached, or it has too few cores.
        EnvError: the envs cannot be built.
    """

    def __init__(self, config: Config, num_envs: int) -> None:
        self.config, self.ray = config, connected(config)
        count = config.cluster.actors
        self.sizes = [len(part) for part in np.array_split(np.arange(num_envs), count)]
        self.firsts = np.cumsum([0, *self.sizes[:-1]]).tolist()
        self.restarts, self.longest_s, self.lost_steps = 0, 0.0, 0
        self.lost_at = list[float]()
        self.actors = [self._start(number) for number in range(count)]
        seen, actions, width = self._answers([actor.spaces.remote() for actor in self.actors[:1]])[0]
        self.slots = empty_slots(seen, actions, num_envs, width)
        super().__init__(num_envs, seen, actions)

    def _start(self, number: int) -> Any:
        size, seed = self.sizes[number], self.config.seed + self.firsts[number]
        own = dataclasses.replace(self.config, num_envs=size, cluster=type(self.config.cluster)())
        if isinstance(own.workers, int):
            own = dataclasses.replace(own, workers=max(1, min(size, own.workers // len(self.sizes))))
        remote = self.ray.remote(num_cpus=1, max_restarts=0)(Actor)
        return remote.remote(own, (seed + 1_000_003 * self.restarts) % 2**31, [os.getcwd(), *filter(None, sys.path)])

    def _answers(self, asked: list[Any], limit_s: float = START_S) -> list[Any]:
        """The answers of actors at the start. Raises EnvError or ConfigError: one failed."""
        try:
            return self.ray.get(asked, timeout=limit_s)  # type: ignore[no-any-return]
        except self.ray.exceptions.GetTimeoutError as error:
            raise EnvError(f"cluster=ray: an actor did not start its envs within {limit_s:.0f} s") from error
        except self.ray.exceptions.RayError as error:
            raise _cause(error) from error

    def reset(self) -> VecEnvObs:
        parts = self._answers([actor.reset.remote() for actor in self.actors])
        self._reset_seeds()
        return each_array(lambda *rows: np.concatenate(rows), *parts)  # type: ignore[no-any-return]

    def fill(self, model: Any, engine: Any, rollout: RolloutStorage, use_masking: bool, callback: BaseCallback) -> bool:
        """Let the actors collect the rollout, and call the callback for each step. False: it asked to stop."""
        clock, steps = model.collector.clock, rollout.num_steps
        clock.enter("env_step")
        weights = self.ray.put({name: part.cpu() for name, part in model.policy.state_dict().items()})
        settings = dataclasses.replace(engine.settings, threads=1, pin_memory=False)
        asked = [
            actor.collect.remote(weights, settings, self._noise(engine, number), steps, use_masking)
            for number, actor in enumerate(self.actors)
        ]
        parts = [self._part(number, reply, steps) for number, reply in enumerate(self._replies(asked))]
        clock.enter("buffer")
        rewards, dones = np.zeros((2, steps, self.num_envs), np.float32)
        infos: list[dict[int, Any]] = [{} for _ in range(steps)]
        last, starts = model._last_obs, np.asarray(model._last_episode_starts, np.bool_)
        for number, part in enumerate(parts):
            rows = self._rows(number)
            if isinstance(part, Part):
                self._store(rollout, rows, part)
                rewards[:, rows], dones[:, rows], starts[rows] = part.plain_rewards, part.dones, part.dones[-1]
                for step, index, info in part.infos:
                    infos[step][rows.start + index] = info
                each_array(lambda whole, own, rows=rows: whole.__setitem__(rows, own), last, part.last)
            else:  # the observations of a new actor; its rows are left out
                _leave_out(rollout, rows, part, last, starts)
        rollout.complete()
        stepped = sum(size for size, part in zip(self.sizes, parts, strict=True) if isinstance(part, Part))
        return self._report(model, callback, stepped, rewards, dones > 0, infos)

    def _noise(self, engine: Any, number: int) -> Any:
        """The random numbers of an actor: a part of those of the learner's engine, or a seed."""
        if (drawn := getattr(engine, "noise", None)) is None:
            return int(torch.randint(2**31, ()))
        return np.ascontiguousarray(drawn[:, self._rows(number)])

    def _rows(self, number: int) -> slice:
        return slice(self.firsts[number], self.firsts[number] + self.sizes[number])

    def _replies(self, asked: list[Any]) -> Iterator[Any]:
        """Each actor's part, or the error with which it was lost."""
        began, errors = time.monotonic(), self.ray.exceptions
        for reply in asked:
            limit_s = began + self.config.env.step_timeout_s + SLOW * self.longest_s - time.monotonic()
            try:
                part = self.ray.get(reply, timeout=max(0.1, limit_s))
            except errors.GetTimeoutError:
                yield f"did not answer within {time.monotonic() - began:.0f} s"
            except errors.RayTaskError as error:  # an error of the env or of fasttrain
                raise _cause(error) from error
            except errors.RayError as error:
                yield f"ended: {type(error).__name__}"
            else:
                self.longest_s = max(self.longest_s, part.seconds)
                yield part

    def _part(self, number: int, reply: Any, steps: int) -> Any:
        """The part; for a lost actor the first observations of the one that replaces it."""
        if isinstance(reply, Part):
            return reply
        now = time.monotonic()
        self.lost_at = [at for at in self.lost_at if at > now - WITHIN_S] + [now]
        if len(self.lost_at) > MOST_LOST:
            raise EnvError(f"cluster=ray: {len(self.lost_at)} actors were lost in ten minutes; the last one {reply}")
        self.ray.kill(self.actors[number])
        self.restarts, self.lost_steps = self.restarts + 1, self.lost_steps + steps * self.sizes[number]
        self.actors[number] = self._start(number)
        warnings.warn(f"actor {number} {reply}; its rollout is lost, and a new actor continues", stacklevel=2)
        return self._answers([self.actors[number].reset.remote()])[0]

    def _store(self, rollout: RolloutStorage, rows: slice, part: Part) -> None:
        for name, values in part.stored.items():
            each_array(lambda whole, own: whole[:, rows].__setitem__(..., own), getattr(rollout, name), values)
        rollout.rewards[:, rows], rollout.episode_starts[:, rows] = part.rewards, part.episode_starts
        if part.left_out is not None:
            mask = np.zeros((rollout.num_steps, rollout.num_envs), np.bool_)
            mask[:, rows] = part.left_out
            rollout.leave_out(slice(None), mask)

    def _report(
        self, model: Any, callback: BaseCallback, stepped: int, rewards: Float32Array, dones: BoolArray,
        infos: list[dict[int, Any]],
    ) -> bool:  # fmt: skip
        """Call the callback once per step, as if the envs had stepped here. `stepped`: envs that have made the step."""
        nothing: dict[str, Any] = {}
        for step, ended in enumerate(infos):
            told = [ended.get(index, nothing) for index in range(self.num_envs)] if ended else [nothing] * self.num_envs
            model.num_timesteps += stepped
            callback.update_locals({"n_steps": step, "rewards": rewards[step], "dones": dones[step], "infos": told,
                                    "new_obs": model._last_obs})  # fmt: skip
            model.collector.clock.enter("log")
            if not callback.on_step():
                return False
            model.collector.clock.enter("buffer")
            if ended:
                note_episodes(model, told, dones[step])
        model._last_episode_starts = dones[-1]
        return True

    def step_slots(self, actions: NDArray[Any]) -> None:
        raise RuntimeError("the envs of cluster=ray step in actors: only whole rollouts can be collected")

    def call_envs(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], indices: VecEnvIndices) -> list[Any]:
        raise EnvError(f"cluster=ray: the envs are in actors, so {name!r} cannot be called")

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        if attr_name == "render_mode":  # SB3's constructor asks every env for it
            return [None] * len(self.env_indices(indices))
        raise AttributeError(f"the envs of cluster=ray are in actors: {attr_name!r} cannot be read")

    def set_attr(self, attr_name: str, value: object, indices: VecEnvIndices = None) -> None:
        raise EnvError(f"cluster=ray: the envs are in actors, so {attr_name!r} cannot be set")

    def close(self) -> None:
        """End the actors, and Ray if it was started for this training."""
        for actor in self.actors:
            self.ray.kill(actor)
        self.ray.shutdown()


def _leave_out(rollout: RolloutStorage, rows: slice, first: Any, last: Any, starts: BoolArray) -> None:
    """Fill the rows of a lost actor with what no update reads. `first`: observations of the envs that replace them."""
    for name in STORED:
        each_array(lambda whole: whole[:, rows].__setitem__(..., 0), getattr(rollout, name))
    if rollout.masks is not None:
        rollout.masks[:, rows] = True
    rollout.rewards[:, rows], rollout.episode_starts[:, rows], starts[rows] = 0.0, 1.0, True
    mask = np.zeros((rollout.num_steps, rollout.num_envs), np.bool_)
    mask[:, rows] = True
    rollout.leave_out(slice(None), mask)
    each_array(lambda whole, own: whole.__setitem__(rows, own), last, first)


def _cause(error: Exception) -> FastTrainError:
    """The error of an actor, as the error of a training in one process would be."""
    cause = getattr(error, "cause", None) or error
    cause = getattr(cause, "cause", None) or cause
    if isinstance(cause, FastTrainError):
        return cause
    return EnvError(f"cluster=ray: an actor failed: {blame(cause)}")


def connected(config: Config) -> Any:
    """Ray, connected to the cluster. Raises ConfigError."""
    own = config.cluster
    host, _, port = own.address.removeprefix("ray://").rpartition(":")
    host = host or own.address
    if host not in LOOPBACK and os.environ.get("RAY_AUTH_MODE") != "token":
        raise ConfigError(
            f"cluster.address={own.address} is another machine, and anybody who reaches its port can run code there: "
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
    more: dict[str, Any] = {} if host in LOOPBACK else {"runtime_env": {"working_dir": os.getcwd()}}
    if own.address == "local":
        more["include_dashboard"] = False
    for name, usual in ENVIRONMENT.items():
        os.environ.setdefault(name, usual)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(own.address, logging_level="error", log_to_driver=False, **more)
    except ConnectionError as error:
        raise ConfigError(
            f"cluster.address={own.address}: no Ray cluster runs on this machine; start one with `ray start --head`, "
            "or remove cluster.address"
        ) from error
    except Exception as error:  # RuntimeError of another version, ValueError of an address
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"cluster.address={own.address}: {type(error).__name__}: {reason}") from error
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)  # Ray's would end the training at once
    if own.actors > (cores := int(ray.cluster_resources().get("CPU", 0))):
        ray.shutdown()
        raise ConfigError(f"cluster.actors={own.actors}: the cluster has {cores} cores, and each actor uses one")
    return ray
