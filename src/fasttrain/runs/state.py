"""The state of a run between an update and the next rollout, written to a `Snapshot` and restored from one.

A snapshot holds everything that influences the rest of the training, so that a resumed run equals one that was never
interrupted (tests/parity/test_resume_parity.py). The model is built from plan.json; only numbers come from a
checkpoint. `raise_crash` saves a run that an error ended.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import re
import time
import zipfile
from collections import deque
from collections.abc import Container, Mapping, Sequence
from dataclasses import astuple
from typing import Any, NoReturn, cast

import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.vec_env import VecEnv

from fasttrain import __version__
from fasttrain.algos.continuous import settle
from fasttrain.algos.self_play import SnapshotPool
from fasttrain.batch import with_prefix, without_prefix
from fasttrain.buffers.hindsight import NO_EPISODE
from fasttrain.envs.user_code import blame
from fasttrain.errors import ConfigError, CrashedError, DivergedError, EnvError, FastTrainError, too_little_memory
from fasttrain.runs.curriculum import set_tasks
from fasttrain.runs.folders import how_to_continue
from fasttrain.runs.parts import Course, Interval, Parts
from fasttrain.runs.progress import LearningCurve, Moments, Progress
from fasttrain.runs.stopping import Block, Stopping
from fasttrain.saving.checkpointing import zip_writer
from fasttrain.saving.checkpoints import Snapshot
from fasttrain.saving.env_state import NewEpisodes, env_state, load_env_state, load_random_state, plain, random_state
from fasttrain.saving.files import SUMMARY_SCHEMA, read_json, write_json
from fasttrain.saving.model_state import end_last_rows, load_model_state, model_state
from fasttrain.spec.checks import BATCHED
from fasttrain.spec.config import Config
from fasttrain.spec.plain import to_dict
from fasttrain.vec.stock import WORKER_ERRORS, place_of, why_worker_ended

COUNTED = ("env_steps", "updates", "episodes")
RECENT = ("returns", "wins", "draws", "score_diffs")
BY_NAME = ("reward_terms", "scores")  # fields of Progress that are dicts: name → deque


def progress_state(progress: Progress) -> dict[str, Any]:
    """Counters, values of the last thousand episodes, and the learning curve."""
    return {
        **{name: getattr(progress, name) for name in (*COUNTED, "ticks")},
        "wall_s": time.perf_counter() - progress.started,
        **{name: plain(list(getattr(progress, name))) for name in RECENT},
        **{named: plain({k: list(v) for k, v in getattr(progress, named).items()}) for named in BY_NAME},
        "curve": curve_state(progress.curve),
    }


def load_progress(progress: Progress, state: Mapping[str, Any]) -> None:
    for name in COUNTED:
        setattr(progress, name, int(state[name]))
    progress.ticks = float(state.get("ticks", 0))
    progress.before_s = float(state["wall_s"])
    progress.started = time.perf_counter() - progress.before_s
    for name in RECENT:
        getattr(progress, name).extend(state[name])
    for named in BY_NAME:
        for name, values in state.get(named, {}).items():
            getattr(progress, named)[name] = deque(values, maxlen=1000)
    load_curve(progress.curve, state["curve"])


def curve_state(curve: LearningCurve) -> dict[str, Any]:
    """For each interval of the learning curve: its index, number of episodes, and sums of their returns and times."""
    rows = [[each.index, each.episodes, each.returns, each.wall_s] for each in curve._stretches]
    return {"total": curve._total, "stretches": plain(rows)}


def load_curve(curve: LearningCurve, state: Mapping[str, Any]) -> None:
    """Restore a learning curve. If `total_timesteps` has grown, several stored intervals become one interval."""
    total = int(state["total"])
    for index, episodes, returns, wall_s in state["stretches"]:
        curve.add_stretch(int(index) * total // curve._total, int(episodes), float(returns), float(wall_s))


def stopping_state(stopping: Stopping) -> dict[str, Any]:
    """What a checkpoint stores of the stopping rules: the last returns, and the plateau rule's blocks of returns."""
    recent, plateau = plain(list(stopping._recent)), stopping._plateau
    if plateau is None:
        return {"recent": recent, "plateau": None}
    blocks = [[block.begin, block.end, *plain(astuple(block.returns))] for block in plateau._blocks]
    found = plateau.found and [[block is each for block in plateau._blocks].index(True) for each in plateau.found]
    own = {"begin": plateau._begin, "open": plain(astuple(plateau._open)), "blocks": blocks, "found": found}
    return {"recent": recent, "plateau": own}


def load_stopping(stopping: Stopping, state: Mapping[str, Any]) -> None:
    """Restore the stopping rules. A rule that the stored run did not have starts empty."""
    stopping._recent.extend(state["recent"])
    plateau, stored = stopping._plateau, state["plateau"]
    if plateau is None or stored is None:
        return
    plateau._begin, plateau._open = int(stored["begin"]), Moments(*stored["open"])
    plateau._blocks = [Block(int(begin), int(end), Moments(*rest)) for begin, end, *rest in stored["blocks"]]
    if stored["found"] is not None:
        before, now = stored["found"]
        plateau.found = plateau._blocks[before], plateau._blocks[now]


DUE = ("log", "evaluate", "checkpoint", "film")


def course_state(course: Course, takes_snapshots: bool) -> dict[str, Any]:
    """What a checkpoint stores of the training loop: when each interval is due next, and the loop's counters."""
    intervals = {name: getattr(course, name) for name in DUE}
    return {
        "intervals": {name: [each.every, each.following] for name, each in intervals.items()},
        "logged_updates": course.logged_updates,
        "enemy_turn_ms": float(course.enemy_turn_ms),
        "next_snapshot": course.snapshot.following if takes_snapshots else None,
    }


def load_course(course: Course, state: Mapping[str, Any], progress: Progress) -> None:
    """Restore the intervals of logs, checkpoints and so on. One whose length was changed starts at the present step."""
    for name in DUE:
        interval: Interval = getattr(course, name)
        every, following = state["intervals"].get(name, (None, 0))  # None: an older version wrote the checkpoint
        if every == interval.every:
            interval.following = int(following)
        else:
            interval.due(progress.updates if name == "log" else progress.env_steps)
    course.logged_updates = int(state["logged_updates"])
    course.enemy_turn_ms = float(state["enemy_turn_ms"])
    if state["next_snapshot"] is not None:
        course.snapshot.following = int(state["next_snapshot"])


def stateful_noise(model: BaseAlgorithm) -> list[Any]:
    """The action noise objects that have a state (Ornstein-Uhlenbeck), one per env."""
    noise = getattr(model, "action_noise", None)
    return [one for one in getattr(noise, "noises", [noise]) if hasattr(one, "noise_prev")]


SEED_STRIDE = 1_000_003  # added to the seeds of envs at each resume, so that envs do not repeat their episodes
OTHER_RUN = "another env or algorithm"
# Errors caused by wrong values in a checkpoint, or by an array with a wrong checksum.
WRONG = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError, zipfile.BadZipFile)


def is_retraced(config: Config) -> bool:
    """Whether the run's envs are wrapped in `Retrace`, which can replay an episode after a resume."""
    return config.env.backend == "gymnasium" and config.vec_env not in BATCHED


def snapshot(run: Parts, broken: bool = False) -> Snapshot:
    """The snapshot of a run between two rollouts. `broken`: an error ended a rollout; states of envs are left out."""
    model, normalizer = run.model, run.model.get_vec_normalize_env()
    if not broken:
        settle(model)
    found: dict[str, Any] = {}
    arrays: dict[str, NDArray[Any]] = {}
    parts = {
        "model": model_state(model),
        "envs": env_state(cast(VecEnv, model.env), is_retraced(run.config), broken),
        "random": random_state(),
        **({} if run.pool is None else {"pool": _pool_state(run.pool)}),
    }
    if run.curriculum is not None:
        found["curriculum"] = run.curriculum.state()
    if run.phases is not None:
        found["phases"] = plain(run.phases.to_dict())
    for name, (state, named) in parts.items():
        found[name] = state
        arrays |= with_prefix(name, named)
    found |= {
        "version": __version__,
        "env_steps": int(model.num_timesteps),
        "of": identity(run.config),
        "run": {
            "progress": progress_state(run.progress),
            "stopping": stopping_state(run.stopping),
            "callback": course_state(run.course, run.pool is not None),
            "noise": [plain(noise.noise_prev) for noise in stateful_noise(model)],
            "best_reward": None if run.evaluator.best_reward == float("-inf") else float(run.evaluator.best_reward),
            "evaluations": plain(run.evaluator.log.rows),
            "episodes_file": run.episodes.position(),
            "resumed_at": run.resumed_at,
        },
    }
    statistics = None if normalizer is None else pickle.dumps(normalizer)
    return Snapshot(int(model.num_timesteps), found, arrays, zip_writer(model), statistics)


LEARNED_BY = ("env", "algo", "seed", "opponent", "self_play", "curriculum", "policies", "num_envs", "batch_size",
              "updates_per_step", "warmup_steps", "action_repeat")  # fmt: skip


def identity(config: Config) -> dict[str, Any]:
    """The identity of a run: env, algorithm and digests of the settings that must not change when it continues."""
    chosen = {name: to_dict(getattr(config, name)) for name in LEARNED_BY}
    settings = {f"{name}.{key}": value for name in ("env", "algo") for key, value in chosen.pop(name).items()} | chosen
    texts = {key: json.dumps(value, sort_keys=True).encode() for key, value in settings.items()}
    digests = {key: hashlib.sha256(text).hexdigest()[:16] for key, text in texts.items()}
    return {"algo": config.algo.name, "env": config.env.id or config.env.entry_point, "num_envs": config.num_envs,
            "settings": digests}  # fmt: skip


def check_identity(stored: object, config: Config, changed: Container[str] = ()) -> None:
    """Raises ConfigError for a checkpoint of another run. Settings that only one of the runs has, and settings that
    were `changed`, are not compared.
    """
    stored, own = stored if isinstance(stored, dict) else {}, identity(config)
    known, settings = stored.get("settings", {}), own.pop("settings")
    if any(stored.get(key) != value for key, value in own.items()):
        told = {key: stored.get(key) for key in own}
        raise ConfigError(f"the checkpoint is of {OTHER_RUN}: {told}, not {own}")
    if differ := sorted(key for key in {*known} & {*settings} if known[key] != settings[key] and key not in changed):
        raise ConfigError(f"the checkpoint is of another run: it was trained with another {', '.join(differ)}")


def restore(
    run: Parts, state: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]], changed: Container[str] = ()
) -> tuple[list[int], dict[int, list[str]]]:
    """Restore a new run from a checkpoint. `changed`: keys of settings that may differ from the checkpoint's.

    Returns the envs that begin a new episode, and env → names of its attributes that could not be restored. Raises
    ConfigError if the checkpoint does not fit.
    """
    check_identity(state.get("of"), run.config, changed)
    try:
        return _restore(run, state, arrays)
    except WRONG as error:
        raise ConfigError(f"this version cannot read the checkpoint: {type(error).__name__} {error}") from error


def _restore(
    run: Parts, state: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]
) -> tuple[list[int], dict[int, list[str]]]:
    model, own, lost = run.model, state["run"], dict[int, list[str]]()
    if run.pool is not None:
        _load_pool(run.pool, state["pool"], without_prefix(arrays, "pool"))
    if run.curriculum is not None:  # the unfinished episodes are played again with their tasks
        run.curriculum.load(state["curriculum"])
        set_tasks(run.env, run.curriculum.present)
    if run.phases is not None:
        run.phases.load(state.get("phases", {}))
    other_seed = (run.config.seed + SEED_STRIDE * (1 + len(own["resumed_at"]))) % 2**31
    begun = load_env_state(
        cast(VecEnv, model.env),
        state["envs"],
        without_prefix(arrays, "envs"),
        other_seed,
        is_retraced(run.config),
        lost,
    )
    load_model_state(model, state["model"], without_prefix(arrays, "model"))
    rows = [] if begun is None else begun.rows
    noise = [np.array(was, np.float64).reshape(model.action_space.shape) for was in own.get("noise", ())]
    run.course.noise = [None if row in rows else was for row, was in enumerate(noise)]
    if begun is not None:
        start_episodes(model, begun)
    load_progress(run.progress, own["progress"])
    load_stopping(run.stopping, own["stopping"])
    load_course(run.course, own["callback"], run.progress)
    run.evaluator.best_reward = float("-inf") if own["best_reward"] is None else float(own["best_reward"])
    run.resumed_at = [*own["resumed_at"], int(model.num_timesteps)]
    load_random_state(state["random"], without_prefix(arrays, "random"))
    return rows, lost


def start_episodes(model: Any, begun: NewEpisodes) -> None:
    """Where a new episode began, replace the model's last observation, and end the replay buffer's old episode."""
    rows = begun.rows
    for name, fresh in (("_last_obs", begun.observations), ("_last_original_obs", begun.original)):
        known = getattr(model, name, None)
        if isinstance(known, dict):
            for key, part in known.items():
                part[rows] = fresh[key][rows]
        elif known is not None:
            known[rows] = fresh[rows]
    model._last_episode_starts[rows] = True
    source = getattr(getattr(model, "collector", None), "source", None)
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
    return {"state": plain(plainly), "positions": pool.positions()}, arrays | with_prefix(
        "memory", pool.memory_arrays()
    )


def _load_pool(pool: SnapshotPool, stored: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
    device, names = pool.model.device, set(pool.current.weights)

    def whole(each: Mapping[str, Any]) -> dict[str, Any]:
        found = without_prefix(arrays, str(int(each["number"])))
        if set(found) != names:
            raise ConfigError("the checkpoint's opponents are of another network")
        return {**each, "weights": {name: torch.from_numpy(np.array(found[name])).to(device) for name in found}}

    state = stored["state"]
    filled = {**state, "current": whole(state["current"]), "pool": [whole(each) for each in state["pool"]]}
    pool.resume(filled, stored["positions"])
    pool.load_memory(without_prefix(arrays, "memory"))


MODEL, LAST_GOOD = "model.zip", "last_good.zip"


def raise_crash(run: Parts, error: BaseException, overrides: Sequence[str]) -> NoReturn:
    """Save a run that an error ended. Raises CrashedError, or the error itself if there was no update yet."""
    told = error
    if isinstance(error, SystemExit):
        who = place_of(error) or "an env or a callback "
        told = EnvError(f"{who}called sys.exit({error.code!r}): let it raise an error that says why")
    elif isinstance(error, WORKER_ERRORS) and run.config.vec_env == "subproc":
        told = why_worker_ended(run.env)
    elif isinstance(error, RuntimeError) and "before the end of the first episode" in str(error):  # SB3's hindsight
        told = ConfigError(NO_EPISODE)
    told.__cause__ = error if told is not error else told.__cause__
    summary = run.folder / "summary.json"
    before = read_json(summary)
    content = {"schema": SUMMARY_SCHEMA, "version": __version__, "status": "crashed", "error": repr(told),
               "env_steps": run.progress.env_steps, "seed": run.config.seed, "overrides": list(overrides),
               **({"resumed_at": run.resumed_at} if run.resumed_at else {})}  # fmt: skip
    run.episodes.flush()
    trained = run.progress.updates > 0 or isinstance(error, DivergedError)  # DivergedError: good weights are restored
    missing = _save(run, told) if trained else ""
    with run.saving.of(summary.name):
        write_json(summary, content)
    if not trained:
        raise told
    text = f"{_what(told, run.progress.env_steps)}\n{missing}{how_to_continue(run.folder)}"
    crash = CrashedError(text + (f"; {AGAIN}" if _is_again(before, content) else ""))
    crash.exit_code = getattr(told, "exit_code", crash.exit_code)
    raise crash from told


AGAIN = "the same error came at the same step before the run was resumed; it will come again until its cause is mended"


def _save(run: Parts, error: BaseException) -> str:
    """Write checkpoint and model. Returns a text about what could not be written."""
    run.checkpoints.after_error(lambda: snapshot(run, broken=True))
    for name in (MODEL, *([LAST_GOOD] if isinstance(error, DivergedError) else [])):
        with run.saving.of(name):
            run.save(run.folder / name)
    missing = run.saving.missing()
    if run.checkpoints.failed:
        missing.append(f"the newest checkpoint ({run.checkpoints.failed})")
    return f"not saved: {'; '.join(missing)}; " if missing else ""


def _what(error: BaseException, env_steps: int) -> str:
    """The error's text with the env and step where it happened; errors of fasttrain name their place themselves."""
    if isinstance(error, FastTrainError):
        return str(error)
    told = too_little_memory(error) if isinstance(error, MemoryError) else blame(error)
    return f"{place_of(error)}after {env_steps:,} env steps: {told}"


def _is_again(before: dict[str, Any], now: dict[str, Any]) -> bool:
    """Whether the run crashed with the same error at the same step before. Memory addresses in messages are ignored."""
    one, other = (re.sub(r"0x[0-9a-f]+", "", str(content.get("error"))) for content in (before, now))
    crashed = before.get("status") == "crashed" and bool(now.get("resumed_at"))
    return crashed and one == other and before.get("env_steps") == now["env_steps"]
