"""An SB3 model as plain values and named arrays, and how these are loaded into a new model of the same configuration.

The state includes what SB3's zip lacks: the last observations, counters, the action space's random stream, the replay
buffer and the engine's counters. Nothing is pickled.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Dict
from numpy.typing import NDArray
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.save_util import recursive_getattr

from fasttrain.algos.engine import Engine
from fasttrain.batch import load_into, with_prefix, without_prefix
from fasttrain.buffers.hindsight import HindsightStorage
from fasttrain.buffers.n_step import NONE, end_window
from fasttrain.buffers.prioritized import PrioritizedReplayBuffer
from fasttrain.buffers.replay_storage import ReplayStorage
from fasttrain.buffers.sum_tree import set_kernel
from fasttrain.errors import ConfigError
from fasttrain.saving.env_state import Arrays, State, plain
from fasttrain.vec.base import SlotAdapter

COUNTERS = (
    "num_timesteps", "_total_timesteps", "_episode_num", "_n_updates", "_n_calls", "_current_progress_remaining",
    "exploration_rate", "learning_rate_scale",
)  # fmt: skip
OPTIMIZER = "policy.optimizer"  # most algorithms have only this optimizer
SHARED = "shared"  # used in place of a parameter's number for optimizer state that belongs to all parameters
SEEN = ("_last_obs", "_last_original_obs", "_last_episode_starts")


def model_state(model: BaseAlgorithm) -> tuple[State, Arrays]:
    """The state of a model between an update and the next rollout. Arrays in host memory are views."""
    engine = getattr(model, "engine", None)
    state: State = {
        "counters": {name: plain(getattr(model, name)) for name in COUNTERS if hasattr(model, name)},
        "episodes": [plain(episode) for episode in model.ep_info_buffer or ()],
        "successes": [bool(success) for success in model.ep_success_buffer or ()],
        "action_space": plain(model.action_space.np_random.bit_generator.state),
        "log": _log_state(model.logger),
    }
    arrays: Arrays = {f"policy/{name}": _host(tensor) for name, tensor in model.policy.state_dict().items()}
    names, tensor_names = model._get_torch_save_params()
    more = [name for name in names if name.endswith("optimizer") and name != OPTIMIZER]
    if OPTIMIZER in names:
        state["policy"] = _add_optimizer(arrays, "policy_optimizer", model.policy.optimizer)
    state["optimizers"] = {name: _add_optimizer(arrays, name, recursive_getattr(model, name)) for name in more}
    arrays |= {f"tensors/{name}": _host(recursive_getattr(model, name)) for name in tensor_names}
    for name in SEEN:
        seen = getattr(model, name, None)
        parts = with_prefix(name, seen) if isinstance(seen, Mapping) else {name: seen}
        arrays |= {place: np.asarray(part) for place, part in parts.items() if part is not None}
    if isinstance(engine, Engine):
        engine_state, engine_arrays = engine.state()
        state |= engine_state
        arrays |= engine_arrays
        collector: Any = getattr(model, "collector", None)
        if isinstance(source := collector.source, SlotAdapter):
            arrays |= {"source/returns": source._returns, "source/lengths": source._lengths}
    if (lstm := getattr(model, "_last_lstm_states", None)) is not None:
        arrays |= {name: _host(tensor) for name, tensor in _lstm_tensors(lstm).items()}
    if (reuse := getattr(model, "reuse", None)) is not None:
        state["reuse"], stored = reuse.state()
        arrays |= with_prefix("reuse", stored)
    if isinstance(buffer := getattr(model, "replay_buffer", None), ReplayBuffer):
        state["replay"], stored = replay_state(buffer)
        arrays |= with_prefix("replay", stored)
    return state, arrays


def load_model_state(model: BaseAlgorithm, state: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
    """Load the state into a new model with env and logger. Raises ConfigError if the state does not fit the model."""
    for name, value in state["counters"].items():
        if name not in COUNTERS or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ConfigError(f"the checkpoint's counter {name}={value!r}: unknown to this version or no finite number")
        setattr(model, name, value)
    model.ep_info_buffer = deque(state["episodes"], maxlen=model._stats_window_size)
    model.ep_success_buffer = deque(state["successes"], maxlen=model._stats_window_size)
    model.action_space.np_random.bit_generator.state = dict(state["action_space"])
    _load_log(model.logger, state["log"])
    names, tensor_names = model._get_torch_save_params()
    _load_weights(without_prefix(arrays, "policy"), model.policy.state_dict())
    if OPTIMIZER in names:
        _load_optimizer(arrays, "policy_optimizer", model.policy.optimizer, state["policy"])
    for name, stored in state.get("optimizers", {}).items():
        if name not in names:
            raise ConfigError(f"the checkpoint has an optimizer {name}, this run's algorithm has none of that name")
        _load_optimizer(arrays, name, recursive_getattr(model, name), stored)
    for name in tensor_names:
        _put(recursive_getattr(model, name), arrays[f"tensors/{name}"], name)
    for name in SEEN:
        if hasattr(model, name):
            setattr(model, name, _own_observations(model, arrays, name))
    if isinstance(engine := getattr(model, "engine", None), Engine):
        source = model.collector.source_of(model.env)  # type: ignore[attr-defined]
        if isinstance(source, SlotAdapter) and "source/returns" in arrays:
            load_into(source._returns, arrays, "source/returns")
            load_into(source._lengths, arrays, "source/lengths")
        engine.load(state, arrays, model)
    if (lstm := getattr(model, "_last_lstm_states", None)) is not None:
        for name, tensor in _lstm_tensors(lstm).items():
            _put(tensor, arrays[name], name)
    if (reuse := getattr(model, "reuse", None)) is not None:
        reuse.load(model, state["reuse"], without_prefix(arrays, "reuse"))
    if isinstance(buffer := getattr(model, "replay_buffer", None), ReplayBuffer):
        load_replay_state(buffer, state["replay"], without_prefix(arrays, "replay"))


# --- parameters


def _add_optimizer(arrays: Arrays, prefix: str, optimizer: torch.optim.Optimizer) -> State:
    """Add the optimizer's tensors to `arrays`; returns its settings and numbers."""
    numbers: dict[str, Any] = {}
    states = {str(index): optimizer.state.get(each, {}) for index, each in enumerate(_parameters(optimizer))}
    states[SHARED] = {name: value for name, value in optimizer.state.items() if isinstance(name, str)}
    for index, own in states.items():
        for name, value in own.items():
            if isinstance(value, torch.Tensor):
                arrays[f"{prefix}/{index}/{name}"] = _host(value)
            else:
                numbers[f"{index}/{name}"] = plain(value)
    groups = [
        {name: plain(value) for name, value in group.items() if name != "params" and _is_plain(value)}
        for group in optimizer.param_groups
    ]
    return {"groups": groups, "numbers": numbers}


def _load_weights(given: Mapping[str, NDArray[Any]], mine: Mapping[str, torch.Tensor]) -> None:
    """Load weights in place, because kernels and CUDA graphs have views of these tensors."""
    if other := sorted({*mine} ^ {*given}):
        raise ConfigError(f"the checkpoint is of another network: only one of the two has {', '.join(other[:3])}")
    for name, tensor in mine.items():
        _put(tensor, given[name], name)


def _load_optimizer(
    arrays: Mapping[str, NDArray[Any]], prefix: str, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
) -> None:
    if len(state["groups"]) != len(optimizer.param_groups):
        raise ConfigError("the checkpoint's optimizer has other groups of parameters than this run's")
    for group, stored in zip(optimizer.param_groups, state["groups"], strict=True):
        for name, value in stored.items():
            if name in group and name != "params":
                group[name] = tuple(value) if isinstance(group[name], tuple) else value
    owners: dict[str, Any] = {str(index): each for index, each in enumerate(_parameters(optimizer))} | {SHARED: None}
    for place, array in without_prefix(arrays, prefix).items():
        index, _, name = place.partition("/")
        _put_state(optimizer, owners[index], name, array)
    for place, value in state["numbers"].items():
        index, _, name = place.partition("/")
        (optimizer.state if index == SHARED else optimizer.state[owners[index]])[name] = value


def _put_state(optimizer: torch.optim.Optimizer, parameter: Any, name: str, array: NDArray[Any]) -> None:
    """Load the optimizer's state for a `parameter`; None: the state that belongs to all parameters."""
    state: Any = optimizer.state if parameter is None else optimizer.state[parameter]
    if isinstance(state.get(name), torch.Tensor):
        _put(state[name], array, name)
        return
    _check_finite(array, name)
    tensor = torch.from_numpy(np.array(array))
    if parameter is None:
        state[name] = tensor
        return
    # Adafactor has means of rows and columns, which have size 1 along one axis.
    sizes = list(zip(tensor.shape, parameter.shape, strict=False))
    if tensor.ndim and (tensor.ndim != parameter.ndim or any(size not in (1, own) for size, own in sizes)):
        raise ConfigError(f"the checkpoint's {name} has shape {tuple(tensor.shape)}, not {tuple(parameter.shape)}")
    state[name] = tensor if name == "step" else tensor.to(parameter.device)


@torch.no_grad()
def _put(target: torch.Tensor, array: NDArray[Any], name: str) -> None:
    if tuple(target.shape) != array.shape or target.dtype != torch.from_numpy(np.empty(0, array.dtype)).dtype:
        raise ConfigError(
            f"the checkpoint is of another network: {name} has shape {array.shape}, not {tuple(target.shape)}"
        )
    _check_finite(array, name)
    target.copy_(torch.from_numpy(np.array(array)))


def _check_finite(array: NDArray[Any], name: str) -> None:
    if array.dtype.kind in "fc" and not np.isfinite(array).all():
        raise ConfigError(f"the checkpoint's {name} has numbers that are not finite")


def _parameters(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _is_plain(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str, np.generic))


def _host(tensor: torch.Tensor) -> NDArray[Any]:
    array: NDArray[Any] = tensor.detach().cpu().numpy()
    return array


# --- observations, LSTM states and the log


def _own_observations(model: Any, arrays: Mapping[str, NDArray[Any]], name: str) -> object:
    """The stored observations `name` of all envs, or None. Raises ConfigError if their shapes are not the env's."""
    env, normalizer = model.env, model.get_vec_normalize_env()
    # Without VecNormalize the original observations are the last observations themselves.
    space = normalizer.venv.observation_space if name == "_last_original_obs" and normalizer else env.observation_space
    parts: Mapping[str, Any] = space.spaces if isinstance(space, Dict) else {"": space}
    shapes, kinds = {key: part.shape for key, part in parts.items()}, "biuf"
    if name == "_last_episode_starts":
        shapes, kinds = {"": ()}, "b"
    stored = {"": arrays[name]} if name in arrays else {**without_prefix(arrays, name)}
    if not stored:
        return None
    if set(stored) != set(shapes):
        raise ConfigError(f"the checkpoint's {name} has parts {sorted(stored)}, the env's {sorted(shapes)}")
    for key, shape in shapes.items():
        array, wanted = stored[key], (env.num_envs, *shape)
        if array.shape != wanted or array.dtype.kind not in kinds:
            what = f"{name} {key}".strip()
            raise ConfigError(f"the checkpoint's {what} is {array.dtype} {array.shape}, this run needs {wanted}")
    copies = {key: np.array(stored[key]) for key in shapes}
    return copies.get("", copies)


def _lstm_tensors(lstm: object) -> dict[str, torch.Tensor]:
    """RecurrentPPO's LSTM states between two steps, by name."""
    return {f"lstm/{part}/{i}": tensor for part in ("pi", "vf") for i, tensor in enumerate(getattr(lstm, part))}


def _log_state(logger: Logger) -> State:
    """The logger's recorded values that have not been written yet."""
    numbers = {key: value for key, value in logger.name_to_value.items() if isinstance(value, (int, float, np.number))}
    values = {key: float(value) for key, value in numbers.items() if math.isfinite(value)}
    return {
        "values": values,
        "counts": {key: int(logger.name_to_count[key]) for key in values if key in logger.name_to_count},
        "excluded": {key: list(logger.name_to_excluded.get(key) or ()) for key in values},
    }


def _load_log(logger: Logger, state: Mapping[str, Any]) -> None:
    for key, value in state["values"].items():
        logger.name_to_value[key] = float(value)
        logger.name_to_excluded[key] = tuple(state["excluded"].get(key, ()))
    for key, count in state["counts"].items():
        logger.name_to_count[key] = int(count)


# --- replay buffers, also SB3's own: the state has only the written rows, and only the leaves of a sum tree

_STORED = ("observations", "next_observations", "actions", "rewards", "dones", "timeouts", "next_masks")


def replay_state(buffer: ReplayBuffer) -> tuple[State, Arrays]:
    """Numbers and arrays of a replay buffer. The arrays are views of its written rows."""
    with _locked(buffer):
        rows = _rows(buffer, buffer.pos, buffer.full)
        state: State = {"pos": int(buffer.pos), "full": bool(buffer.full), "rows": rows}
        arrays = {name: array[:rows] for name, array in _arrays(buffer).items()}
        if isinstance(buffer, ReplayStorage):
            state["generation"] = buffer.generation
            if buffer.void is not None:
                arrays["void"], state["under_way"] = buffer.void[:rows], buffer.under_way.tolist()
            if buffer.frames is not None:
                arrays |= with_prefix("frames", buffer.frames.state())
        if isinstance(buffer, HindsightStorage):
            arrays |= {"ep_start": buffer.ep_start[:rows], "ep_length": buffer.ep_length[:rows]}
            arrays["under_way_steps"] = buffer.under_way_steps
        if isinstance(buffer, (PrioritizedReplayBuffer, HindsightStorage)):
            arrays["priorities"] = buffer.tree.nodes[: rows * buffer.n_envs]
        if isinstance(buffer, PrioritizedReplayBuffer):
            state |= {"highest": float(buffer._highest), "beta": float(buffer.beta)}
    return state, arrays


def load_replay_state(buffer: ReplayBuffer, state: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
    """Fill a new buffer with the same settings. Raises ConfigError if the state does not fit."""
    pos, full, rows = int(state["pos"]), bool(state["full"]), int(state["rows"])
    if not (0 <= pos < buffer.buffer_size and rows == _rows(buffer, pos, full)):
        raise ConfigError(
            f"the checkpoint's replay buffer has {rows:,} rows (the next is {pos:,}), this run's {buffer.buffer_size:,}"
        )
    with _locked(buffer):
        for name, array in _arrays(buffer).items():
            load_into(array[:rows], arrays, name)
        buffer.pos, buffer.full = pos, full
        if isinstance(buffer, ReplayStorage):
            buffer.generation = int(state["generation"])
            if "under_way" in state:
                buffer.void = np.zeros(buffer.rewards.shape, np.bool_)
                load_into(buffer.void[:rows], arrays, "void")
                buffer.under_way[:] = state["under_way"]
            if buffer.frames is not None:
                buffer.frames.load(without_prefix(arrays, "frames"))
        if isinstance(buffer, HindsightStorage):
            load_into(buffer.ep_start[:rows], arrays, "ep_start")
            load_into(buffer.ep_length[:rows], arrays, "ep_length")
            load_into(buffer.under_way_steps, arrays, "under_way_steps")
        if isinstance(buffer, (PrioritizedReplayBuffer, HindsightStorage)):
            tree, leaves = buffer.tree, np.zeros(rows * buffer.n_envs)
            load_into(leaves, arrays, "priorities")
            tree.clear()
            if set_kernel(tree.nodes, tree.starts, tree.capacity, np.arange(len(leaves), dtype=np.int64), leaves) >= 0:
                raise ConfigError("the checkpoint's priorities are not all finite and at least 0")
        if isinstance(buffer, PrioritizedReplayBuffer):
            buffer._highest, buffer.beta = float(state["highest"]), float(state["beta"])


def end_last_rows(buffer: ReplayBuffer, envs: list[int]) -> None:
    """End the n-step windows of these envs at the row written last: their episodes do not continue after this row."""
    if not isinstance(buffer, ReplayStorage) or not buffer.size():
        return
    with buffer.lock:
        row = (buffer.pos - 1) % buffer.buffer_size
        if isinstance(buffer, HindsightStorage):
            buffer.end_rows(envs)
        for env in envs:
            end_window(buffer, row, env)
            buffer.under_way[env] = NONE


def _rows(buffer: ReplayBuffer, pos: int, full: bool) -> int:
    """Number of rows with data; with `optimize_memory_usage` also the row that has the last row's next observations."""
    return buffer.buffer_size if full else min(pos + int(buffer.optimize_memory_usage), buffer.buffer_size)


def _locked(buffer: ReplayBuffer) -> Any:
    return buffer.lock if isinstance(buffer, ReplayStorage) else nullcontext()


def _arrays(buffer: ReplayBuffer) -> Arrays:
    arrays: Arrays = {}
    for name in _STORED:
        value = getattr(buffer, name, None)
        if isinstance(value, dict):
            arrays |= with_prefix(name, value)
        elif isinstance(value, np.ndarray):
            arrays[name] = value
    return arrays
