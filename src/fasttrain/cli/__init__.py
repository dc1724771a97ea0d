"""The door: argv → command word + Hydra → typed config → a command; errors → one message and an exit code."""

from __future__ import annotations

import errno
import multiprocessing
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fasttrain import __version__, terminal
from fasttrain.cli import commands, compose
from fasttrain.errors import (
    EXIT_CRASHED,
    EXIT_DONE,
    EXIT_STOPPED,
    ConfigError,
    CrashedError,
    FastTrainError,
    too_little_memory,
)
from fasttrain.machine import stop_after
from fasttrain.runs.folders import PARENT
from fasttrain.spec.precedence import is_sweep, normalise, split_options, with_names_as_typed

if TYPE_CHECKING:
    from fasttrain.studies.sweep import Sweep

PRINTS_ONLY = {"-h", "--help", "--version", "--cfg", "-c", "--info", "-i"}
# No room, no more of the quota (which Windows does not know), no permission, a disk that is only read.
UNWRITABLE = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC), errno.EACCES, errno.EROFS)
LAST_FRAMES = 6  # of a traceback: where the user's code is


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. Never raises for bad input."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    terminal.speak_its_letters()
    here = ""
    with suppress(OSError):  # it may be gone; and an env may go to another one
        here = os.getcwd()
    try:
        refuse_while_imported()
        with _sigterm_as_ctrl_c():
            if (parent := os.environ.pop(PARENT, "")).isdigit() and os.name == "posix":  # it ends with its study
                threading.Thread(target=stop_after, args=(int(parent),), daemon=True).start()
            return _dispatch(arguments)
    except FastTrainError as error:
        with suppress(FastTrainError):  # a variable of the environment that is none
            return _report(error, error.exit_code, with_names_as_typed(str(error), arguments, os.environ, here))
        return _report(error, error.exit_code)
    except MemoryError as error:
        return _report(error, ConfigError.exit_code, too_little_memory(error))
    except KeyboardInterrupt:
        terminal.tell("fasttrain: stopped before anything could be saved")
        return 130
    except BrokenPipeError:  # `fasttrain --help | head`; consoles of commands do not raise it
        sys.stderr.close()
        return EXIT_DONE if PRINTS_ONLY & set(arguments) else EXIT_CRASHED
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            way_out = "raise the limit of this shell (ulimit -n 1024), or take fewer envs or workers"
            return _report(error, ConfigError.exit_code, f"{error}: {way_out}")
        if error.errno not in UNWRITABLE:
            return _report_users(error)
        unnamed = "" if error.filename else " (no file is named: perhaps /dev/shm, where semaphores of workers lie)"
        return _report(error, EXIT_CRASHED, f"{error}{unnamed}; make room, or let it be written there")
    except BaseException as error:
        return _report_users(error)


def refuse_while_imported() -> None:
    """A process that a run starts imports the main script first: where that calls `main` again, nobody evaluates."""
    user_code = sys.modules.get("fasttrain.envs.user_code")
    if user_code is not None and user_code.is_importing():
        raise ConfigError(user_code.TRAINS)
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ConfigError(
            "a process of a run imports the script that began the run, and the script begins another one: put what "
            'begins it under `if __name__ == "__main__":`'
        )


@contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    """SIGTERM ends any command as Ctrl-C does: what is open is closed, workers end, a study keeps what is finished.

    A training has its own handlers while it lasts (`StopFlag`). Only the main thread may set any.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _report(error: BaseException, code: int, text: str = "", raised: BaseException | None = None) -> int:
    """Say it in one line; before it the end of the traceback of what somebody's code `raised`."""
    from fasttrain.terminal import shown

    raised = error.__cause__ if isinstance(error, CrashedError) else raised
    if os.environ.get("FASTTRAIN_TRACEBACK"):
        traceback.print_exception(error)
    elif raised is not None and not isinstance(raised, (FastTrainError, MemoryError)):
        traceback.print_exception(raised, limit=-LAST_FRAMES)
    terminal.tell(f"fasttrain: error: {shown(text or str(error))}")
    return code


def _report_users(error: BaseException) -> int:
    """Report what the user's own code raised; raise what none of it did."""
    state, user_code = (sys.modules.get(f"fasttrain.{name}") for name in ("runs.state", "envs.user_code"))
    place = "" if state is None else state.place_of(error)
    if user_code is None or not (place or user_code.users_frames(error)):
        raise error
    return _report(error, EXIT_CRASHED, f"{place}{user_code.blame(error)}", error)


def _dispatch(arguments: list[str]) -> int:
    if "--version" in arguments:
        print(f"fasttrain {__version__}")
        return 0
    if not {*arguments} - {"-m", "--multirun"} or {"-h", "--help"} & set(arguments) or arguments[0] == "help":
        from fasttrain.cli.help import help_on

        print(terminal.fitting(terminal.as_typed(help_on(arguments)), sys.stdout))
        return 0
    try:
        Path.cwd()
    except OSError as error:
        raise ConfigError(f"the working directory is gone ({error.strerror}): cd to one that is there") from error
    typed = split_options(arguments)[1]
    command = "train"
    if typed and re.fullmatch(r"[a-z_]+", typed[0]):
        if typed[0] not in (*commands.COMMANDS, *commands.OTHER_WORDS):
            compose.check_options(split_options(arguments)[0])  # `--profile speed`
        command, more = commands.known(typed[0])
        arguments.remove(typed[0])
        arguments = [*more, *arguments]
    elif late := [word for word in typed if word in (*commands.COMMANDS, *commands.OTHER_WORDS)]:
        raise ConfigError(f"{late[0]}: the command comes before its settings, fasttrain {late[0]} {typed[0]} …")
    if command in commands.PLAIN:
        return int(commands.implementation(command)(arguments))
    arguments = commands.prepare(command, arguments)
    compose.check_options(normalise(arguments, {}))
    from fasttrain.runs.view import activity, make_console

    with ExitStack() as starting:  # until the command, or a sweep's first cell, has something to show
        if not PRINTS_ONLY & set(arguments):
            from fasttrain.cli.commands import settled

            found = settled(command, arguments, compose.composed_before)
            if isinstance(found, str):
                print(found)
                return EXIT_DONE
            command, arguments = found
            starting.enter_context(activity(make_console(), "loading fasttrain and PyTorch"))
        return _run_hydra(command, arguments, starting)


def _run_hydra(command: str, arguments: list[str], starting: ExitStack) -> int:
    """Compose the configuration with Hydra and run `command` on it, once or once per sweep cell."""
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from fasttrain.vec.worker_start import inherited

    compose.register()
    normalised = compose.with_games(normalise(arguments, os.environ))
    sweep = _sweep(command, arguments)
    outcome: list[int] = []
    failed: list[Exception] = []
    running: list[str] = []  # what is inside `task` now; a crash leaves it there

    @hydra.main(version_base="1.3", config_path=str(compose.conf_dir()), config_name="config")
    def task(composed: object) -> None:
        running.append(command)
        try:
            commands.refuse_chdir(HydraConfig.get())
            if sweep:
                starting.close()
                outcome.append(sweep.run_cell(HydraConfig.get()))
            else:
                outcome.append(_run_command(command, composed, arguments, starting))
        except (FastTrainError, MemoryError, OSError, ImportError) as error:  # Hydra would print lines of its own
            failed.append(error)
        except (HydraException, OmegaConfBaseException) as error:
            failed.append(compose.clear_error(error, normalised))
            failed[0].__cause__ = error
        running.clear()

    previous_argv, sys.argv = sys.argv, ["fasttrain", *normalised]
    try:
        with inherited({"HYDRA_FULL_ERROR": "1"}):  # exceptions reach us; the messages below replace Hydra's
            task()
    except Exception as error:
        if running or isinstance(error, BrokenPipeError):
            raise
        raise compose.clear_error(error, normalised) from error
    except KeyboardInterrupt:
        if sweep is None or not sweep.cells:
            raise
        sweep.stopped = True
    finally:
        sys.argv = previous_argv
    if failed:
        raise failed[0]
    if sweep is not None:
        code = sweep.finish()
        if draw_report(sweep.folder or Path()):
            code = code or EXIT_CRASHED
        if code == EXIT_STOPPED:
            print(sweep.way_on())
        return code
    return outcome[0] if outcome else 0


def _sweep(command: str, arguments: Sequence[str]) -> Sweep | None:
    """The sweep these arguments ask for, if they do."""
    if not is_sweep(arguments):
        return None
    from fasttrain.runs.view import make_console
    from fasttrain.studies.sweep import Sweep

    return Sweep(command, arguments, make_console())


def _run_command(command: str, composed: object, arguments: Sequence[str], starting: ExitStack) -> int:
    """One composed configuration → one command → its exit code. `starting` ends when its modules are there."""
    from hydra.core.hydra_config import HydraConfig

    from fasttrain.runs.folders import way_on
    from fasttrain.saving.files import locked
    from fasttrain.spec.precedence import config_dir_options, sources

    job = HydraConfig.get()
    config = compose.typed_config(composed, normalise(arguments, os.environ))
    files = compose.keys_of_files(job)
    overrides = list(job.overrides.task)
    origin = sources(overrides, os.environ, files)
    commands.refuse_foreign_keys(command, origin, overrides)
    for line in commands.outdone(overrides):
        print(line)
    if command in commands.STARTS_RUNS:
        overrides += config_dir_options(arguments)
    more: dict[str, Any] = {"compose": compose.compose_typed} if command in commands.STUDIES else {}
    more |= {"draw": draw_report} if command in commands.RUNS else {}
    folder = Path(str(config.run)) if command == "resume" else Path(job.runtime.output_dir)
    main = commands.implementation(command)
    starting.close()
    with locked(folder) if command in commands.STUDIES else nullcontext():
        exit_code: int = main(config, origin, folder, overrides, **more)
        if command in commands.STUDIES and config.report and draw_report(folder):
            exit_code = exit_code or EXIT_CRASHED
    if command in (*commands.RUNS, *commands.STUDIES) and exit_code == EXIT_STOPPED:
        print(f"stopped; {way_on(folder)}")
    return exit_code


def draw_report(folder: Path) -> str:
    """report.html of what a command left: whatever goes wrong here is one line, which all else does not depend on; why
    it went wrong."""
    from fasttrain.runs.view import activity, make_console, say

    console = make_console()
    try:
        with activity(console, "drawing report.html"):
            from fasttrain.report.index import write_report

            page = write_report(folder)
        say(console, f"report: {terminal.near(page)}")
        return ""
    except (Exception, KeyboardInterrupt) as error:
        reason = "interrupted" if isinstance(error, KeyboardInterrupt) else f"{type(error).__name__}: {error}"
        again = f"{terminal.command()} report run={folder} tries again"
        terminal.tell(f"fasttrain: warning: no report.html ({reason}); all else is saved, {again}")
        return reason
