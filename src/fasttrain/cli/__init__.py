"""The command line: argv → command and Hydra → typed configuration → run the command; errors become one message."""

from __future__ import annotations

import errno
import gc
import multiprocessing
import os
import re
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fasttrain import __version__, errors, terminal
from fasttrain.cli import commands
from fasttrain.cli.commands import Request
from fasttrain.errors import EXIT_CRASHED, EXIT_DONE, EXIT_STOPPED, ConfigError, CrashedError, FastTrainError
from fasttrain.machine import stop_after
from fasttrain.runs.folders import PARENT
from fasttrain.saving.files import lock_folder, read_json
from fasttrain.spec import plugins
from fasttrain.spec.precedence import UserInput, read, split_options, with_names_as_typed, without_folder

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from fasttrain.cli.compose import Composer

PRINTS_ONLY = {"-h", "--help", "--version", "--cfg", "-c", "--info", "-i"}
# Errors of writing: disk full, quota exceeded (unknown on Windows), no permission, read-only file system.
UNWRITABLE = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC), errno.EACCES, errno.EROFS)
MORE_FILES = "raise the limit of this shell (ulimit -n 1024), or use fewer envs or workers"
WAYS_OUT = {
    errno.EMFILE: MORE_FILES,
    errno.ENFILE: MORE_FILES,
    errno.EFBIG: "raise the limit of this shell (ulimit -f unlimited)",
    errno.ENAMETOOLONG: "use a shorter path",
}
LAST_FRAMES, MOST_LETTERS = 6, 10_000  # most frames and most characters of a traceback that are printed


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code. Bad input raises no exception."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    terminal.speak_its_letters()
    here = ""
    with suppress(OSError):  # raised if the directory was deleted
        here = os.getcwd()  # read before the command, because an env may change the directory
    try:
        refuse_while_imported()
        with _sigterm_as_ctrl_c(), warnings.catch_warnings():
            warnings.showwarning = partial(terminal.show_warning, warnings.showwarning)
            if (parent := os.environ.pop(PARENT, "")).isdigit() and os.name == "posix":
                threading.Thread(target=stop_after, args=(int(parent),), daemon=True).start()
            return _dispatch(arguments) or _lost_output()
    except FastTrainError as error:
        with suppress(FastTrainError):  # raised if an environment variable is wrong
            return _report(error, error.exit_code, with_names_as_typed(str(error), arguments, os.environ, here))
        return _report(error, error.exit_code)
    except MemoryError as error:
        return _report(error, ConfigError.exit_code, errors.too_little_memory(error))
    except KeyboardInterrupt:
        terminal.tell("fasttrain: stopped before anything could be saved")
        return 130
    except BrokenPipeError:  # as in `fasttrain --help | head`
        sys.stderr.close()
        return EXIT_DONE if PRINTS_ONLY & set(arguments) else EXIT_CRASHED
    except OSError as error:
        if error.errno in WAYS_OUT:
            return _report(error, ConfigError.exit_code, f"{terminal.one_line(error)}: {WAYS_OUT[error.errno]}")
        if error.errno not in UNWRITABLE:
            return _report_users(error)
        unnamed = "" if error.filename else " (no file is named: perhaps /dev/shm, with the workers' semaphores)"
        return _report(error, EXIT_CRASHED, f"{error}{unnamed}; free some space, or allow writing there")
    except BaseException as error:
        return _report_users(error)


def _lost_output() -> int:
    """The exit code of a finished command: EXIT_CRASHED if its output could not be written, as on a full disk."""
    with suppress(OSError, ValueError):  # raised if the stream is closed
        sys.stdout.flush()
    if not terminal.Output.lost:
        return EXIT_DONE
    terminal.tell(f"fasttrain: error: the output could not be written ({terminal.Output.lost})")
    return EXIT_CRASHED


def refuse_while_imported() -> None:
    """Raises ConfigError if the main script begins a run while a process of another run imports it."""
    user_code = sys.modules.get("fasttrain.envs.user_code")
    if user_code is not None and user_code.is_importing():
        raise ConfigError(user_code.TRAINS)
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ConfigError(
            "a process of a run imports the script that began the run, and this import would begin a second run: put "
            'the code that begins a run under `if __name__ == "__main__":`'
        )


@contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    """Let SIGTERM end a command like Ctrl-C. A training has its own handlers (`StopFlag`).

    Only the main thread can set signal handlers.
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
    """Print the end of the traceback of `raised` (an exception of the user's code), then one line. Returns `code`."""
    raised = error.__cause__ if isinstance(error, CrashedError) else raised
    if os.environ.get("FASTTRAIN_TRACEBACK"):
        traceback.print_exception(error)
    elif raised is not None and not isinstance(raised, (FastTrainError, MemoryError)):
        lines = "".join(traceback.format_exception(raised, limit=-LAST_FRAMES))
        print(terminal.shown(lines[:MOST_LETTERS]), file=sys.stderr)
    terminal.tell(f"fasttrain: error: {terminal.with_own_pip(terminal.shown(text or str(error)))}")
    return code


def _report_users(error: BaseException) -> int:
    """Report an exception of the user's code. Raise any other exception again."""
    stock, user_code = (sys.modules.get(f"fasttrain.{name}") for name in ("vec.stock", "envs.user_code"))
    place = "" if stock is None else stock.place_of(error)
    if user_code is None or not (place or user_code.users_frames(error)):
        raise error
    return _report(error, EXIT_CRASHED, f"{place}{user_code.blame(error)}", error)


def _dispatch(arguments: list[str]) -> int:
    if arguments and re.fullmatch(r"[A-Za-z][\w-]*", arguments[0]) and commands.is_of_others(arguments[0]):
        return int(commands.implementation(arguments[0])(arguments[1:]))
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
        raise ConfigError(f"the working directory was deleted ({error.strerror}): cd to another one") from error
    if arguments[0] == "check" and any(word.partition("=")[0] == "--config" for word in arguments):
        from fasttrain.cli import validate

        return validate.main(arguments)
    options, typed = split_options(arguments)
    if "-" in options:
        raise ConfigError("-: neither an option nor a setting; remove it")
    if "" in typed:
        raise ConfigError("an argument is empty: remove it; perhaps a variable of the shell is empty")
    words, command = (*commands.COMMANDS, *commands.OTHER_WORDS), "train"
    if typed and re.fullmatch(r"[a-z_-]+", typed[0]):
        if typed[0] not in words:
            commands.read_options(options)  # refuses, for example, `--profile speed`
        command, more = commands.command_of(typed[0])
        arguments.remove(typed[0])
        typed = [*more, *typed[1:]]
    elif late := [word for word in typed if word in words]:
        raise ConfigError(f"{late[0]}: the command comes before its settings: fasttrain {late[0]} {typed[0]} …")
    command, typed = commands.spelt_out(command, typed)
    if command in commands.PLAIN:
        return int(commands.implementation(command)(arguments))
    return _compose(command, *commands.prepare(command, options, typed))


def _compose(command: str, options: list[str], typed: list[str]) -> int:
    """Compose the configuration and run `command` with it: once, or once for each job of a sweep."""
    from hydra.types import RunMode

    from fasttrain.cli.compose import composer

    parsed = commands.read_options(options)
    given = read(typed, os.environ, parsed.multirun or "hydra.mode=MULTIRUN" in typed)
    with composer(parsed, command not in commands.OF_A_RUN) as hydra:
        if parsed.hydra_help or parsed.cfg or parsed.info or parsed.shell_completion:
            hydra.print(given)
            return EXIT_DONE
        job = hydra.compose(given.overrides)
        if job.hydra.job.chdir:
            raise ConfigError(
                "hydra.job.chdir=true: remove this setting. fasttrain writes into the run's folder anyway, and looks "
                "for your modules and folders where you typed the command"
            )
        if job.hydra.callbacks:
            raise ConfigError("hydra.callbacks are not called; for callbacks of SB3 use callbacks=[module:Class]")
        if job.hydra.mode == RunMode.MULTIRUN:
            commands.refuse_sweep(command, str(job.get("warmup")), job.get("checkpoint", {}).get("copy_to") is not None)
            return _sweep(command, hydra, given, job, [*options, *typed])
        config, sources = hydra.configured(given, job)
        overrides = list(job.hydra.overrides.task)
        commands.refuse_foreign_keys(command, sources, overrides)
        request = Request(command, config, sources, overrides, Path(job.hydra.runtime.output_dir))
        if command == "resume":
            request = request._replace(folder=Path(str(config.run)))
        elif command not in commands.WITHOUT_FOLDER and config.warmup == "off":
            result = commands.apply_on_existing(request, str(job.hydra.run.dir))
            if isinstance(result, str):
                print(result)
                return EXIT_DONE
            request = result
        if request.goes_on:  # a study is continued: read its stored arguments too
            options, typed = commands.prepare(command, options, [*request.goes_on, *without_folder(typed)])
        else:
            for line in commands.repeated_settings(overrides):
                print(line)
            return _run(request, hydra, job, request.command == command)
    return _compose(command, options, typed)


def _run(request: Request, hydra: Composer, job: DictConfig, new: bool) -> int:
    """Run one command and return its exit code. `new`: also write Hydra's `.hydra` files into the folder."""
    from fasttrain.runs.folders import how_to_continue
    from fasttrain.runs.view import activity, make_console

    command, config, sources, overrides, folder, _ = request
    studies = command in commands.STUDIES
    more: dict[str, Any] = {"compose": hydra.typed} if studies else {}
    more |= {"draw": draw_report} if command in commands.RUNS else {}
    overrides += hydra.files if command in commands.STARTS_RUNS else []

    def task() -> int:
        with activity(make_console(), "loading fasttrain and PyTorch"):
            if studies:
                from fasttrain.runs import warm

                warm.prepare()  # it imports beside this process
            main = commands.implementation(command)
        with lock_folder(folder, command == "tune" and config.run is not None) if studies else nullcontext():
            code: int = main(config, sources, folder, overrides, **more)
            if studies and config.report and draw_report(folder):
                code = code or EXIT_CRASHED
        return code

    code = hydra.run(job, task, new)
    if command in (*commands.RUNS, *commands.STUDIES) and code == EXIT_STOPPED:
        print(f"stopped; {how_to_continue(folder)}")
    return code


def _sweep(command: str, hydra: Composer, given: UserInput, job: DictConfig, arguments: list[str]) -> int:
    """Run each job of a sweep in a process of its own. Returns the exit code of the sweep."""
    from hydra.core.hydra_config import HydraConfig

    from fasttrain.runs.view import activity, make_console

    own, way = "sweep" * (command == "train"), str(job.on_existing)
    if found := commands.existing_to_resume(own, way, str(job.hydra.sweep.dir), "hydra.sweep.dir"):
        before = read_json(found.folder / "sweep.json").get("arguments")
        if before is not None and sorted(before) != sorted(without_folder(arguments)):
            raise ConfigError(f"{found.about()} of other arguments ({' '.join(before)}): use another folder")
    if message := plugins.missing_text("sweep"):
        raise ConfigError(message)
    with activity(make_console(), "loading fasttrain"):
        sweeps = plugins.load(plugins.COMMANDS, "-m")
    gc.enable()  # __main__ disabled it, and a sweep may last for days
    try:
        config = hydra.configured(given, job)[0]
    except ConfigError:  # settings may fit only the swept algorithms or envs
        config = hydra.configured(given._replace(overrides=sweeps.first_cell(given.overrides)))[0]
    sweep = sweeps.Sweep(command, arguments, make_console(), given.overrides, hydra.files, way, config)

    def cell(_: object) -> int:
        try:
            return int(sweep.run_cell(HydraConfig.get()))
        except Exception as error:
            raise sweeps.SweepEnd from error

    try:
        if job.hydra.launcher._target_ == sweeps.USUAL:
            hydra.sweep(given, cell)
        else:
            sweep.launch(job.hydra, lambda task: hydra.sweep(given, task))
    except sweeps.SweepEnd as end:
        if end.__cause__ is not None:
            raise end.__cause__ from None
        sweep.stopped = True
    except KeyboardInterrupt:
        if not sweep.cells:
            raise
        sweep.stopped = True
    code = int(sweep.finish())
    if draw_report(sweep.folder or Path()):
        code = code or EXIT_CRASHED
    if code == EXIT_STOPPED:
        print(sweep.way_on())
    return code


def draw_report(folder: Path) -> str:
    """Write report.html. If that fails, only warn, because all other files are saved. Returns the reason, or ""."""
    from fasttrain.runs.view import activity, make_console, say

    console = make_console()
    try:
        with activity(console, "drawing report.html"):
            page = plugins.load(plugins.COMMANDS, "report").write_report(folder)
        say(console, f"report: {terminal.near(page)}")
        return ""
    except (Exception, KeyboardInterrupt) as error:
        reason = "interrupted" if isinstance(error, KeyboardInterrupt) else f"{type(error).__name__}: {error}"
        again = f"{terminal.command()} report run={folder} tries again"
        terminal.tell(f"fasttrain: warning: no report.html ({reason}); all other files are saved, and {again}")
        return reason
