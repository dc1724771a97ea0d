"""`fasttrain resume run=FOLDER`: continue a run from its newest complete checkpoint, in the same folder. The settings
come from plan.json. How long to train, when to stop, what to log and how to evaluate may be changed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from rich.console import Console

from fasttrain.errors import EXIT_DONE, ConfigError
from fasttrain.runs.evaluate import config_of, flags_of
from fasttrain.runs.folders import provenance
from fasttrain.runs.loggers import cut_logs
from fasttrain.runs.parts import Parts
from fasttrain.runs.state import WRONG, restore
from fasttrain.runs.train import Draw, build, train_to_end
from fasttrain.runs.view import activity, make_console, say
from fasttrain.runs.warm_start import Exchange
from fasttrain.saving.checkpoints import CheckpointFolder, open_checkpoint, problem_of
from fasttrain.saving.files import lock_folder, read_json
from fasttrain.spec.config import Config
from fasttrain.spec.plain import to_dict
from fasttrain.spec.plan import Event, Row, RunSpec
from fasttrain.spec.setting import declared
from fasttrain.terminal import one_line

MAY_CHANGE = (
    *(one.name for one in dataclasses.fields(Config) if declared(one).may_change), "cluster.address", "cluster.actors",
)  # fmt: skip
MAY_CHANGE_BELOW = ("eval", "stop", "checkpoint", "video")

Point = tuple[Path, Mapping[str, Any], Mapping[str, NDArray[Any]]]  # a checkpoint: its folder, state and arrays


def main(
    config: Config, sources: Mapping[str, str], folder: Path, overrides: Sequence[str], draw: Draw = lambda _: ""
) -> int:
    """Continue the training; returns its exit code."""
    with open_run(config, sources, overrides) as back:
        return EXIT_DONE if back is None else train_to_end(*back, draw)


@contextmanager
def open_run(
    config: Config, sources: Mapping[str, str], overrides: Sequence[str]
) -> Iterator[tuple[Parts, list[str]] | None]:
    """Restore a run from its newest complete checkpoint. Its folder is locked inside the block. Yields the run and all
    overrides that were typed for it so far, or None if all steps are done. Raises ConfigError if the run still trains,
    has no complete checkpoint, or a typed value may not change.
    """
    where = Path(str(config.run)).absolute()  # an env may change the working directory
    if (place := config.checkpoint.copy_to) is not None:
        from fasttrain.saving.remote import fetch

        make_console().print(fetch(where, place, "resume"), end="", highlight=False)
    if not (where / "plan.json").is_file():
        raise ConfigError(f"run={where}: no plan.json there; name the folder of a run")
    refuse_links(where)
    with lock_folder(where):
        typed = [key for key, source in sources.items() if source == "command line" and key != "run"]
        plan = changed_plan(where, config, typed)
        console = make_console()
        with ExitStack() as files:
            point = newest_point(where, plan.config.checkpoint.keep, files, console)
            done, wanted = int(point[1]["env_steps"]), plan.config.total_timesteps
            exchange = Exchange.of(where, done)
            plan = plan if exchange is None else exchange.changed(plan)
            if done >= wanted:
                left = "nothing is left to do; a larger total_timesteps=… continues it"
                say(console, f"{config.run} has {done:,} of {wanted:,} steps: {left}")
                yield None
                return
            with activity(console, f"going back to {point[0].name}"):
                run = _restored(plan, where, point, console, exchange)
        before = read_json(where / "plan.json")
        resumed = [*before.get("resumed", ()), provenance(overrides)]
        run.origin = {"provenance": before.get("provenance"), "resumed": resumed}
        run.write_plan()
        own = [text for text in overrides if not text.startswith("run=")]
        first = read_json(where / "summary.json").get("overrides")  # a run that was killed has no summary.json
        yield run, [*(map(str, first) if isinstance(first, list) else ()), *own]


def _restored(plan: RunSpec, where: Path, point: Point, console: Console, exchange: Exchange | None) -> Parts:
    """Restore the run from the checkpoint `point`. Entries of later steps are removed from the run's files."""
    run, (folder, state, arrays) = build(plan, where, console, resumes=True), point
    try:
        anew, lost = restore(run, state, arrays, {} if exchange is None else exchange.settings)
        if exchange is not None:
            exchange.take_weights(where, run.config, run.model, run.say)
        _cut_files_back(run, state["run"])
    except BaseException as error:
        run.model.logger.close()
        run.env.close()
        if isinstance(error, WRONG):
            raise ConfigError(f"{folder}: its data about the run's files are wrong ({error})") from error
        raise
    steps = run.model.num_timesteps
    run.checkpoints.at = steps
    run.say(f"going on from {folder.name}: {steps:,} of {run.config.total_timesteps:,} steps")
    count = run.env.num_envs
    if anew:
        run.say(
            f"warning: {len(anew)} of {count} envs could not be brought back to where they were (state outside of "
            "np_random, an episode too long to repeat, or an error before the first step was stored); they begin a new "
            "episode, and the run is no exact continuation"
        )
    if lost:
        names = one_line(", ".join(sorted({name for each in lost.values() for name in each})), 120)
        run.say(
            f"warning: {len(lost)} of {count} envs keep values between episodes that a checkpoint does not hold "
            f"({names}); these begin as in a new env, and the run is no exact continuation if later episodes use them"
        )
    return run


def _cut_files_back(run: Parts, own: Mapping[str, Any]) -> None:
    """Remove episodes, evaluations and log lines after the checkpoint. `own`: entry `run` of the checkpoint's state."""
    steps = run.model.num_timesteps
    if not run.episodes.go_on(own["episodes_file"]):
        run.say("warning: episodes.csv is shorter than at the checkpoint; new episodes are appended to it")
    # With eval_async evaluations.csv may hold a result that arrived after the checkpoint was written.
    rows = max(own["evaluations"], run.evaluator.log.known(steps), key=len)
    run.evaluator.go_on(rows)
    cut_logs(run.model.logger, steps)


def refuse_links(where: Path) -> None:
    """Raises ConfigError if anything in the folder is a symbolic link: the run would write elsewhere."""
    link = next((path for path in where.rglob("*") if path.is_symlink()), None)
    if link is not None:
        raise ConfigError(f"run={where}: {link.relative_to(where)} is a link to another place; put the file there")


def may_change(key: str) -> bool:
    """Whether a resumed run may have another value of the setting."""
    return key in MAY_CHANGE or key.split(".")[0] in MAY_CHANGE_BELOW


def changed_plan(where: Path, config: Config, typed: Sequence[str]) -> RunSpec:
    """The stored plan with the values on the command line. Raises ConfigError for a value that may not change."""
    kept = config_of(where)
    wrong = sorted(key for key in typed if not may_change(key))
    if wrong:
        may = ", ".join((*MAY_CHANGE, *(f"{name}.…" for name in MAY_CHANGE_BELOW)))
        env = kept.env.id or kept.env.entry_point
        raise ConfigError(
            f"{', '.join(wrong)} cannot change in a run that goes on (algo={kept.algo.name} on {env} as in its "
            f"plan.json); resume takes run=… and {may}"
        )
    changes: dict[str, Any] = {}
    for key in typed:
        group, _, name = key.partition(".")
        if name := name.partition(".")[0]:  # the field of the group: env_kwargs for eval.env_kwargs.NAME
            known = changes.get(group, getattr(kept, group))
            changes[group] = dataclasses.replace(known, **{name: getattr(getattr(config, group), name)})
        else:
            changes[key] = getattr(config, key)
    changed = dataclasses.replace(kept, **changes)
    try:
        plan = read_json(where / "plan.json")
        events = tuple(Event(**event) for event in plan.get("events", ()))
        rows = [_row(row, changes) for row in flags_of(where)]
        return RunSpec(changed, tuple(rows), events, plan.get("engine_switch_at"))
    except (LookupError, TypeError, AttributeError) as error:
        why = f"{type(error).__name__} {error}"
        raise ConfigError(f"run={where}: its plan.json has no list of flags ({why})") from error


def _row(stored_row: Mapping[str, Any], changes: Mapping[str, Any]) -> Row:
    row = Row(*(stored_row[name] for name in ("flag", "requested", "effective", "source", "class", "reason")))
    if row.flag not in changes:
        return row
    value = to_dict(changes[row.flag])
    return row._replace(requested=value, effective=value, source="command line of resume", reason="")


def newest_point(where: Path, keep: int, files: ExitStack, console: Console) -> Point:
    """The newest complete checkpoint of this version, opened in `files`. Raises ConfigError if there is none."""
    problems: list[str] = []
    for folder in CheckpointFolder(where / "checkpoints", keep).all():
        try:
            if problem := problem_of(folder):
                raise ConfigError(problem)
            state, arrays = files.enter_context(open_checkpoint(folder))
        except (ConfigError, OSError) as error:
            problems.append(f"{folder.name}: {error}")
            continue
        for text in problems:
            say(console, f"warning: {text}; going back to an older checkpoint")
        return folder, state, arrays
    none = "it has none (checkpoint_every=… writes them; a signal also does, and an error after the first update)"
    raise ConfigError(f"run={where}: no checkpoint to continue from: {'; '.join(problems) or none}")
