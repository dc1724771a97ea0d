"""What is left of a run that an error ended: the newest state to go on from, the model, and what to do next."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NoReturn

from stable_baselines3.common.vec_env import DummyVecEnv

from fasttrain import __version__
from fasttrain.envs.retrace import Retrace
from fasttrain.envs.user_code import blame
from fasttrain.errors import CrashedError, DivergedError, EnvError, FastTrainError, too_little_memory
from fasttrain.runs.folders import way_on
from fasttrain.runs.state import snapshot
from fasttrain.saving.files import SUMMARY_SCHEMA, read_json, write_json

MODEL, LAST_GOOD = "model.zip", "last_good.zip"
WORKER_ERRORS = (EOFError, BrokenPipeError, ConnectionResetError)  # what SB3 raises when a worker process is gone


def raise_crash(run: Any, error: BaseException, overrides: Sequence[str]) -> NoReturn:
    """Save what there is of a `train.Run`, then raise.

    Raises:
        CrashedError: past the first update; says where it happened, what was saved, and the command that goes on.
        BaseException: `error` before that, when there is nothing to go on from.
    """
    told = error
    if isinstance(error, WORKER_ERRORS) and run.config.vec_env == "subproc":
        told = EnvError("a worker process died; what it said stands above")
        told.__cause__ = error
    summary = run.folder / "summary.json"
    before = read_json(summary)
    content = {"schema": SUMMARY_SCHEMA, "version": __version__, "status": "crashed", "error": repr(told),
               "env_steps": run.progress.env_steps, "seed": run.config.seed, "overrides": list(overrides),
               **({"resumed_at": run.resumed_at} if run.resumed_at else {})}  # fmt: skip
    run.callback.parts.episodes.flush()
    trained = run.progress.updates > 0 or isinstance(error, DivergedError)  # which leaves its last good weights
    missing = _save(run, told) if trained else ""
    with run.saving.of(summary.name):
        write_json(summary, content)
    if not trained:
        raise told
    text = f"{_what(told, run.progress.env_steps)}\n{missing}{way_on(run.folder)}"
    raise CrashedError(text + (f"; {AGAIN}" if _is_again(before, content) else "")) from told


AGAIN = "it is the same error at the same place as before it was resumed, and will be again until that is repaired"


def _save(run: Any, error: BaseException) -> str:
    """Write checkpoint and model; what could not be written."""
    run.checkpoints.broke_off(lambda: snapshot(run, broken=True))
    for name in (MODEL, *([LAST_GOOD] if isinstance(error, DivergedError) else [])):
        with run.saving.of(name):
            run.save(run.folder / name)
    missing = run.saving.missing()
    if run.checkpoints.failed:
        missing.append(f"the newest checkpoint ({run.checkpoints.failed})")
    return f"not saved: {'; '.join(missing)}; " if missing else ""


def _what(error: BaseException, env_steps: int) -> str:
    """Errors of our own name their place."""
    if isinstance(error, FastTrainError):
        return str(error)
    told = too_little_memory(error) if isinstance(error, MemoryError) else blame(error)
    return f"{place_of(error)}after {env_steps:,} env steps: {told}"


def _is_again(before: dict[str, Any], now: dict[str, Any]) -> bool:
    """Whether the run crashed here before; addresses in messages are of one process."""
    if before.get("status") != "crashed" or not now.get("resumed_at"):
        return False
    one, other = (re.sub(r"0x[0-9a-f]+", "", str(content.get("error"))) for content in (before, now))
    return one == other and before.get("env_steps") == now["env_steps"]


def place_of(error: BaseException) -> str:
    """`env 3, step 12 of its episode, `, as far as the traceback knows."""
    places, trace = [], error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        itself = frame.f_locals.get("self")
        if isinstance(itself, DummyVecEnv) and "env_idx" in frame.f_locals:
            index = frame.f_locals["env_idx"]
            places.append(f"env {index}")
            if isinstance(env := itself.envs[index], Retrace):
                places.append(f"step {env.steps_begun} of its episode" if env.steps_begun else "its reset")
        trace = trace.tb_next
    return "".join(f"{place}, " for place in places)
