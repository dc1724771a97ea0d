"""What runs survived, as the README shows it: docs/results/faults.json → a table. Used by reproduce.py."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import rendering
from rendering import Json, Load


def faults(load: Load) -> str:
    """A row for each part that is stored."""
    found = load("faults")
    rows = [
        (what, how_often, result)
        for name, render in ROWS.items()
        if name in found["parts"]
        for what, how_often, result in [render(found["parts"][name])]
    ]
    head = ("what was done", "times", "what came of it")
    text = rendering.prose(f"Random instants and places come from a seed. On {rendering.cores(found)}:")
    return f"{text}\n\n{rendering.table(head, rows)}"


Row = tuple[str, str, str]


def kills(part: Json) -> Row:
    """Part `kills`."""
    lost = part["lost"]
    return (
        f"`kill -9` around checkpoints, {part['while_writing']:,} of them while one was being written",
        f"{part['kills']:,}",
        f"{part['resumes']:,} resumed from a whole checkpoint, {part['partial']:,} partial ones; lost were at most "
        f"{lost['waiting']:.2f} intervals where training waits for the disk, {lost['beside']:.2f} where it does not; "
        f"{part['equal']:,} of {part['runs']:,} runs came to the bits of one left alone",
    )


def corruptions(part: Json) -> Row:
    """Part `corruptions`."""
    return (
        "checkpoints truncated, flipped, swapped, deleted",
        f"{part['damages']:,}",
        f"{part['found']:,} found, {part['fell_back']:,} times the one before taken with a warning",
    )


def equality(part: Json) -> Row:
    """Part `equality`."""
    return (
        "stopped at random steps and resumed: PPO, MaskablePPO, DQN with PER; native and `shared`",
        f"{part['points']:,}",
        f"{part['equal']:,} equal to the run without a stop, bit for bit",
    )


def disk(part: Json) -> Row:
    """Part `disk`."""
    return (
        "disk full or failing at every operation of a checkpoint, and after random numbers of bytes",
        f"{part['points']:,}",
        f"{part['kept']:,} times the older checkpoint stayed whole, {part['went_on']:,} times training went on; of "
        f"{part['crashes']:,} states that a power cut may leave all load the old or the new one",
    )


def full(part: Json) -> Row:
    """Part `full`."""
    return (
        "a file system that is full from a random instant on",
        f"{part['points']:,}",
        f"{part['went_on']:,} trained on to the end and said in one line what was not saved; {part['kept']:,} kept a "
        f"whole checkpoint, {part['resumed']:,} resumed once there was room",
    )


def nan(part: Json) -> Row:
    """Part `nan`."""
    return (
        "NaN and ∞ in observation, reward, logits, loss and gradient × PPO, MaskablePPO, DQN",
        f"{part['cases']:,}",
        f"{part['passed']:,} named, with weights as they were; the run went on, stopped or went back as configured",
    )


def stops(part: Json) -> Row:
    """Part `stops`."""
    seconds = part["seconds"]
    return (
        "SIGTERM at a random instant",
        f"{part['stops']:,}",
        f"{part['saved']:,} with a checkpoint and exit code 4, after {median(seconds):.1f} s (median), at most "
        f"{max(seconds):.1f} s",
    )


def ends(part: Json) -> Row:
    """Part `ends`."""
    return (
        "abnormal ends: killed alone or in a group, signals, an env that raises, dead workers",
        f"{part['ends']:,}",
        f"after 5 s {part['processes']:,} processes and {part['shared']:,} names in /dev/shm, after the next start "
        f"{part['temporary']:,} temporary files",
    )


def groups(part: Json) -> Row:
    """Part `groups`."""
    seconds = part["seconds"]
    return (
        "SIGTERM or SIGINT to the process group, Ctrl-C in a terminal, SIGTERM to every process of the job; steps of "
        "1 ms, 0.3 s and 2 s in dummy, subproc and shared, and native; PPO and DQN",
        f"{part['stops']:,}",
        f"{part['saved']:,} with model, checkpoint and exit code 4, {part['resumed']:,} of {part['cells']:,} resumed, "
        f"after at most {max(seconds):.1f} s; {part['processes']:,} processes were left",
    )


def forks(part: Json) -> Row:
    """Part `forks`."""
    return (
        "envs that fork in their worker: children that come back, raise, live on; pools, programs; "
        f"{part['trainings']:,} trainings of them ended in five ways",
        f"{part['forks']:,}",
        f"{part['wrong']:,} wrong steps in {part['lives']:,} vector envs; {part['processes']:,} processes were left",
    )


def victims(part: Json) -> Row:
    """Part `victims`."""
    return (
        "envs that hang, end their process, crash it, eat memory or raise before a training or in `fasttrain check`",
        f"{part['victims']:,}",
        f"{part['named']:,} named in one line with their place; left behind {part['processes']:,} processes and "
        f"{part['shared']:,} names in /dev/shm",
    )


def late_errors(part: Json) -> Row:
    """Part `late-errors`."""
    return (
        "an error of an env or a callback in a random late step, no checkpoints asked for: PPO, MaskablePPO, DQN with "
        "PER; `dummy`, `shared`, native",
        f"{part['errors']:,}",
        f"{part['left']:,} left model and checkpoint, {part['resumed']:,} were resumed, {part['equal']:,} came to the "
        "bits of a run without the error",
    )


def overwrites(part: Json) -> Row:
    """Part `overwrites`."""
    return (
        "something begun in a folder that holds a run (finished, crashed, at work), a sweep or a study",
        f"{part['folders']:,}",
        f"{part['refused']:,} refused in one line, {part['written_over']:,} written over",
    )


def evil(part: Json) -> Row:
    """Part `evil`."""
    return (
        "malicious files to `eval`, `play`, `export` and `resume`",
        f"{part['files']:,}",
        f"{part['executed']:,} executed, {part['outside']:,} files written outside of the run, memory grew by at most "
        f"{part['growth_mb']:.0f} MB",
    )


def cold_cache(part: Json) -> Row:
    """Part `cold-cache`."""
    unwritable = part["kinds"]["unwritable"]
    return (
        "up to four processes on one cold cache of compiled kernels, one killed there, damaged files, no place for any",
        f"{part['cases']:,}",
        f"{part['right']:,} right results; the next run compiled nothing in {part['warm']:,} of "
        f"{part['cases'] - unwritable:,}; one line said {part['said_once']:,} of {unwritable:,} times that nothing can "
        "be kept",
    )


def guards(part: Json) -> Row:
    """Part `guards`: with all guards ÷ without, in one process. Older results are without what is kept for a crash."""
    kept = "CartPole, PPO" in part.get("works", ())
    what = "`nan_guard`, what is kept for a crash, and" if kept else "`nan_guard`, and"
    worst = "worst of MaskablePPO, DQN and PPO" if kept else "worse of MaskablePPO and DQN"
    return (
        f"all guards together, in `speed`: {what} a checkpoint a minute; the {worst}",
        f"{part['pairs']:,}",
        f"cost {100 * (1 - part['ratio']['value']):.1f} % of the steps per second "
        f"[{100 * (1 - part['ratio']['high']):.1f}, {100 * (1 - part['ratio']['low']):.1f}]",
    )


ROWS: dict[str, Callable[[Json], Row]] = {
    "kills": kills,
    "corruptions": corruptions,
    "equality": equality,
    "disk": disk,
    "full": full,
    "nan": nan,
    "stops": stops,
    "ends": ends,
    "groups": groups,
    "forks": forks,
    "victims": victims,
    "late-errors": late_errors,
    "overwrites": overwrites,
    "evil": evil,
    "cold-cache": cold_cache,
    "guards": guards,
}
