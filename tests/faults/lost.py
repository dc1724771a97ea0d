"""Campaigns about what is left: after errors in late steps, and where something else is begun in the same folder."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path

from campaigns import FOREVER, QUIET, Result, Say, resumed
from injector import Nursery, Training, steps_of, unread
from stable_baselines3.common.save_util import load_from_zip_file
from wired import GO, Wire

from fasttrain.saving.checkpoints import CheckpointFolder
from resume_cases import SHARED, assert_equal

HORIZON = 3000
LATE = (*QUIET, "env.entry_point=late:LateEnv", "env.kwargs.wire=wire", "fused_update=off", "num_envs=4")
PPO = ("algo.rollout_size=64", "batch_size=32", "algo.n_epochs=1", f"total_timesteps={HORIZON}")
DQN = ("algo=dqn", "algo.prioritized=true", "algo.buffer_size=5000", "warmup_steps=32", "batch_size=16",
       "updates_per_step=1", "prefetch=off", f"total_timesteps={HORIZON}")  # fmt: skip
NATIVE = (*QUIET, "fused_update=off", "num_envs=8")
LATE_ERRORS: Mapping[str, tuple[str, ...]] = {
    "PPO, dummy": (*LATE, "algo=ppo", *PPO, "vec_env=dummy"),
    "MaskablePPO, shared": (*LATE, *PPO, *SHARED),
    "DQN, dummy": (*LATE, *DQN, "vec_env=dummy"),
    "MaskablePPO, native": (*NATIVE, *PPO),
    "PPO, shared": (*LATE, "algo=ppo", *PPO, *SHARED),
    "MaskablePPO, dummy": (*LATE, *PPO, "vec_env=dummy"),
    "DQN, shared": (*LATE, *DQN, *SHARED),
    "DQN, native": (*NATIVE, *DQN),
}
NEVER = 10**9


def late_errors(count: int, seed: int, folder: Path, say: Say, lent: Nursery | None = None) -> Result:
    """An env (around a native game a callback) raises at a random late step of a run that asked for no checkpoints.

    Model and checkpoint must be there, whole, and the message name the command that goes on; that must come to the bits
    of a run without the error.
    """
    result: Result = {"errors": 0, "left": 0, "resumed": 0, "equal": 0, "lost_steps": 0, "combinations": {}, "bad": []}
    rng, names = random.Random(seed), list(LATE_ERRORS)
    wholes: dict[str, Training] = {}
    with Nursery.lent(lent) as nursery:
        for number in range(count):
            name = names[number % len(names)]
            if name not in wholes:
                wholes[name] = _late(nursery, folder / f"whole{len(wholes)}", name, NEVER)
                wholes[name].end()
            place = folder / f"late{number}"
            if _error(nursery, place, name, rng.randrange(300, HORIZON - 300), wholes[name], result):
                shutil.rmtree(place)
            if (number + 1) % 10 == 0:
                say(f"{number + 1} of {count} errors, {result['resumed']} resumed")
    return result


def _late(nursery: Nursery, place: Path, name: str, at: int) -> Training:
    place.mkdir(parents=True)
    Wire(place / "wire")
    if name.endswith("native"):
        return Training(nursery, place, LATE_ERRORS[name], fail_at=at)
    return Training(nursery, place, [*LATE_ERRORS[name], f"env.kwargs.at={at}"])


def _error(nursery: Nursery, place: Path, name: str, at: int, whole: Training, result: Result) -> bool:
    """Whether all was well."""
    training = _late(nursery, place, name, at)
    code, said, run = training.end(), training.said(), training.run
    newest = CheckpointFolder(run / "checkpoints").newest().folder
    status, steps = _summary(run)
    left = code == 1 and status == "crashed" and "the board fell" in said
    left = left and f"fasttrain resume run={run} goes on" in said
    left = left and newest is not None and not unread(newest) and _is_model(run / "model.zip")
    again = Training(nursery, place, resumed())
    goes_on = again.end() == 0 and "going on from" in again.said() and "warning" not in again.said()
    why = f"exit codes {code}, {again.code}: {said[-1500:]} then {again.said()[-1500:]}"
    try:
        assert_equal(run, whole.run, told=True)
        equal = True
    except (AssertionError, OSError, LookupError) as error:
        equal, why = False, f"{error}; {why}"
    row = result["combinations"].setdefault(name, {"errors": 0, "well": 0})
    for counted, good in (("left", left), ("resumed", goes_on), ("equal", equal)):
        result[counted] += good
    result["errors"] += 1
    row["errors"] += 1
    row["well"] += left and goes_on and equal
    if newest is not None:
        result["lost_steps"] = max(result["lost_steps"], steps - steps_of(newest))
    if not (left and goes_on and equal):
        result["bad"].append(f"{name}, at {at}: {why}")
    return left and goes_on and equal


def _summary(run: Path) -> tuple[str, int]:
    try:
        found = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "", 0
    return str(found.get("status")), int(found.get("env_steps", 0))


def _is_model(path: Path) -> bool:
    try:
        return bool(load_from_zip_file(path, device="cpu")[1])
    except Exception:
        return False


# --- folders that hold something

HELD = ("finished", "crashed", "running", "sweep", "study")
NEW: Mapping[str, tuple[str, ...]] = {  # what is begun there
    "the same": (*LATE_ERRORS["PPO, dummy"], f"env.kwargs.at={NEVER}"),
    "another seed": (*LATE_ERRORS["PPO, dummy"], f"env.kwargs.at={NEVER}", "seed=6"),
    "another game": ("+profile=speed", "env.id=CartPole-v1", "algo=ppo", "hydra.run.dir=run"),
    "a sweep": ("-m", "+profile=speed", "num_envs=4,8", "hydra.sweep.dir=run"),
    "a comparison": ("compare", "candidates=[baseline,speed]", "hydra.run.dir=run"),
    "tuning": ("tune", "+profile=speed", "hydra.run.dir=run"),
    "a look at an env": ("check", "env.id=CartPole-v1", "hydra.run.dir=run"),
    "an evaluation": ("eval", "run=run", "hydra.run.dir=run"),
}


def overwrites(count: int, seed: int, folder: Path, say: Say, lent: Nursery | None = None) -> Result:
    """Something is begun in a folder that holds something: it must be refused with one line, and nothing be changed."""
    result: Result = {"folders": 0, "refused": 0, "written_over": 0, "kinds": {}, "bad": []}
    rng = random.Random(seed)
    with Nursery.lent(lent) as nursery:
        done = {
            kind: _late(nursery, folder / kind, "PPO, dummy", at)
            for kind, at in (("finished", NEVER), ("crashed", 900))
        }
        codes = {kind: training.end() for kind, training in done.items()}
        if codes != {"finished": 0, "crashed": 1}:
            result["bad"].append(f"exit codes {codes}")
        for number in range(count):
            kind, name = HELD[number % len(HELD)], rng.choice(list(NEW))
            place = folder / f"held{number}"
            place.mkdir()
            running = _fill(nursery, place, kind, done)
            before = contents(place / "run", kind == "running")
            new = Training(nursery, place, NEW[name])
            code, said = new.end(), new.said()
            same = contents(place / "run", kind == "running") == before
            one = code == 2 and said.count("\n") == 1 and ("take another folder" in said)
            result["folders"] += 1
            result["refused"] += one
            result["written_over"] += not same
            result["kinds"][kind] = result["kinds"].get(kind, 0) + 1
            if not (one and same):
                result["bad"].append(f"{name} where a {kind} one lies: exit code {code}: {said[-1500:]}")
            if running is not None:
                running.send(signal.SIGKILL, group=True)
                running.end()
            shutil.rmtree(place)
            if (number + 1) % 10 == 0:
                say(f"{number + 1} of {count} folders, {result['written_over']} written over")
    return result


def _fill(nursery: Nursery, place: Path, kind: str, done: Mapping[str, Training]) -> Training | None:
    """What lies in the folder; the training that is at work there."""
    run = place / "run"
    wire = Wire(place / "wire")
    if kind == "running":
        arguments = [*LATE_ERRORS["PPO, dummy"], f"env.kwargs.at={NEVER}", FOREVER]
        training = Training(nursery, place, arguments)
        training.until("train", lambda: wire.steps > 200)
        return training
    if kind in done:
        shutil.copytree(done[kind].run, run)
        return None
    cells, file = (run / "0", "sweep.json") if kind == "sweep" else (run / "cells" / "a_seed0_abcdef", "study.json")
    shutil.copytree(done["finished"].run, cells)
    (run / file).write_text(json.dumps({"schema": 1, "command": "compare", "arguments": [], "cells": []}))
    wire.order(GO)
    return None


def contents(run: Path, grows: bool) -> dict[str, str]:
    """Every file and its sum; of a run at work, which writes itself, those that it writes once."""
    names = ("plan.json", ".hydra/config.yaml", ".hydra/overrides.yaml", ".hydra/hydra.yaml")
    files = [run / name for name in names] if grows else [path for path in run.rglob("*") if path.is_file()]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
