"""What fasttrain promises of runs that are killed, stopped or out of disk, tried `count` times at instants of `rng`.

test_campaigns.py tries each a few times, test_group_signals.py as often as docs/guides/checkpoints.md says.
"""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

from bad_disk import NEVER
from injector import PHASES, Nursery, Tally, Training, listed, partial, steps_of, temporary, unread, wait_for
from wired import LENGTH, Wire

from fasttrain.saving.checkpoints import CheckpointFolder
from resume_cases import assert_equal

WIRED = ("env.entry_point=wired:WiredEnv", "env.kwargs.wire=wire")
QUIET = ("+profile=speed", "seed=5", "checkup=off", "report=false", "live=off", "eval.episodes=2",
         "algo.net_arch=[8]", "hydra.run.dir=run")  # fmt: skip
INTERVAL = 64
LANE = (*QUIET, *WIRED, "vec_env=dummy", "num_envs=2", "fused_update=off", f"checkpoint_every={INTERVAL}")
WIRED_PPO = (*LANE, "algo.rollout_size=32", "batch_size=16", "algo.n_epochs=1")
WIRED_DQN = (*LANE, "algo=dqn", "algo.prioritized=true", "algo.buffer_size=5000", "warmup_steps=32",
             "batch_size=16", "updates_per_step=1", "prefetch=off")  # fmt: skip
WAITS, BESIDE = "checkpoint_async=false", "checkpoint_async=true"
LANES: Mapping[str, tuple[str, ...]] = {  # of the kills
    "ppo": (*WIRED_PPO, "algo=ppo", WAITS),
    "maskable_ppo": (*WIRED_PPO, "algo=maskable_ppo", BESIDE),
    "dqn": (*WIRED_DQN, WAITS),
    "dqn_beside": (*WIRED_DQN, BESIDE),
}
FOREVER = "total_timesteps=100000000"
HORIZON = 3000


def resumed(run: str = "run") -> list[str]:
    """The command line that goes on."""
    return ["resume", f"run={run}"]


# --- kill -9


def kills(count: int, rng: Random, folder: Path, nursery: Nursery) -> Tally:
    """`kill -9` around the writing of checkpoints. Each resume is the next victim; a run that comes to its horizon is
    compared with one that was left alone."""
    found, lanes = Tally(), list(LANES)
    for number, lane in enumerate(lanes):
        wanted, of_lane = count * (number + 1) // len(lanes), 0
        while found["kills"] < wanted:
            _chain(nursery, folder / f"{lane}{of_lane}", lane, wanted, rng, found)
            of_lane += 1
    return found


def _chain(nursery: Nursery, folder: Path, lane: str, wanted: int, rng: Random, found: Tally) -> None:
    """One run, from its start to its horizon."""
    whole = folder / "whole"
    whole.mkdir(parents=True)
    wire, arguments = Wire(folder / "wire"), [*LANES[lane], f"total_timesteps={HORIZON}"]
    training = Training(nursery, folder, arguments)
    begun_at: Path | None = None
    while found["kills"] < wanted:
        (phase, _, longest), *_ = rng.choices(PHASES, [share for _, share, _ in PHASES])
        if not wait_for(training, "any" if begun_at is None else phase, rng.random() * longest):
            break
        training.send(signal.SIGKILL)
        training.end()
        _look(training, begun_at, wire, lane, found)
        begun_at = CheckpointFolder(training.run / "checkpoints").newest()
        if begun_at is None:
            shutil.rmtree(training.run)
        wire.clear()
        training = Training(nursery, folder, arguments if begun_at is None else resumed())
    training.end()
    if begun_at is not None:
        _went_on(training, begun_at, lane, found)
    alone = Training(nursery, whole, arguments)
    wrong = "" if (training.code, alone.end()) == (0, 0) else f"exit codes {training.code}, {alone.code}"
    if not wrong:
        wrong = _differs(training.run, alone.run)
    if found.judge("runs", lane, f"{wrong}: {training.said()}", equal=not wrong):
        shutil.rmtree(folder)


def _differs(run: Path, whole: Path) -> str:
    try:
        assert_equal(run, whole)
    except AssertionError as error:
        return f"it came to something else: {error}"
    return ""


def _look(training: Training, begun_at: Path | None, wire: Wire, lane: str, found: Tally) -> None:
    """What the victim had done, and what it left; not of one that was killed before it went on."""
    found.bad += [f"{lane}: {why}" for why in partial(training.run)]
    if begun_at is not None:
        if "going on from" not in training.said():
            return
        _went_on(training, begun_at, lane, found)
    newest = CheckpointFolder(training.run / "checkpoints").newest()
    if newest is None:
        return
    begun = 0 if begun_at is None else steps_of(begun_at)
    again = 2 * (begun // 2 % LENGTH)  # steps of unfinished episodes, which a resume repeats
    lost = (min(HORIZON, begun + wire.steps - again) - steps_of(newest)) / INTERVAL
    most = 2.0 if BESIDE in LANES[lane] else 1.0  # beside training one more may be on its way to the disk
    found.judge("kills", lane, f"{lost:.2f} intervals after {newest.name}", few_are_lost=lost <= most)


def _went_on(training: Training, begun_at: Path, lane: str, found: Tally) -> None:
    """Whether it resumed from that checkpoint, whole as it was left by the kill before."""
    said = training.said()
    ended = "nothing is left to do" in said and steps_of(begun_at) >= HORIZON  # killed after its last checkpoint
    went_on = (f"going on from {begun_at.name}:" in said or ended) and "warning" not in said
    found.judge("resumes", f"{lane} from {begun_at.name}", said, simply_gone_on=went_on)


# --- disks


def on_bad_disk(nursery: Nursery, folder: Path, plan: dict[str, Any], found: Tally) -> None:
    """The second checkpoint of a run fails; with keep=1 an old one lost would be all lost."""
    folder.mkdir(parents=True)
    forever = plan.get("times") == NEVER
    arguments = [*LANES["ppo"], f"total_timesteps={4 * INTERVAL}", "checkpoint.keep=1"]
    training = Training(nursery, folder, arguments, disk=plan)
    code, said = training.end(), training.said()
    saved = CheckpointFolder(training.run / "checkpoints")
    newest = saved.newest()
    told = said.count("warning: the checkpoint of") == 1 and "could not be written (" in said
    last = "warning: not saved for a resume: the checkpoint of 256 steps could not be written"
    well = found.judge(
        "points", str(plan), f"exit code {code}, {listed(training.run / 'checkpoints')}: {said}",
        gone_on=code == 0 and json.loads((training.run / "summary.json").read_text())["env_steps"] == 4 * INTERVAL,
        kept=newest is not None and newest == saved.all()[0] and not unread(newest),
        written_later=newest is not None and steps_of(newest) == (INTERVAL if forever else 4 * INTERVAL),
        told=told and (last in said or not forever), tidy=not temporary(training.run),
    )  # fmt: skip
    if well:
        shutil.rmtree(folder)
