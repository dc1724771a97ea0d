"""A run between an update and the next rollout, as a `Snapshot`, and back into a run of the same configuration.

Everything that decides what comes next is in it, so that a resumed run equals one that was never interrupted
(tests/parity/test_resume_parity.py). The model is built anew from plan.json; only numbers are read from a checkpoint.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fasttrain import __version__
from fasttrain.algos.model_state import load_model_state, model_state
from fasttrain.algos.random_state import load_random_state, plain, random_state
from fasttrain.algos.snapshots import SnapshotPool
from fasttrain.batch import inside, under
from fasttrain.buffers.replay_state import end_last_rows
from fasttrain.config import Config
from fasttrain.errors import ConfigError
from fasttrain.runs.checkpoint_format import Snapshot, zip_writer
from fasttrain.runs.run_state import (
    callback_state,
    load_callback,
    load_progress,
    load_stopping,
    progress_state,
    stopping_state,
)
from fasttrain.vec.env_state import NewEpisodes, env_state, load_env_state

SEED_STRIDE = 1_000_003  # between the seeds of an env and of the one after a resume, which must not play the same again
OTHER_RUN = "another env or algorithm"
# What reading values of a wrong kind or number ends in, and an array whose checksum is not its own.
WRONG = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError, zipfile.BadZipFile)


def traced(config: Config) -> bool:
    """Whether envs of this run wear `Retrace`."""
    return config.env.backend == "gymnasium" and config.vec_env != "native"


def snapshot(run: Any, broken: bool = False) -> Snapshot:
    """Of a `train.Run` at rest. `broken`: an error ended a rollout; where envs are is not asked any more."""
    model, normalizer = run.model, run.model.get_vec_normalize_env()
    found: dict[str, Any] = {}
    arrays: dict[str, NDArray[Any]] = {}
    parts = {
        "model": model_state(model),
        "envs": env_state(model.env, traced(run.config), broken),
        "random": random_state(),
    }
    if run.pool is not None:
        parts["pool"] = _pool_state(run.pool)
    for name, (state, named) in parts.items():
        found[name] = state
        arrays |= under(name, named)
    found |= {
        "version": __version__,
        "env_steps": int(model.num_timesteps),
        "of": identity(run.config),
        "run": {
            "progress": progress_state(run.progress),
            "stopping": stopping_state(run.stopping),
            "callback": callback_state(run.callback, run.snapshots),
            "best_reward": None if run.evaluator.best_reward == float("-inf") else float(run.evaluator.best_reward),
            "evaluations": plain(run.evaluator.log.rows),
            "episodes_file": run.callback.parts.episodes.position(),
            "resumed_at": run.resumed_at,
            "engine_switch_at": run.plan.config.engine_switch_at,
        },
    }
    statistics = None if normalizer is None else pickle.dumps(normalizer)
    return Snapshot(int(model.num_timesteps), found, arrays, zip_writer(model), statistics)


def identity(config: Config) -> dict[str, Any]:
    """What a checkpoint must agree on with the run that goes on from it."""
    return {"algo": config.algo.name, "env": config.env.id or config.env.entry_point, "num_envs": config.num_envs}


def restore(run: Any, state: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> list[int]:
    """Put a fresh `train.Run` where the other one was; the envs that begin a new episode.

    Raises:
        ConfigError: the checkpoint is of another run, or something in it does not fit this one.
    """
    if state.get("of") != identity(run.config):
        raise ConfigError(f"the checkpoint is of {OTHER_RUN}: {state.get('of')}, not {identity(run.config)}")
    try:
        return _restore(run, state, arrays)
    except WRONG as error:
        raise ConfigError(f"the checkpoint is not one of this version: {type(error).__name__} {error}") from error


def _restore(run: Any, state: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> list[int]:
    model, own = run.model, state["run"]
    if run.pool is not None:
        _load_pool(run.pool, state["pool"], inside(arrays, "pool"))
    other_seed = (run.config.seed + SEED_STRIDE * (1 + len(own["resumed_at"]))) % 2**31
    begun = load_env_state(model.env, state["envs"], inside(arrays, "envs"), other_seed, traced(run.config))
    load_model_state(model, state["model"], inside(arrays, "model"))
    if begun is not None:
        _begin(model, begun)
    load_progress(run.progress, own["progress"])
    load_stopping(run.stopping, own["stopping"])
    load_callback(run.callback, run.snapshots, own["callback"], run.progress)
    run.evaluator.best_reward = float("-inf") if own["best_reward"] is None else float(own["best_reward"])
    run.resumed_at = [*own["resumed_at"], int(model.num_timesteps)]
    load_random_state(state["random"], inside(arrays, "random"))
    return [] if begun is None else begun.rows


def _begin(model: Any, begun: NewEpisodes) -> None:
    """New episodes of some envs, where the stored observations are of those that broke off."""
    rows = begun.rows
    for name, fresh in (("_last_obs", begun.observations), ("_last_original_obs", begun.original)):
        known = getattr(model, name, None)
        if isinstance(known, dict):
            for key, part in known.items():
                part[rows] = fresh[key][rows]
        elif known is not None:
            known[rows] = fresh[rows]
    model._last_episode_starts[rows] = True
    source = getattr(getattr(model, "_fast", None), "source", None)
    for name in ("_returns", "_lengths"):
        if isinstance(counted := getattr(source, name, None), np.ndarray):
            counted[rows] = 0
    if getattr(model, "replay_buffer", None) is not None:
        end_last_rows(model.replay_buffer, rows)


def _pool_state(pool: SnapshotPool) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    state = pool.state()
    arrays: dict[str, NDArray[Any]] = {}
    plainly = {**state, "pool": [dict(each) for each in state["pool"]], "current": dict(state["current"])}
    for each in (plainly["current"], *plainly["pool"]):
        arrays |= {f"{each['number']}/{name}": tensor.cpu().numpy() for name, tensor in each.pop("weights").items()}
    return {"state": plain(plainly), "positions": pool.positions()}, arrays


def _load_pool(pool: SnapshotPool, stored: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
    device, names = pool.model.device, set(pool.current.weights)

    def whole(each: Mapping[str, Any]) -> dict[str, Any]:
        found = inside(arrays, str(int(each["number"])))
        if set(found) != names:
            raise ConfigError("the checkpoint's opponents are of another network")
        return {**each, "weights": {name: torch.from_numpy(np.array(found[name])).to(device) for name in found}}

    state = stored["state"]
    filled = {**state, "current": whole(state["current"]), "pool": [whole(each) for each in state["pool"]]}
    pool.resume(filled, stored["positions"])
