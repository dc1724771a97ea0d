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
from stable_baselines3.common.utils import set_random_seed
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices, VecEnvObs

from fasttrain.algos.engine import note_episodes
from fasttrain.batch import BoolArray, Float32Array, each_array
from fasttrain.buffers.rollout import RolloutStorage
from fasttrain.envs.masks import mask_width
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
CLOSE_S = 10.0  # limit for closing the envs
STRIDE = 7_000_003  # added to the seeds of an actor that replaces another one; not `eval.seed`
MOST_LOST, WITHIN_S = 10, 600.0  # more lost actors within this time end the run
SLOW = 10.0  # an actor may take this many times the longest rollout so far, in addition to env.step_timeout_s


class Part(NamedTuple):
    """An actor's part of a rollout: T steps of n envs."""

    stored: dict[str, Any]  # name of `STORED` → (T, n, ...)
    rewards: Float32Array  # (T, n) with the values of truncated episodes added
    plain_rewards: Float32Array  # (T, n) as the envs gave them
    episode_starts: Float32Array  # (T, n)
    left_out: BoolArray  # (T, n) True: no transition
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
        self.config, self.recorder = config, Recorder()
        self.env = build_vec_env(config, config.num_envs, seed)
        game: Any = getattr(self.env.unwrapped, "game", None)
        if hasattr(game, "max_threads"):
            game.max_threads = 1
        self.model = cast(Any, build_algorithm(config, self.env, PhaseClock()))
        set_random_seed(seed)  # SB3's constructor has seeded all with the training's seed
        self.env, self.model.collector.lends_observations = self.model.env, False  # images are transposed in this env
        self.model.collector.empty_masks.raises = config.env.on_empty_mask == "raise"
        self._use_engine(self.model.engine.settings, config.fused_update == "on")

    def _use_engine(self, settings: Any, kernels: bool) -> None:
        from fasttrain.kernel_cache import compile_all
        from fasttrain.runs.engine import learner_calls

        compile_all(learner_calls(dataclasses.replace(self.config, fused_update="on")) if kernels else [])
        self.model.use_engine(settings)
        if self.config.nan_guard == "off":
            self.model.engine.guard = None

    def spaces(self) -> tuple[Any, Any, int]:
        """Observation space, action space, and width of the masks (0: the envs have none)."""
        masked = self.model.collector.source_of(self.env).masked
        return self.env.observation_space, self.env.action_space, mask_width(self.env.action_space) if masked else 0

    def reset(self, seed: int | None) -> Any:
        """Begin new episodes in all envs; returns their observations. `seed`: of the first env, if it is not None."""
        if seed is not None:
            self.env.seed(seed)
        self.model._setup_learn(1, self.recorder)  # as SB3's `learn` begins
        self.recorder.init_callback(self.model)
        return self.model._last_obs

    def close(self) -> None:
        self.env.close()

    def collect(self, weights: Any, settings: Any, noise: Any, steps: int, masked: bool, begun: int) -> Part:
        """Collect `steps` vector steps with these weights.

        Args:
            settings: the learner's `EngineSettings`.
            noise: random numbers (T, n, K) for the actions, or a seed for an engine that draws its own.
            begun: env steps of the training so far, for messages.
        """
        from fasttrain.algos.ppo import collect

        began, model = time.perf_counter(), self.model
        model.policy.load_state_dict(weights)
        if model.engine.settings != settings:
            self._use_engine(settings, settings.kind == "kernels")
        if isinstance(noise, int):
            torch.manual_seed(noise)
        else:
            model.engine_now().given = noise
        model.num_timesteps = begun
        collect(model, self.env, self.recorder, steps, masked)
        storage, recorder = model.rollout_buffer.storage, self.recorder
        left_out = np.zeros(storage.rewards.shape, np.bool_) if storage._left_out is None else storage._left_out
        return Part(
            {name: getattr(storage, name) for name in STORED}, storage.rewards, np.stack(recorder.rewards),
            storage.episode_starts, left_out, np.stack(recorder.dones), recorder.ends, model._last_obs,
            time.perf_counter() - began,
        )  # fmt: skip


class ActorVecEnv(SlotVecEnv):
    """The learner's view of all actors' envs. It gives whole rollouts (`fill`) and cannot make single steps.

    Raises:
        ConfigError: Ray is missing, the cluster cannot be reached, or it has too few cores.
        EnvError: the envs cannot be built.
    """

    actor: Any = Actor

    def __init__(self, config: Config, num_envs: int) -> None:
        if config.vec_env not in ("dummy", "native", "shared"):
            raise ConfigError(f"cluster=ray with vec_env={config.vec_env}: use vec_env=dummy, shared or native")
        self.config, self.actors = config, list[Any]()
        self.sizes = [len(part) for part in np.array_split(np.arange(num_envs), config.cluster.actors)]
        self.firsts = np.cumsum([0, *self.sizes[:-1]]).tolist()
        self.restarts, self.longest_s, self.lost_steps = 0, 0.0, 0
        self.lost_at = list[float]()
        self.ray = connected(config)
        try:
            self.actors = [self._start(number) for number in range(len(self.sizes))]
            seen, actions, width = self._answer(0, self.actors[0].spaces.remote())
        except BaseException:
            self.close()
            raise
        self.slots = empty_slots(seen, actions, num_envs, width)
        super().__init__(num_envs, seen, actions)

    def _start(self, number: int) -> Any:
        size, seed = self.sizes[number], self.config.seed + self.firsts[number] + STRIDE * self.restarts
        cluster: Any = type(self.config.cluster)()
        own = dataclasses.replace(self.config, num_envs=size, device="cpu", cluster=cluster)
        if isinstance(own.workers, int):
            own = dataclasses.replace(own, workers=max(1, min(size, own.workers // len(self.sizes))))
        remote = self.ray.remote(num_cpus=1, max_restarts=0)(self.actor)
        return remote.remote(own, seed % 2**31, [os.getcwd(), *filter(None, sys.path)])

    def _answer(self, number: int, asked: Any) -> Any:
        """The answer of an actor that starts. Raises FastTrainError: it failed."""
        limit_s = max(START_S, self.config.env.step_timeout_s * self.sizes[number])
        try:
            return self.ray.get(asked, timeout=limit_s)
        except self.ray.exceptions.GetTimeoutError as error:
            why = "the cluster has no free core, or building them takes longer"
            raise EnvError(f"{self._name(number)} did not start its envs within {limit_s:.0f} s: {why}") from error
        except self.ray.exceptions.RayError as error:
            raise self._cause(number, error) from error

    def reset(self) -> VecEnvObs:
        asked = [actor.reset.remote(self._seeds[at]) for actor, at in zip(self.actors, self.firsts, strict=True)]
        parts = [self._answer(number, reply) for number, reply in enumerate(asked)]
        self._reset_seeds()
        observations: VecEnvObs = _joined(parts, 0)
        return observations

    def fill(self, model: Any, engine: Any, rollout: RolloutStorage, use_masking: bool, callback: BaseCallback) -> bool:
        """Let the actors collect the rollout, and call the callback for each step. False: it asked to stop."""
        clock, steps = model.collector.clock, rollout.num_steps
        clock.enter("env_step")
        weights = self.ray.put({name: part.cpu() for name, part in model.policy.state_dict().items()})
        settings = dataclasses.replace(engine.settings, threads=1, pin_memory=False)
        asked = [
            actor.collect.remote(
                weights, settings, self._noise(engine, number), steps, use_masking, model.num_timesteps
            )
            for number, actor in enumerate(self.actors)
        ]
        replies = [*self._replies(asked, steps)]
        parts = [
            reply if isinstance(reply, Part) else self._replaced(number, reply, rollout)
            for number, reply in enumerate(replies)
        ]
        clock.enter("buffer")
        for name in STORED:
            if parts[0].stored[name] is not None:
                rollout.assign(name, _joined([part.stored[name] for part in parts], 1))
        rollout.rewards[...] = _joined([part.rewards for part in parts], 1)
        rollout.episode_starts[...] = _joined([part.episode_starts for part in parts], 1)
        if (left_out := _joined([part.left_out for part in parts], 1)).any():
            rollout.leave_out(slice(None), left_out)
        rollout.complete()
        model._last_obs = _joined([part.last for part in parts], 0)
        stepped = sum(size for size, reply in zip(self.sizes, replies, strict=True) if isinstance(reply, Part))
        return self._report(model, callback, stepped, parts)

    def _noise(self, engine: Any, number: int) -> Any:
        """The random numbers of an actor: a part of those of the learner's engine, or a seed."""
        if (drawn := getattr(engine, "noise", None)) is None:
            return int(torch.randint(2**31, ()))
        return np.ascontiguousarray(drawn[:, self._rows(number)])

    def _rows(self, number: int) -> slice:
        return slice(self.firsts[number], self.firsts[number] + self.sizes[number])

    def _name(self, number: int) -> str:
        first = self.firsts[number]
        return f"actor {number} (envs {first} to {first + self.sizes[number] - 1})"

    def _replies(self, asked: list[Any], steps: int) -> Iterator[Any]:
        """Each actor's part, or why it was lost."""
        began, errors, step_s = time.monotonic(), self.ray.exceptions, self.config.env.step_timeout_s
        for number, reply in enumerate(asked):
            longest_s = step_s + SLOW * self.longest_s if self.longest_s else step_s * steps
            try:
                part = self.ray.get(reply, timeout=max(0.1, began + longest_s - time.monotonic()))
            except errors.GetTimeoutError:
                yield f"did not answer within {time.monotonic() - began:.0f} s (see env.step_timeout_s)"
            except errors.RayTaskError as error:  # an error of the env or of fasttrain
                raise self._cause(number, error) from error
            except errors.RayError as error:
                yield f"ended: {type(error).__name__}"
            else:
                self.longest_s = max(self.longest_s, part.seconds)
                yield part

    def renewed(self, number: int, why: str, steps: int) -> Any:
        """Replace an actor that was lost with `steps` vector steps. Returns the first observations of the new envs."""
        now = time.monotonic()
        self.lost_at = [at for at in self.lost_at if at > now - WITHIN_S] + [now]
        if len(self.lost_at) > MOST_LOST:
            raise EnvError(f"{len(self.lost_at)} actors were lost in ten minutes; the last: {self._name(number)} {why}")
        self.ray.kill(self.actors[number])
        self.restarts, self.lost_steps = self.restarts + 1, self.lost_steps + steps * self.sizes[number]
        self.actors[number] = self._start(number)
        warnings.warn(f"{self._name(number)} {why}; its rollout is lost, and a new actor continues", stacklevel=2)
        return self._answer(number, self.actors[number].reset.remote(None))

    def _replaced(self, number: int, why: str, rollout: RolloutStorage) -> Part:
        """Replace a lost actor. Returns a part without transitions, with the first observations of the new envs."""
        steps, size = rollout.num_steps, self.sizes[number]
        stored = {
            name: each_array(
                lambda whole: np.ones((steps, size, *whole.shape[2:]), whole.dtype), getattr(rollout, name)
            )
            for name in STORED
        }
        nothing, every = np.zeros((steps, size), np.float32), np.ones((steps, size), np.bool_)
        return Part(stored, nothing, nothing, nothing + 1, every, ~every, [], self.renewed(number, why, steps), 0.0)

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

    def call_envs(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], indices: VecEnvIndices) -> list[Any]:
        raise EnvError(f"cluster=ray: the envs are in actors, so {name!r} cannot be called")

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        if attr_name == "render_mode":  # SB3's constructor asks every env for it
            return [None] * len(self.env_indices(indices))
        raise AttributeError(f"the envs of cluster=ray are in actors: {attr_name!r} cannot be read")

    def set_attr(self, attr_name: str, value: object, indices: VecEnvIndices = None) -> None:
        raise EnvError(f"cluster=ray: the envs are in actors, so {attr_name!r} cannot be set")

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


def env_of(config: Config, num_envs: int) -> ActorVecEnv:
    """The learner's view of the actors' envs, as the algorithm and the schedule need it."""
    own = "continuous" if config.schedule == "continuous" else "replay" if config.algo.spec.off_policy else ""
    return import_module(f".ray_{own}", __package__).VEC_ENV(config, num_envs) if own else ActorVecEnv(config, num_envs)


def _joined(parts: Sequence[Any], axis: int) -> Any:
    """The arrays of all actors, or their dicts of arrays, as one."""
    return each_array(lambda *own: np.concatenate(own, axis), *parts)


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
    for name, usual in ENVIRONMENT.items():
        os.environ.setdefault(name, usual)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(own.address, logging_level="error", log_to_driver=False, **more)
    except Exception as error:  # RuntimeError of another version, ValueError of an address
        reason = str(error).strip().partition("\n")[0]
        if isinstance(error, ConnectionError) and address == "auto":
            reason = "no Ray cluster runs on this machine; start one with `ray start --head`, or remove cluster.address"
        raise ConfigError(f"cluster.address={own.address}: {type(error).__name__}: {reason}") from error
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)  # Ray's would end the training at once
    if own.actors > (cores := int(ray.cluster_resources().get("CPU", 0))):
        ray.shutdown()
        raise ConfigError(f"cluster.actors={own.actors}: the cluster has {cores} cores, and each actor uses one")
    return ray
