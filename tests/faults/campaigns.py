"""What fasttrain promises of runs that are killed, stopped, damaged or out of disk, tried so many times, and counted.

test_*.py try each kind a few times, test_in_full.py as often as docs/guides/checkpoints.md says. A campaign returns
figures, as JSON has them; `bad` are the broken promises in words, and must be empty.
"""

from __future__ import annotations

import errno
import io
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from bad_disk import HOWS, NEVER, NotingDisk, crashes, replay
from damage import damage
from injector import (
    Nursery,
    Training,
    instant,
    listed,
    partial,
    steps_of,
    temporary,
    unread,
    wait_for,
    writing,
)
from rich.console import Console
from wired import EXIT, LENGTH, RAISE, Wire

from fasttrain.errors import ConfigError
from fasttrain.runs.resume import newest_point
from fasttrain.saving.checkpoints import CheckpointFolder, Writer
from resume_cases import DQN, PPO, SHARED, assert_equal

Say = Callable[[str], None]
Result = dict[str, Any]
WIRED = ("env.entry_point=wired:WiredEnv", "env.kwargs.wire=wire", "vec_env=dummy", "num_envs=2", "fused_update=off")
QUIET = ("+profile=speed", "seed=5", "checkup=off", "report=false", "live=off", "eval.episodes=2",
         "algo.net_arch=[8]", "hydra.run.dir=run")  # fmt: skip
INTERVAL = 64
WIRED_PPO = (*QUIET, *WIRED, "algo.rollout_size=32", "batch_size=16", "algo.n_epochs=1", f"checkpoint_every={INTERVAL}")
WIRED_DQN = (*QUIET, *WIRED, "algo=dqn", "algo.prioritized=true", "algo.buffer_size=5000", "warmup_steps=32",
             "batch_size=16", "updates_per_step=1", "prefetch=off", f"checkpoint_every={INTERVAL}")  # fmt: skip
LANES: Mapping[str, tuple[str, ...]] = {  # of the kills
    "ppo": (*WIRED_PPO, "algo=ppo", "checkpoint_async=false"),
    "maskable_ppo": (*WIRED_PPO, "algo=maskable_ppo", "checkpoint_async=true"),
    "dqn": (*WIRED_DQN, "checkpoint_async=false"),
    "dqn beside": (*WIRED_DQN, "checkpoint_async=true"),
}
FOREVER = "total_timesteps=100000000"
WORKERS = (*QUIET, "env.entry_point=wired:WiredEnv", "env.kwargs.wire=wire", "algo=ppo", *SHARED, "num_envs=4",
           "fused_update=off", "algo.rollout_size=64", "batch_size=32", "algo.n_epochs=1", "checkpoint_every=128",
           "eval_every=256", FOREVER)  # fmt: skip
TOLD = ("log_every=1", "train_log_enabled=true", "train_log_to_console=true")
STOPPED: Mapping[str, tuple[str, ...]] = {  # what gets SIGTERM
    "ppo": (*LANES["ppo"], FOREVER, *TOLD),
    "dqn": (*LANES["dqn beside"], FOREVER, *TOLD),
    "workers": (*WORKERS, *TOLD),
    "skullking": (*QUIET, "fused_update=off", "num_envs=32", "algo.rollout_size=2048", "batch_size=512",
                  "checkpoint_every=0", FOREVER, *TOLD),
}  # fmt: skip
HORIZON = 3000


def resumed(run: str = "run") -> list[str]:
    """The command line that goes on."""
    return ["resume", f"run={run}"]


# --- kill -9


def kills(count: int, seed: int, folder: Path, say: Say, lent: Nursery | None = None) -> Result:
    """`kill -9` around the writing of checkpoints. Each resume is the next victim; a run that comes to its horizon is
    compared with one that was left alone.

    `kills` are those of a training that had a checkpoint to go on from; `resumes` those of them after which a start
    went on from it, whole. Further kills, of a resume that had not gone on yet and of a run without a checkpoint, are
    `while_starting` and `too_early`; what a start leaves that was killed must be resumed all the same.
    """
    result: Result = {"kills": 0, "resumes": 0, "while_writing": 0, "while_starting": 0, "too_early": 0, "runs": 0,
                      "equal": 0, "partial": 0, "lost": {"waiting": 0.0, "beside": 0.0}, "bad": []}  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    lanes = list(LANES)
    with Nursery.lent(lent) as nursery:
        for number, lane in enumerate(lanes):
            wanted = count * (number + 1) // len(lanes)
            of_lane = 0
            while result["kills"] < wanted:
                _chain(nursery, folder / f"{lane}{of_lane}".replace(" ", "_"), lane, wanted, seed, result)
                of_lane += 1
                say(f"{result['kills']} of {count} kills, {result['resumes']} resumes")
    return result


def _chain(nursery: Nursery, folder: Path, lane: str, wanted: int, seed: int, result: Result) -> None:
    """One run, from its start to its horizon."""
    folder.mkdir(parents=True)
    wire, arguments = Wire(folder / "wire"), [*LANES[lane], f"total_timesteps={HORIZON}"]
    training = Training(nursery, folder, arguments)
    expected: Path | None = None
    while result["kills"] < wanted:
        struck = result["kills"] + result["while_starting"] + result["too_early"]
        when = instant(f"{seed}/{lane}/{struck}")
        if expected is None and when.phase == "start":
            when = when._replace(phase="any")
        if not wait_for(training, when, set(listed(training.run / "checkpoints"))):
            break
        training.send(signal.SIGKILL)
        training.end()
        _look(training, expected, wire, lane, result)
        expected = CheckpointFolder(training.run / "checkpoints").newest().folder
        if expected is None:
            shutil.rmtree(training.run)
        wire.clear()
        training = Training(nursery, folder, arguments if expected is None else resumed())
    if training.end() != 0:
        result["bad"].append(f"{lane}: exit code {training.code}: {training.said()[-2000:]}")
        return
    if expected is not None:
        _went_on(training, expected, lane, result)
    result["runs"] += 1
    whole = folder / "whole"
    whole.mkdir()
    alone = Training(nursery, whole, arguments)
    alone.end()
    try:
        assert_equal(training.run, alone.run)
    except AssertionError as error:
        result["bad"].append(f"{lane}: killed and resumed it came to something else: {error}")
    else:
        result["equal"] += 1
        shutil.rmtree(folder)


MOST_LOST = {"waiting": 1.0, "beside": 2.0}  # intervals; beside training one more may be on its way to the disk


def _look(training: Training, begun_at: Path | None, wire: Wire, lane: str, result: Result) -> None:
    """What the victim had done, and what it left."""
    broken = partial(training.run)
    result["partial"] += len(broken)
    result["bad"] += [f"{lane}: {why}" for why in broken]
    if begun_at is not None:
        if "going on from" not in training.said():
            result["while_starting"] += 1
            return
        _went_on(training, begun_at, lane, result)
    newest = CheckpointFolder(training.run / "checkpoints").newest().folder
    if newest is None:
        result["too_early"] += 1
        return
    result["kills"] += 1
    result["while_writing"] += bool(writing(training))
    begun = 0 if begun_at is None else steps_of(begun_at)
    again = 2 * (begun // 2 % LENGTH)  # steps of unfinished episodes, which a resume repeats
    done = min(HORIZON, begun + wire.steps - again)
    kind = "beside" if "checkpoint_async=true" in LANES[lane] else "waiting"
    lost = (done - steps_of(newest)) / INTERVAL
    result["lost"][kind] = max(result["lost"][kind], lost)
    if lost > MOST_LOST[kind]:
        result["bad"].append(f"{lane}: {lost:.2f} intervals were lost after {newest.name}")


def _went_on(training: Training, begun_at: Path, lane: str, result: Result) -> None:
    """Whether it resumed from that checkpoint, whole as it was left by the kill before."""
    said = training.said()
    ended = "nothing is left to do" in said and steps_of(begun_at) >= HORIZON  # killed after its last checkpoint
    if (f"going on from {begun_at.name}:" in said or ended) and "warning" not in said:
        result["resumes"] += 1
    else:
        result["bad"].append(f"{lane}: did not simply go on from {begun_at.name}: {said[-2000:]}")


# --- damaged checkpoints


def corruptions(count: int, seed: int, folder: Path, say: Say, lent: Nursery | None = None) -> Result:
    """Damage to the newest checkpoint, or to the two newest; then what `resume` would go on from."""
    result: Result = {"damages": 0, "found": 0, "fell_back": 0, "said": 0, "whole_resumes": 0, "kinds": {}, "bad": []}
    rng = random.Random(seed)
    with Nursery.lent(lent) as nursery:
        wholes = [_finished(nursery, folder / lane, LANES[lane]) for lane in ("ppo", "dqn")]
        for number in range(count):
            whole = wholes[number % 2]
            run = folder / f"damaged{number}" / "run"
            shutil.copytree(whole, run)
            names = sorted(listed(run / "checkpoints"))
            depth = 1 + (rng.random() < 0.2)  # of three
            older = run / "checkpoints" / names[-1 - depth]
            done = {name: damage(run / "checkpoints" / name, older, rng) for name in names[-depth:]}
            for what in done.values():
                kind = what.rpartition(" ")[0]
                result["kinds"][kind] = result["kinds"].get(kind, 0) + 1
            result["damages"] += len(done)
            console = Console(file=io.StringIO(), width=500)
            try:
                with ExitStack() as files:
                    taken = newest_point(run, 3, files, console).folder
            except ConfigError as error:
                result["bad"].append(f"{done}: {error}")
                continue
            told = console.file.getvalue()  # type: ignore[attr-defined]
            result["found"] += sum(name > taken.name for name in done)
            result["said"] += sum(f"warning: {name}: " in told for name in done)
            result["fell_back"] += len(done) * (taken == older)
            if taken != older or any(f"warning: {name}: " not in told for name in done):
                result["bad"].append(f"{done}: {taken.name} was taken, said was {told!r}")
            if number % 50 == 0:
                again = Training(nursery, run.parent, [*resumed(), f"total_timesteps={steps_of(older) + 3 * INTERVAL}"])
                goes_on = again.end() == 0 and f"going on from {older.name}:" in again.said()
                result["whole_resumes"] += goes_on
                if not goes_on or "going back to an older checkpoint" not in again.said():
                    result["bad"].append(f"{done}: exit code {again.code}: {again.said()[-2000:]}")
                say(f"{number + 1} of {count} damages")
            shutil.rmtree(run.parent)
    return result


def _finished(nursery: Nursery, folder: Path, arguments: tuple[str, ...]) -> Path:
    """The folder of a small run that came to its end, with three checkpoints."""
    folder.mkdir(parents=True)
    training = Training(nursery, folder, [*arguments, f"total_timesteps={5 * INTERVAL}"])
    if training.end() != 0:
        training.hangs(f"end well ({training.code})")
    return training.run


# --- disks


def disks(count: int, seed: int, folder: Path, say: Say, lent: Nursery | None = None) -> Result:
    """A disk that is full, or fails, at every operation of a checkpoint and after many numbers of bytes of it.

    `count` is that of byte offsets; the operations are all.
    """
    result: Result = {"points": 0, "kept": 0, "went_on": 0, "written_later": 0, "said": 0, "full_to_the_end": 0,
                      "crashes": 0, "bad": []}  # fmt: skip
    rng = random.Random(seed)
    with Nursery.lent(lent) as nursery:
        whole = _finished(nursery, folder / "whole", LANES["ppo"])
        sizes = [sum(file.stat().st_size for file in path.iterdir()) for path in (whole / "checkpoints").iterdir()]
        operations = len(noted(folder / "noted"))
        plans: list[dict[str, Any]] = [
            {"at": operations + at, "how": how, "error": error}
            for at in range(1, operations + 1)
            for how in HOWS
            for error in (errno.ENOSPC, errno.EIO)
        ]
        offsets = [max(sizes) + rng.randrange(min(sizes)) for _ in range(count)]
        plans += [{"room": room, "error": errno.ENOSPC} for room in offsets]
        plans += [{"at": operations + 1, "times": NEVER}]  # and never works again
        for number, plan in enumerate(plans):
            on_bad_disk(nursery, folder / f"disk{number}", plan, result)
            if number % 10 == 0:
                say(f"{number + 1} of {len(plans)} points")
    result["crashes"], broken = power_cuts(folder / "power")
    result["bad"] += broken
    return result


def noted(folder: Path) -> list[Any]:
    """The operations of one checkpoint."""
    folder.mkdir(parents=True)
    disk = NotingDisk(folder)
    CheckpointFolder(folder, disk=disk).publish(1, PLAIN_FILES)
    return disk.log


PLAIN_FILES: dict[str, bytes | Writer] = {"state.json": b"{}", "arrays.npz": bytes(99), "model.zip": b"zip"}


def on_bad_disk(nursery: Nursery, folder: Path, plan: dict[str, Any], result: Result) -> None:
    """The second checkpoint of a run fails; with keep=1 an old one lost would be all lost."""
    folder.mkdir(parents=True)
    forever = plan.get("times") == NEVER
    arguments = [*LANES["ppo"], f"total_timesteps={4 * INTERVAL}", "checkpoint.keep=1"]
    training = Training(nursery, folder, arguments, disk=plan)
    code, said = training.end(), training.said()
    summary = _json(training.run / "summary.json")
    checkpoints = CheckpointFolder(training.run / "checkpoints")
    newest, problems = checkpoints.newest()
    went_on = code == 0 and summary.get("env_steps") == 4 * INTERVAL
    kept = newest is not None and not problems and not unread(newest)
    told = said.count("warning: the checkpoint of") == 1 and "could not be written (" in said
    later = newest is not None and steps_of(newest) == (INTERVAL if forever else 4 * INTERVAL)
    if forever:
        told = told and "warning: not saved for a resume: the checkpoint of 256 steps could not be written" in said
        result["full_to_the_end"] += went_on and kept and told and later
    result["points"] += 1
    result["went_on"] += went_on
    result["kept"] += kept
    result["written_later"] += later
    result["said"] += told
    if not (went_on and kept and told and later) or temporary(training.run):
        left = f"{listed(training.run / 'checkpoints')}, {temporary(training.run)}"
        result["bad"].append(f"{plan}: exit code {code}, left {left}: {said[-1500:]}")
    else:
        shutil.rmtree(folder)


def power_cuts(folder: Path) -> tuple[int, list[str]]:
    """Everything that a crash may leave of the writing of a checkpoint: how many, and what was no checkpoint then."""
    states, bad = 0, []
    new: dict[str, bytes | Writer] = {**PLAIN_FILES, "model.zip": b"newer"}
    folder.mkdir(parents=True, exist_ok=True)
    disk = NotingDisk(folder / "log")
    CheckpointFolder(disk.root).publish(1, PLAIN_FILES)
    CheckpointFolder(disk.root, keep=1, disk=disk).publish(2, new)
    renamed = next(at for at, operation in enumerate(disk.log) if operation.kind == "rename")
    for survived in crashes(disk.log):
        states += 1
        root = folder / f"state{states}"
        CheckpointFolder(root).publish(1, PLAIN_FILES)
        replay(survived, root)
        newest, problems = CheckpointFolder(root).newest()
        content = None if newest is None else {file: (newest / file).read_bytes() for file in PLAIN_FILES}
        wanted = new if disk.log[renamed] in survived and (root / "step_000000000002").exists() else PLAIN_FILES
        if content != wanted or problems:
            bad.append(f"{[(operation.kind, operation.path) for operation in survived]}: {newest}, {problems}")
        CheckpointFolder(root).clean()
        if leftover := [name for name in listed(root) if name.startswith(".")]:
            bad.append(f"{leftover} stay")
        shutil.rmtree(root)
    return states, bad


# --- stops


GRACE_S = 5.0


def _update_s(training: Training) -> float:
    """A rollout and its update: each writes a line."""
    before, begun = training.said().count("[PERF]"), time.monotonic()
    training.until("train on", lambda: training.said().count("[PERF]") >= before + 2, pause_s=0.005)
    return (time.monotonic() - begun) / max(1, training.said().count("[PERF]") - before)


def stops(count: int, seed: int, folder: Path, say: Say, lent: Nursery | None = None) -> Result:
    """SIGTERM at random instants of training; seconds until the process has ended, with exit code 4 and saved.

    `most_s`: how long that may take, `GRACE_S` and one rollout with its update as measured.
    """
    result: Result = {"stops": 0, "saved": 0, "seconds": [], "most_s": {}, "dropped": 0, "bad": []}
    rng = random.Random(seed)
    with Nursery.lent(lent) as nursery:
        for name, arguments in STOPPED.items():
            place = folder / name
            place.mkdir(parents=True)
            expected: Path | None = None
            for number in range(count * (1 + list(STOPPED).index(name)) // len(STOPPED) - result["stops"]):
                training = Training(nursery, place, arguments if expected is None else resumed())
                if not training.until_said("[PERF]"):
                    result["bad"].append(f"{name}: ended by itself: {training.said()[-2000:]}")
                    break
                if expected is None:
                    result["most_s"][name] = round(GRACE_S + _update_s(training), 3)
                time.sleep(rng.random() * 1.5)
                sent = time.monotonic()
                training.send(signal.SIGTERM)
                code = training.end()
                took, said = time.monotonic() - sent, training.said()
                summary = _json(training.run / "summary.json")
                newest, problems = CheckpointFolder(training.run / "checkpoints").newest()
                at = -1 if newest is None else steps_of(newest)
                right = f"going on from {expected.name}:" in said if expected else True
                saved = code == 4 and summary.get("stopped_by") == "signal" and not problems and newest is not None
                saved = saved and right and 0 <= summary["env_steps"] - at <= 64 and not unread(newest)  # type: ignore[arg-type]
                result["stops"] += 1
                result["saved"] += saved
                result["seconds"].append(round(took, 3))
                if not saved:
                    result["bad"].append(f"{name} {number}: exit code {code}, {newest}, {problems}: {said[-2000:]}")
                if took > result["most_s"][name]:
                    result["bad"].append(
                        f"{name} {number}: {took:.1f} s until its end, {result['most_s'][name]} at most"
                    )
                expected = newest
            say(f"{result['stops']} of {count} stops")
    return result


# --- litter

ENDS = ("SIGKILL", "SIGKILL to the group", "SIGTERM", "SIGTERM twice", "SIGINT", "env raises", "worker exits",
        "a child is killed", "SIGTERM while starting", "SIGKILL while starting")  # fmt: skip


def ends(count: int, seed: int, folder: Path, say: Say, lent: Nursery | None = None) -> Result:
    """Abnormal ends of a training with workers, one process that evaluates and checkpoints."""
    result: Result = {"ends": 0, "kinds": {}, "processes": 0, "shared": 0, "temporary": 0, "bad": []}
    rng = random.Random(seed)
    folder.mkdir(parents=True)
    wire, begun = Wire(folder / "wire"), False
    with Nursery.lent(lent) as nursery:
        while result["ends"] < count:
            kind = ENDS[result["ends"] % len(ENDS)] if begun else "SIGKILL"
            wire.clear()
            training = Training(nursery, folder, resumed() if begun else WORKERS)
            if kind.endswith("while starting"):
                time.sleep(rng.random() * 1.5)
            elif not training.until("train", lambda: wire.steps > 1000, pause_s=0.005):
                result["bad"].append(f"it ended by itself: {training.said()[-2000:]}")
                break
            else:
                if left := temporary_of_others(training):
                    result["temporary"] += len(left)
                    result["bad"].append(f"left by the run before: {left}")
                time.sleep(rng.random() * 0.5)
            strike(training, kind, wire, rng)
            training.end()
            left_over = training.litter()
            result["ends"] += 1
            result["kinds"][kind] = result["kinds"].get(kind, 0) + 1
            result["processes"] += left_over.processes
            result["shared"] += left_over.shared
            if any(left_over):
                result["bad"].append(f"{kind}: {left_over} left")
                training.send(signal.SIGKILL, group=True)
            begun = CheckpointFolder(training.run / "checkpoints").newest().folder is not None
            if not begun:
                shutil.rmtree(training.run, ignore_errors=True)
            if result["ends"] % 10 == 0:
                say(f"{result['ends']} of {count} ends")
    return result


def strike(training: Training, kind: str, wire: Wire, rng: random.Random) -> None:
    """Bring about one of `ENDS`."""
    if kind.startswith("SIGKILL"):
        training.send(signal.SIGKILL, group=kind.endswith("group"))
    elif kind == "SIGINT":
        training.send(signal.SIGINT)
    elif kind.startswith("SIGTERM"):
        training.send(signal.SIGTERM)
        if kind.endswith("twice"):
            time.sleep(rng.random() * 0.05)
            training.send(signal.SIGTERM)
    elif kind == "env raises":
        wire.order(RAISE)
    elif kind == "worker exits":
        wire.order(EXIT)
    else:
        _kill_a_child(training, rng)


def _kill_a_child(training: Training, rng: random.Random) -> None:
    """A worker, what evaluates, or one of Python's helpers. The run may survive that; then it is told to stop."""
    if others := training.others():
        os.kill(rng.choice(sorted(others)), signal.SIGKILL)
    deadline = time.monotonic() + 2.0
    while training.lives() and time.monotonic() < deadline:
        time.sleep(0.05)
    training.send(signal.SIGTERM)


def temporary_of_others(training: Training) -> list[str]:
    """What an earlier process of this run left half done; this one's own names have its number."""
    mine = f"-{training.pid}"
    return [name for name in temporary(training.run) if not name.endswith(mine)]


# --- resume equality

POINTS: Mapping[str, tuple[str, ...]] = {
    "PPO, native": (*PPO, "env=skullking", "algo=ppo"),
    "PPO, shared": (*PPO, "env.id=CartPole-v1", "algo=ppo", *SHARED, "num_envs=4"),
    "MaskablePPO, native": (*PPO,),
    "MaskablePPO, shared": (*PPO, "env=skirmish", *SHARED, "num_envs=4"),
    "DQN with PER, native": (*DQN,),
    "DQN with PER, shared": (*DQN, "env.id=CartPole-v1", *SHARED, "num_envs=4"),
}
POINT_EVERY = ("checkpoint.keep=99", "+profile=speed", "seed=5", "eval.episodes=2", "checkup=off", "report=false",
               "live=off", "hydra.run.dir=run")  # fmt: skip


def equalities(count: int, seed: int, folder: Path, say: Say, lent: Nursery | None = None) -> Result:
    """A run is stopped by SIGTERM at a random env step and resumed; it must equal the one that was left alone."""
    result: Result = {"points": 0, "equal": 0, "combinations": {}, "bad": []}
    with Nursery.lent(lent) as nursery:
        for name, case in POINTS.items():
            rng = random.Random(f"{seed}/{name}")
            arguments = [*POINT_EVERY, *case]
            horizon = int(next(text for text in arguments if text.startswith("total_timesteps=")).partition("=")[2])
            place = folder / name.replace(" ", "_").replace(",", "")
            (place / "whole").mkdir(parents=True)
            whole = Training(nursery, place / "whole", arguments)
            if whole.end() != 0:
                result["bad"].append(f"{name}: {whole.said()[-2000:]}")
                continue
            equal = 0
            for number in range(count):
                at = rng.randrange(1, horizon - horizon // 4)
                here = place / f"point{number}"
                here.mkdir()
                first = Training(nursery, here, arguments, stop_at=at)
                code = first.end()
                again = Training(nursery, here, resumed())
                again.end()
                result["points"] += 1
                try:
                    assert (code, again.code) == (4, 0), f"exit codes {code}, {again.code}: {again.said()[-2000:]}"
                    assert_equal(here / "run", whole.run)
                except AssertionError as error:
                    result["bad"].append(f"{name}, stopped at {at}: {error}")
                else:
                    equal += 1
                    shutil.rmtree(here)
            result["equal"] += equal
            result["combinations"][name] = equal
            say(f"{name}: {equal} of {count} equal")
    return result


# --- a file system that is full

SMALL_BYTES = 1 << 20
FULL = (
    *LANES["ppo"],
    f"total_timesteps={HORIZON}",
    "eval_every=512",
    "log_every=8",
    "train_log_enabled=true",
    "train_log_to_file=true",
)


def fulls(count: int, seed: int, folder: Path, say: Say, lent: Nursery | None = None) -> Result:
    """A file system that is full from a random instant of training on: every file of the run is hit, not only those of
    checkpoints. The run must go on or end with one message, and after room was made go on from a whole checkpoint.

    Needs the right to mount one; elsewhere nothing is tried.
    """
    result: Result = {"points": 0, "went_on": 0, "one_message": 0, "kept": 0, "resumed": 0, "bad": []}
    rng = random.Random(seed)
    with Nursery.lent(lent) as nursery:
        for number in range(count):
            place, log = folder / f"full{number}", folder / f"log{number}"
            place.mkdir(parents=True)
            command = ["mount", "-t", "tmpfs", "-o", f"size={SMALL_BYTES}", "tmpfs", str(place)]
            if subprocess.run(command, capture_output=True).returncode:
                say("no right to mount a small file system: not tried")
                break
            try:
                _fill(nursery, place, log, rng.random(), result)
            finally:
                subprocess.run(["umount", "-l", str(place)], check=True)
            say(f"{number + 1} of {count} full file systems")
    return result


def _fill(nursery: Nursery, place: Path, log: Path, delay_s: float, result: Result) -> None:
    Wire(place / "wire")
    training = Training(nursery, place, FULL, log=log)
    checkpoints = CheckpointFolder(training.run / "checkpoints")
    training.until("write two checkpoints", lambda: len(checkpoints.all()) > 1)
    time.sleep(delay_s)
    filler = place / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1024))
    code, said = training.end(), training.said()
    newest, problems = checkpoints.newest()
    kept = newest is not None and not problems and not unread(newest)
    one = code in (0, 1) and "Traceback" not in said and said.count("fasttrain: error:") == code
    filler.unlink()
    again = Training(nursery, place, resumed(), log=Path(f"{log}again"))
    goes_on = again.end() == 0
    result["points"] += 1
    result["went_on"] += "[PERF]" in said and "steps 100 %" in said
    result["one_message"] += one
    result["kept"] += kept
    result["resumed"] += goes_on
    if not (one and kept and goes_on):
        result["bad"].append(f"full: exit codes {code}, {again.code}: {said[-3000:]} then {again.said()[-500:]}")


def _json(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found
