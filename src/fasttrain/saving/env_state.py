"""The state of a training's envs and random streams as plain values and named arrays, and how it is restored.

The state of a native game consists of arrays. Other envs are retraced (`envs/retrace.py`): their actions are repeated,
and an env whose observation then differs begins a new episode. Wrappers around the vector env are restored.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecFrameStack, VecNormalize, VecTransposeImage
from stable_baselines3.common.vec_env.base_vec_env import VecEnvWrapper

from fasttrain.batch import each_array, load_into, with_prefix, without_prefix
from fasttrain.envs.user_code import preserve_random_state
from fasttrain.errors import ConfigError
from fasttrain.vec.native import NativeVecEnv
from fasttrain.vec.self_play import SelfPlayVecEnv
from fasttrain.vec.shared import SharedMemoryVecEnv

Arrays = dict[str, NDArray[Any]]
State = dict[str, Any]
NATIVE, TRACED, OPAQUE = "native", "traced", "opaque"

RETRACE_S = 60.0  # time limit for repeating the episode of one env


class NewEpisodes(NamedTuple):
    """Envs (`rows`) that begin a new episode."""

    rows: list[int]
    observations: Any  # (N, ...) as the policy gets them; only `rows` are valid
    original: Any  # observations before VecNormalize


def env_state(env: VecEnv, traced: bool, broken: bool = False) -> tuple[State, Arrays]:
    """The state of the envs between two steps. The arrays are views.

    Args:
        traced: whether Python envs are in a `Retrace` wrapper.
        broken: whether envs may be dead or in the middle of a step. Then only the wrappers' states are returned.
    """
    state, arrays, base = State(), _wrapper_arrays(env), env.unwrapped
    for layer in _layers(env):
        if isinstance(layer, VecNormalize):
            arrays |= with_prefix("normalize", {name: np.asarray(part) for name, part in moments(layer).items()})
    if isinstance(base, SelfPlayVecEnv):
        arrays |= with_prefix("self_play", _own_arrays(base))
        base = base.inner
    if broken:
        state["kind"] = OPAQUE
    elif isinstance(base, NativeVecEnv) and _is_resumable(base):
        state["kind"] = NATIVE
        arrays |= _native_arrays(base) | with_prefix("game", base.game.state_arrays())  # type: ignore[attr-defined]
    elif traced and not isinstance(base, NativeVecEnv) and getattr(base, "fill", None) is None:
        state["kind"] = TRACED
        state["envs"] = [_note(index, notes, arrays) for index, notes in enumerate(base.env_method("retrace_notes"))]
        if isinstance(base, SharedMemoryVecEnv):
            arrays |= with_prefix("shared", {"returns": base._returns, "lengths": base._lengths})
    else:
        state["kind"] = OPAQUE
    return state, arrays


def load_env_state(
    env: VecEnv,
    state: Mapping[str, Any],
    arrays: Mapping[str, NDArray[Any]],
    other_seed: int,
    traced: bool,
    lost: dict[int, list[str]] | None = None,
) -> NewEpisodes | None:
    """Restore the state in new envs of the same configuration; None if every env was restored.

    Args:
        other_seed: env i begins a new episode with this seed + i if it cannot be restored.
        lost: receives for each env index the names of attributes that outlive an episode and were not restored.

    Raises:
        ConfigError: an array is missing or does not fit.
    """
    for name, array in _wrapper_arrays(env).items():
        load_into(array, arrays, name)
    for layer in _layers(env):
        if isinstance(layer, VecNormalize):
            load_moments(layer, without_prefix(arrays, "normalize"))
    outer = env.unwrapped
    base = outer.inner if isinstance(outer, SelfPlayVecEnv) else outer
    kind = state["kind"]
    if kind == NATIVE and isinstance(base, NativeVecEnv) and _is_resumable(base):
        _load_native(base, arrays)
        begun = None
    else:
        outer.seed(other_seed)
        fresh = outer.reset()
        begun = list(range(env.num_envs)), fresh
        if kind == TRACED and traced:
            begun = _retraced(outer, base, state["envs"], arrays, other_seed, {} if lost is None else lost)
    if isinstance(outer, SelfPlayVecEnv) and begun is None:
        for name, array in _own_arrays(outer).items():
            load_into(array, without_prefix(arrays, "self_play"), name)
        outer.slots.finished = []
        outer._share_state()
    return None if begun is None or not begun[0] else lifted(env, *begun)


# --- the state of each kind of env


def _load_native(base: NativeVecEnv, arrays: Mapping[str, NDArray[Any]]) -> None:
    game: Any = base.game
    for name, array in _native_arrays(base).items():
        load_into(array, arrays, name)
    game.load_state_arrays(without_prefix(arrays, "game"))
    base.slots.finished = []
    base._reset_seeds()


def _retraced(
    outer: VecEnv,
    base: VecEnv,
    notes: Sequence[Any],
    arrays: Mapping[str, NDArray[Any]],
    other_seed: int,
    lost: dict[int, list[str]],
) -> tuple[list[int], Any] | None:
    """The envs that begin a new episode, and the observations of all envs; None if no env begins one."""
    if len(notes) != base.num_envs:
        raise ConfigError(f"the checkpoint has {len(notes)} envs, this run {base.num_envs}")
    answers, most_s = [], RETRACE_S
    if isinstance(base, SharedMemoryVecEnv):
        most_s = min(RETRACE_S, base.crew.options.step_timeout_s / 2)  # after step_timeout_s a worker counts as hung
    for index, note in enumerate(notes):
        whole = _whole(note, without_prefix(arrays, f"envs/{index}"))
        answers += base.env_method("retrace", whole, other_seed + index, most_s, indices=[index])
    anew = [index for index, answer in enumerate(answers) if not answer["same"]]
    lost |= {index: answer["lost"] for index, answer in enumerate(answers) if answer["lost"]}
    if anew and isinstance(outer, SelfPlayVecEnv):  # all envs begin anew, because the opponent may have to act first
        outer.seed(other_seed)
        return list(range(base.num_envs)), outer.reset()
    seen = each_array(lambda *rows: np.stack(rows), *[answer["observation"] for answer in answers])
    if isinstance(base, DummyVecEnv):
        for index, answer in enumerate(answers):
            base._save_obs(index, answer["observation"])
    if isinstance(base, SharedMemoryVecEnv):
        _load_shared(base, seen, [answer["mask"] for answer in answers], arrays, anew)
    return (anew, seen) if anew else None


def _load_shared(
    base: SharedMemoryVecEnv, seen: object, masks: list[Any], arrays: Mapping[str, NDArray[Any]], anew: list[int]
) -> None:
    """Write observations, masks and counters, because workers do not write them while they retrace."""
    slots = base.slots
    for key, part in seen.items() if isinstance(seen, dict) else [("", seen)]:
        place = slots.observations[key] if isinstance(slots.observations, dict) else slots.observations
        place[...] = part
    if slots.action_masks is not None and all(mask is not None for mask in masks):
        slots.action_masks[...] = np.stack([np.asarray(mask).reshape(-1) for mask in masks])
    for name, target in (("returns", base._returns), ("lengths", base._lengths)):
        load_into(target, arrays, f"shared/{name}")
        target[anew] = 0


def _is_resumable(base: NativeVecEnv) -> bool:
    return hasattr(base.game, "state_arrays") and hasattr(base.game, "load_state_arrays")


def _native_arrays(env: NativeVecEnv) -> Arrays:
    slots, seen = env.slots, env.slots.observations
    names = ("actions", "rewards", "terminations", "truncations", "action_masks")
    arrays = {name: getattr(slots, name) for name in names if getattr(slots, name) is not None}
    arrays |= with_prefix("observations", seen) if isinstance(seen, dict) else {"observations": seen}
    tasks = {"native/tasks": env.tasks} if env.tasks.any() else {}
    return {"native/returns": env._returns, "native/lengths": env._lengths, **tasks, **with_prefix("slots", arrays)}


def _own_arrays(env: SelfPlayVecEnv) -> Arrays:
    slots = env.slots  # turns are not stored: a state is saved only at the learner's turn
    return {"returns": env._returns, "lengths": env._lengths, "next_rewards": env._next_rewards,
            "rewards": slots.rewards, "terminations": slots.terminations, "truncations": slots.truncations}  # fmt: skip


# --- the records of `Retrace`


def _note(index: int, notes: Mapping[str, Any] | None, arrays: Arrays) -> State | None:
    if notes is None:
        return None
    seen, prefix = notes["observation"], f"envs/{index}"
    arrays[f"{prefix}/actions"] = notes["actions"]
    parts = with_prefix("observation", seen) if isinstance(seen, Mapping) else {"observation": seen}
    arrays |= with_prefix(prefix, {name: np.array(part) for name, part in parts.items()})
    return {name: notes[name] for name in ("seed", "begin", "now", "total", "kept")}


def _whole(note: Mapping[str, Any] | None, arrays: Mapping[str, NDArray[Any]]) -> State | None:
    if note is None:
        return None
    seen: Any = arrays.get("observation")
    if seen is None:  # a Dict space: read its arrays here, because workers cannot read this process's open file
        seen = {name: np.array(array) for name, array in without_prefix(arrays, "observation").items()}
    return {**note, "actions": arrays["actions"], "observation": seen}


# --- wrappers around the vector env


def _layers(env: VecEnv) -> Iterator[VecEnvWrapper]:
    """The wrappers, the outermost first."""
    while isinstance(env, VecEnvWrapper):
        yield env
        env = env.venv


def _wrapper_arrays(env: VecEnv) -> Arrays:
    """The arrays that wrappers change in place."""
    arrays: Arrays = {}
    for layer in _layers(env):
        if isinstance(layer, VecNormalize):
            arrays["normalize/returns"] = layer.returns
        elif isinstance(layer, VecFrameStack):
            arrays |= with_prefix("stack", dict(_frames(layer.stacked_obs)))
    return arrays


def lifted(env: VecEnv, rows: list[int], observations: Any) -> NewEpisodes:
    """The first observations of the envs `rows`, changed by the wrappers as after a reset."""
    original = observations
    for layer in reversed(list(_layers(env))):
        if isinstance(layer, VecFrameStack):
            fresh = copy.deepcopy(layer.stacked_obs)
            observations = fresh.reset(observations)
            for (_, frames), (_, first) in zip(_frames(layer.stacked_obs), _frames(fresh), strict=True):
                frames[rows] = first[rows]
        elif isinstance(layer, VecTransposeImage):
            observations = layer.transpose_observations(observations)
        elif isinstance(layer, VecNormalize):
            layer.returns[rows] = 0.0
            original, observations = observations, layer.normalize_obs(observations)
            continue
        original = observations
    return NewEpisodes(rows, observations, original)


def _frames(stacked: Any) -> Iterator[tuple[str, NDArray[Any]]]:
    """SB3's stacked frames by name; one array for each key of a Dict space."""
    parts = getattr(stacked, "sub_stacked_observations", None)
    if parts is None:
        yield "frames", stacked.stacked_obs
    else:
        for key, part in parts.items():
            yield key, part.stacked_obs


def _running(layer: VecNormalize) -> Iterator[tuple[str, Any]]:
    """SB3's objects with running means, by name."""
    yield "rewards", layer.ret_rms
    seen: Any = getattr(layer, "obs_rms", None)
    if isinstance(seen, Mapping):
        yield from ((f"observations/{key}", part) for key, part in seen.items())
    elif seen is not None:
        yield "observations", seen


def moments(layer: VecNormalize) -> dict[str, Any]:
    """SB3's running mean, variance and count of rewards and observations, by name."""
    return {f"{name}.{part}": getattr(rms, part) for name, rms in _running(layer) for part in ("mean", "var", "count")}


def load_moments(layer: VecNormalize, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Load `moments` into a wrapper. Raises ConfigError if they are not finite or do not fit."""
    for name, rms in _running(layer):
        for part in ("mean", "var", "count"):
            array = np.zeros(np.shape(getattr(rms, part)))
            load_into(array, arrays, f"{name}.{part}")
            if not np.isfinite(array).all() or (part != "mean" and (array < 0).any()):
                raise ConfigError(f"{name}.{part} of the statistics of env.normalize is negative or not finite")
            setattr(rms, part, float(array) if part == "count" else array if array.ndim else array[()])


# --- random streams: Python's, NumPy's and torch's


def random_state() -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """The present state of this process's random streams. The arrays are copies."""
    version, words, gauss = random.getstate()
    kind, key, position, has_gauss, cached = np.random.get_state()
    state: dict[str, Any] = {
        "python": {"version": version, "gauss": gauss},
        "numpy": {"kind": kind, "position": int(position), "has_gauss": int(has_gauss), "cached": float(cached)},
        "cuda_devices": torch.cuda.device_count(),
    }
    arrays: dict[str, NDArray[Any]] = {
        "python": np.array(words, np.int64),
        "numpy": np.array(key, np.uint32),
        "torch": torch.get_rng_state().numpy(),
    }
    for device in range(torch.cuda.device_count()):
        arrays[f"cuda{device}"] = torch.cuda.get_rng_state(device).numpy()
    return state, arrays


def load_random_state(state: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
    """Restore the random streams. A wrong state raises one of the errors in `runs.state.WRONG`."""
    words, key = np.zeros(625, np.int64), np.zeros(624, np.uint32)
    now = torch.get_rng_state().numpy()
    for target, name in ((words, "python"), (key, "numpy"), (now, "torch")):
        load_into(target, arrays, name)
    python, numpy = state["python"], state["numpy"]
    random.setstate((int(python["version"]), tuple(words.tolist()), python["gauss"]))
    cached = int(numpy["has_gauss"]), float(numpy["cached"])
    np.random.set_state((str(numpy["kind"]), key, int(numpy["position"]), *cached))
    torch.set_rng_state(torch.from_numpy(now))
    for device in range(min(int(state["cuda_devices"]), torch.cuda.device_count())):
        torch.cuda.set_rng_state(torch.from_numpy(np.array(arrays[f"cuda{device}"])), device)


def plain(value: object) -> Any:
    """The value with Python's numbers in place of NumPy's, and lists in place of arrays and tuples."""
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value


@contextmanager
def own_random_state(seed: int) -> Iterator[None]:
    """Seed the global streams of Python, NumPy and torch inside the block, and restore them after it."""
    with preserve_random_state(), torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        yield
