"""Wrong inputs: each must end with code 2 and one line that names what is wrong, and none may be taken.

Here is what a case is and how it is tried, and the cases that are made from the declared settings: every key with a
wrong type, out of range, misspelt, of another algorithm or command, and from the environment. What fits a type is
said here once more (`TAKES`), apart from `fasttrain.spec.setting`: tested code cannot be the test.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints
from unittest import mock

from fasttrain.cli.commands import COMMANDS, OWNERS
from fasttrain.spec.algorithms import ALGORITHMS
from fasttrain.spec.checks import FLAGS, SCHEDULES, ranges
from fasttrain.spec.config import ALGO_CLASSES, Config
from fasttrain.spec.precedence import PREFIX
from fasttrain.spec.reading import all_keys

Prepare = Callable[[Path, Callable[[], Path]], None]  # the case's working directory, what trains a run once

Content = str | bytes


class Case(NamedTuple):
    """One wrong input."""

    kind: str
    arguments: tuple[str, ...]
    named: tuple[str, ...]  # one of them is in the message's first line
    environment: tuple[tuple[str, str], ...] = ()
    prepare: Prepare | None = None
    codes: tuple[int, ...] = (2,)

    def __str__(self) -> str:
        before = [f"{name}={value}" for name, value in self.environment]
        return " ".join([f"[{self.kind}]", *before, "fasttrain", *map(ascii_only, self.arguments)])


def ascii_only(text: str) -> str:
    """As it can be stored and shown."""
    return text if text.isprintable() and len(text) < 200 else ascii(text[:200])


def with_files(contents: dict[str, Content]) -> Prepare:
    """These files, in the working directory."""

    def prepare(folder: Path, _: Callable[[], Path]) -> None:
        for name, content in contents.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return prepare


class Ended(NamedTuple):
    """What an input came to."""

    code: int | None  # None: it hung, was taken, or raised
    text: str  # all that was printed
    how: str = ""  # accepted, hung, raised …


MOST_S = 60.0  # of one case; the first ones load PyTorch


class Accepted(BaseException):
    """The input was taken: training would begin now. No `Exception`, which the runs' own handlers would keep."""


class TooLong(BaseException):
    """The time limit of one case."""


def judged(case: Case, ended: Ended) -> str:
    """What is wrong about it; empty if nothing is."""
    lines = [line for line in ended.text.splitlines() if "fasttrain: error: " in line]
    lines = lines or [line for line in ended.text.splitlines() if "illegal" in line or line.startswith("Checkup of")]
    if ended.how:
        return f"{ended.how}: {_last(ended.text)}" if ended.text.strip() else ended.how
    if "Traceback" in ended.text:
        return f"traceback: {_last(ended.text)}"
    if ended.code not in case.codes:
        return f"exit code {ended.code}, not {' or '.join(map(str, case.codes))}: {_last(ended.text)}"
    if case.named and not lines:
        return f"wordless: {_last(ended.text)}"
    if case.named and not any(name in lines[0] for name in case.named):
        return f"does not name {' or '.join(case.named)}: {lines[0]}"
    return ""


def _last(text: str) -> str:
    return next((line.strip()[:300] for line in reversed(text.splitlines()) if line.strip()), "")


@contextmanager
def caught() -> Iterator[Callable[[], str]]:
    """What this process and its children print meanwhile, down to the file descriptors."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    with tempfile.TemporaryFile() as file:
        try:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            with (
                open(1, "w", encoding="utf-8", closefd=False, buffering=1) as out,
                open(2, "w", encoding="utf-8", closefd=False, buffering=1) as err,
                mock.patch.object(sys, "stdout", out),
                mock.patch.object(sys, "stderr", err),
            ):

                def said() -> str:
                    out.flush()
                    err.flush()
                    end = file.seek(0, os.SEEK_END)
                    return os.pread(file.fileno(), end, 0).decode("utf-8", "replace")

                yield said
        finally:
            for fd, saved in enumerate(kept, 1):
                os.dup2(saved, fd)
                os.close(saved)


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """`TooLong` is raised when the time is over; where no signal can be caught there is no limit."""
    if not hasattr(signal, "SIGALRM") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def over(*_: Any) -> None:
        raise TooLong

    previous = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


@contextmanager
def no_training() -> Iterator[None]:
    """Whatever would take minutes raises `Accepted` instead: an input that comes so far was taken."""
    from fasttrain.runs import resume, train
    from fasttrain.studies import doctor, study

    def accepted(*arguments: Any, **_: Any) -> None:
        if arguments and isinstance(arguments[0], train.Parts):
            arguments[0].model.logger.close()
            arguments[0].env.close()
        raise Accepted

    places = ((train, "carry_out"), (resume, "carry_out"), (study, "run_cell"), (doctor, "run_cell"))
    with mock.patch.object(doctor.Doctor, "examine", accepted):
        patches = [mock.patch.object(module, name, accepted) for module, name in places]
        for patch in patches:
            patch.start()
        try:
            yield
        finally:
            for patch in patches:
                patch.stop()


def in_this_process(case: Case, folder: Path, trained: Callable[[], Path]) -> Ended:
    """`fasttrain.cli.main` on the case, in an empty working directory."""
    from fasttrain import cli
    from fasttrain.spec.checks import FLAGS

    def told(error: BaseException, report: Callable[[BaseException], int] = cli._report_users) -> int:
        if isinstance(error, (Accepted, TooLong)):  # of this file, and so of a user's code
            raise error
        return report(error)

    environment = {
        name: value for name, value in os.environ.items() if name.lower() not in {flag.name for flag in FLAGS}
    }
    before, path = Path.cwd(), list(sys.path)
    folder.mkdir(parents=True)
    if case.prepare:
        case.prepare(folder, trained)
    os.chdir(folder)
    try:
        with caught() as said, mock.patch.dict(os.environ, {**environment, **dict(case.environment)}, clear=True):
            code, how = None, ""
            try:
                with no_training(), limited(MOST_S), mock.patch.object(cli, "_report_users", told):
                    code = cli.main(list(case.arguments))
            except Accepted:
                how = "accepted"
            except TooLong:
                how = f"hung for {MOST_S:g} s"
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 1
            except BaseException as error:
                how = f"raised {type(error).__name__}: {error}"
            return Ended(code, said(), how)
    finally:
        os.chdir(before)
        sys.path[:] = path
        shutil.rmtree(folder, ignore_errors=True)


# --- made from the declared settings

ENV = ("env.id=CartPole-v1", "vec_env=dummy", "num_envs=1", "total_timesteps=8", "report=false")
VALUES = ("abc", "3", "1.5", "true", "null", "[1,2]", "[a]", "{a: 1}", "nan", "inf")
TAKES = {int: {"3"}, float: {"3", "1.5"}, bool: {"true"}, str: {"abc"}, type(None): {"null"}, Any: set(VALUES)}
LISTS, MAPPINGS = {"[1,2]": "3", "[a]": "abc"}, {"{a: 1}": "3"}  # and what their items are
MAY_BE_NEGATIVE = ("stop.at_reward", "gate.threshold", "algo.target_entropy")
# null: the game's or the algorithm's own value.
MAY_BE_NULL = ("total_timesteps", "eval.episodes", "algo.learning_rate", "algo.n_epochs", "algo.rollout_size")


def takes(hint: Any, value: str) -> bool:
    """Whether a setting of that type may have the value."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(takes(part, value) for part in parts)
    if origin is Literal:
        return value in parts or (value == "true" and "on" in parts)
    if origin is tuple:
        return value in LISTS and takes(parts[0], LISTS[value])
    if origin is dict:
        return value in MAPPINGS and takes(parts[1], MAPPINGS[value])
    return not is_dataclass(hint) and value in TAKES[hint]


def parts_of(key: str, hint: Any) -> Iterator[tuple[str, Any]]:
    """The key with its type, and those of its parts."""
    yield key, hint
    if is_dataclass(hint):
        below = get_type_hints(hint)
        for part in fields(hint):
            yield from parts_of(f"{key}.{part.name}", below[part.name])


def declared() -> dict[str, tuple[Any, tuple[str, ...]]]:
    """Dotted key → its type, and the algorithms that have it."""
    found: dict[str, tuple[Any, tuple[str, ...]]] = {}
    every = tuple(ALGO_CLASSES)
    hints = get_type_hints(Config)
    for field in fields(Config):
        hint = hints[field.name]
        if field.name != "algo":
            found |= {key: (hint, every) for key, hint in parts_of(field.name, hint)}
    for algo, cls in ALGO_CLASSES.items():
        below = get_type_hints(cls)
        for part in fields(cls):
            key = f"algo.{part.name}"
            hint, algos = found.get(key, (below[part.name], ()))  # of the first algorithm, by which it is tried
            found[key] = hint, (*algos, algo)
    return found


def base(algo: str) -> tuple[str, ...]:
    """A run of that algorithm in which everything else is right."""
    spec = ALGORITHMS[algo]
    env = ("env.id=Pendulum-v1", *ENV[1:]) if spec.actions == ("Box",) else ENV
    return (*env, f"algo={'ppo' if spec.masks == 'must' else algo}")  # CartPole has no masks


def settings(seed: int) -> Iterator[Case]:
    """All of them; `seed` chooses the misspellings."""
    rng = random.Random(seed)
    every = declared()
    missing = set(all_keys()) - every.keys() - {"profile", "tuned", "algo"}
    if missing:
        raise SystemExit(f"no type known of {', '.join(sorted(missing))}")
    for key, (hint, algos) in every.items():
        start = base(algos[0])
        yield from of_type(key, hint, start)
        yield from out_of_range(key, hint, start)
        yield from misspelt(key, start, rng, every)
        for algo in ALGO_CLASSES:
            if algo not in algos:
                for plus in ("", "++"):
                    yield Case("other algorithm", (*ENV, f"algo={algo}", f"{plus}{key}=3"), (key,))
    yield from flags()
    yield from other_commands()


def of_type(key: str, hint: Any, start: tuple[str, ...]) -> Iterator[Case]:
    wrong = [text for text in VALUES if not takes(hint, text) and not (text == "null" and key in MAY_BE_NULL)]
    for value in wrong:
        yield Case("wrong type", (*start, f"{key}={value}"), (key,))
    yield Case("no value", (*start, key), (key,))
    yield Case("no value", (*start, f"{key}="), (key,))
    for plus in ("+", "++"):
        yield from (Case("plus", (*start, f"{plus}{key}={value}"), (key,)) for value in wrong[:1])


def out_of_range(key: str, hint: Any, start: tuple[str, ...]) -> Iterator[Case]:
    if not (takes(hint, "3") or takes(hint, "1.5")) or get_origin(hint) is dict or hint is Any:
        return
    low, high = ranges(Config).get(key, (None, None))
    beyond = [] if key in MAY_BE_NEGATIVE else ["-1", "-1000000"]
    if low is not None:
        beyond.append(f"{low - 1:g}")
    if high is not None:
        beyond.append(f"{high + 1:.0f}")
    if key in SCHEDULES:
        beyond += ["0", "linear_-1", "linear_abc", "linear_"]
    for value in dict.fromkeys(beyond):
        yield Case("out of range", (*start, f"{key}={value}"), (key,))


def misspelt(key: str, start: tuple[str, ...], rng: random.Random, known: dict[str, Any]) -> Iterator[Case]:
    for plus in ("", "++"):
        head, _, name = key.rpartition(".")
        at = rng.randrange(len(name))
        letter = rng.choice("abcdefghijklmnopqrstuvwxyz_")
        spelt = rng.choice((name[:at] + name[at + 1 :], name[:at] + letter + name[at:], name.upper(), name + "s"))
        wrong = f"{head}.{spelt}" if head else spelt
        if spelt and wrong not in known and wrong not in ("hydra", "algo", "profile"):
            yield Case("misspelt", (*start, f"{plus}{wrong}=3"), (wrong,))


def flags() -> Iterator[Case]:
    for flag in FLAGS:
        names = (flag.name, f"{PREFIX}{flag.name.upper()}")
        for value in ("abc", "-1", "[1", "a=b", "${nothing}"):
            variable = ((names[1], value),)
            start = base("ppo" if flag.fits(ALGORITHMS["ppo"]) else "dqn")
            untyped = tuple(text for text in start if not text.startswith(f"{flag.name}="))
            yield Case("environment", untyped, names, variable)
        for algo, spec in ALGORITHMS.items():
            unfit = not flag.fits(spec) or (not spec.has_fast and flag.ours)
            if unfit:
                value = {"prefetch": "on"}.get(flag.name)
                value = value or ("true" if isinstance(flag.stock, bool) else "on" if flag.stock == "off" else "7")
                yield Case("other algorithm", (*base(algo), f"{flag.name}={value}"), (flag.name,))


def other_commands() -> Iterator[Case]:
    for owned, owner in OWNERS.items():
        key = next(name for name in declared() if name == owned or (name.startswith(owned) and owned.endswith(".")))
        hint = declared()[key][0]
        value = next((text for text in VALUES if takes(hint, text)), None) or str(get_args(hint)[-1])
        for command in COMMANDS:
            if command not in (*owner.commands, "new"):  # that takes a folder and says so
                yield Case("other command", (command, *ENV, "algo=ppo", f"{key}={value}"), (key,))
