"""Wrong inputs: each must end with code 2 and one line that names what is wrong, and none may be taken.

Here is what a case is and how it is tried, and the cases that are made from the declared settings: every key with a
wrong type, out of range, misspelt, of another algorithm, and from the environment. A key of another command:
tests/cli/test_commands.py.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints
from unittest import mock

from fasttrain import cli
from fasttrain.spec.algorithms import ALGORITHMS
from fasttrain.spec.checks import FLAGS, SCHEDULES
from fasttrain.spec.config import ALGO_CLASSES, Config
from fasttrain.spec.precedence import PREFIX
from fasttrain.spec.reading import all_keys
from fasttrain.spec.setting import Setting, settings_of

Prepare = Callable[[Path], None]  # of the case's working directory
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

    def prepare(folder: Path) -> None:
        for name, content in contents.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return prepare


MOST_S = 60.0  # of one case; the first ones load PyTorch


class Accepted(BaseException):
    """The input was taken: training would begin now. No `Exception`, which the runs' own handlers would keep."""


class TooLong(BaseException):
    """The time limit of one case."""


def judged(case: Case, code: int | str | None, text: str) -> str:
    """What is wrong about how it ended and what it printed; empty if nothing is."""
    told = text.splitlines()
    lines = [line for line in told if "fasttrain: error: " in line]
    lines = lines or [line for line in told if "illegal" in line or line.startswith("Checkup of")]
    last = next((line.strip()[:300] for line in reversed(told) if line.strip()), "")
    if "Traceback" in text:
        return f"traceback: {last}"
    if code not in case.codes:
        return f"{code}, not {' or '.join(map(str, case.codes))}: {last}"
    if case.named and not lines:
        return f"wordless: {last}"
    if case.named and not any(name in lines[0] for name in case.named):
        return f"does not name {' or '.join(case.named)}: {lines[0]}"
    return ""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """`TooLong` is raised when the time is over."""

    def over(*_: Any) -> None:
        raise TooLong

    previous = signal.signal(signal.SIGALRM, over)
    before = signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *before)  # the test's own limit
        signal.signal(signal.SIGALRM, previous)


@contextmanager
def no_training() -> Iterator[None]:
    """Whatever would take minutes raises `Accepted` instead: an input that comes so far was taken."""
    from fasttrain.runs import resume, train
    from fasttrain_studies import doctor, study

    def accepted(*arguments: Any, **_: Any) -> None:
        if arguments and isinstance(arguments[0], train.Parts):
            arguments[0].model.logger.close()
            arguments[0].env.close()
        raise Accepted

    places = ((train, "train_to_end"), (resume, "train_to_end"), (study, "run_cell"), (doctor, "run_cell"),
              (doctor.Doctor, "examine"))  # fmt: skip
    with ExitStack() as patches:
        for place, name in places:
            patches.enter_context(mock.patch.object(place, name, accepted))
        yield


def in_this_process(case: Case, folder: Path, capfd: Any) -> str:
    """What is wrong about `fasttrain.cli.main` of the case, in an empty working directory; empty if nothing is."""

    def told(error: BaseException, report: Callable[[BaseException], int] = cli._report_users) -> int:
        if isinstance(error, (Accepted, TooLong)):  # of this file, and so of a user's code
            raise error
        return report(error)

    environment = {name: value for name, value in os.environ.items() if name.lower() not in {it.name for it in FLAGS}}
    before, path = Path.cwd(), list(sys.path)
    folder.mkdir(parents=True)
    if case.prepare:
        case.prepare(folder)
    os.chdir(folder)
    code: int | str | None = None
    capfd.readouterr()
    try:
        with (
            mock.patch.dict(os.environ, {**environment, **dict(case.environment)}, clear=True),
            mock.patch.object(cli, "_report_users", told),
            no_training(),
            limited(MOST_S),
        ):
            code = cli.main(list(case.arguments))
    except Accepted:
        code = "accepted"
    except TooLong:
        code = f"hung for {MOST_S:g} s"
    except BaseException as error:
        code = getattr(error, "code", f"raised {type(error).__name__}: {error}")
    finally:
        os.chdir(before)
        sys.path[:] = path
        shutil.rmtree(folder, ignore_errors=True)
    return judged(case, code, "".join(capfd.readouterr()))


# --- made from the declared settings

ENV = ("env.id=CartPole-v1", "vec_env=dummy", "num_envs=1", "total_timesteps=8", "report=false")
NUMBERS, SEVERAL = ("int", "float"), ("tuple", "dict", "Any", "Mapping")  # in a type's name
MAY_BE_NEGATIVE = ("stop.at_reward", "gate.threshold", "algo.target_entropy")


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


def of_type(key: str, hint: Any, start: tuple[str, ...]) -> Iterator[Case]:
    name = str(hint)
    wrong = [] if any(word in name for word in ("Any", "dict", "Mapping")) else ["{a: [b]}"]
    if not any(word in name for word in SEVERAL):
        wrong.append("[[a]]")
        if "str" not in name and "Literal" not in name:
            wrong += ["abc", "[1,2]", "nan"]
    for value in ("", *wrong):
        yield Case("wrong type" if value else "no value", (*start, f"{key}={value}"), (key,))
    yield Case("no value", (*start, key), (key,))
    for plus in ("+", "++"):
        yield from (Case("plus", (*start, f"{plus}{key}={value}"), (key,)) for value in wrong[:1])


BOUNDS = {
    key: one.metadata.get("setting", Setting(""))
    for cls, prefix in ((Config, ""), *((it, "algo.") for it in ALGO_CLASSES.values()))
    for key, one in settings_of(cls, prefix, parts=True)
}


def out_of_range(key: str, hint: Any, start: tuple[str, ...]) -> Iterator[Case]:
    name = str(hint)
    if any(word in name for word in SEVERAL) or not any(word in name for word in NUMBERS):
        return
    low, high = BOUNDS.get(key, Setting("")).least, BOUNDS.get(key, Setting("")).most
    negative = [] if key in MAY_BE_NEGATIVE else ["-1", "-1000000"]
    beyond = [value for value in negative if low is None or int(value) < low]
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
            unfit = not flag.fits(spec) or (not spec.fast and flag.ours)
            if unfit:
                value = {"prefetch": "on"}.get(flag.name)
                value = value or ("true" if isinstance(flag.stock, bool) else "on" if flag.stock == "off" else "7")
                yield Case("other algorithm", (*base(algo), f"{flag.name}={value}"), (flag.name,))
