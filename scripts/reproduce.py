#!/usr/bin/env python3
"""Every figure and table of README.md and docs/*.md, measured again: python3 scripts/reproduce.py [--only NAME …]

Without more it runs what makes each entry's data, which is stored as JSON (and pictures) in docs/results/ with machine,
versions and command; all of it takes hours. Runs of scripts/learning.py that are stored are not run again: delete
docs/results/learning/TASK.json for that.

  --list    the entries, how long each takes, how old its data are
  --show    what the stored data render to; runs nothing
  --check   fails where a page differs from that, or has measured figures outside of the entries' blocks
  --write   fills the pages from the stored data: each block between <!-- results: NAME --> and <!-- end -->

--only NAME … restricts any of these to some entries.
"""

# fmt: off
import sys

# An older Python must be able to parse this file to reach the message.
if sys.version_info < (3, 10):  # noqa: UP036
    sys.stderr.write("fasttrain needs Python 3.10 or newer, this is " + sys.version.split()[0] + "\n")
    sys.exit(2)
# fmt: on

import argparse
import datetime
import difflib
import functools
import json
import re
import shlex
import subprocess
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
BARE = find_spec("fasttrain") is None and Path(sys.prefix) != ROOT / ".venv"
if __name__ == "__main__" and BARE:  # go on in the checkout's own .venv
    import _bootstrap

    sys.exit(_bootstrap.run_script(Path(__file__), sys.argv[1:]))

import rendering  # noqa: E402 - needs numpy
import rendering_checks  # noqa: E402
import rendering_engines  # noqa: E402
import rendering_faults  # noqa: E402
import rendering_home  # noqa: E402
import rendering_recurrent  # noqa: E402
import rendering_studies  # noqa: E402

RESULTS = ROOT / "docs" / "results"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
BREAK = "\f"  # between one page and the next, where they are one text
BLOCK = re.compile(r"<!-- results: ([\w-]+) -->\n(.*?)\n?<!-- end -->", flags=re.DOTALL)
# A rate, a ratio or a win rate: what is measured belongs into a block, where it cannot go stale unseen.
LOOSE = re.compile(r"\d (?:steps|samples|decisions|rounds)/s|\d×|\bwin(?:s|ning)? (?:rate \w+ )?\d|\d minutes on ")


class Entry(NamedTuple):
    """One block of a page."""

    name: str
    files: tuple[str, ...]  # in docs/results, that it is rendered from
    commands: tuple[str, ...]  # that make them
    minutes: float  # on two cores
    render: Callable[[rendering.Load], str]


BENCHMARK = "python3 scripts/benchmark.py"
LEARNING = "python3 scripts/learning_engines.py"
ENTRIES = (
    Entry("first-run", ("first-run.json",), ("python3 scripts/captures.py first-run",), 1, rendering.first_run),
    Entry(
        "skirmish-learning",
        ("skirmish-learning.json",),
        ("python3 scripts/captures.py skirmish-learning",),
        15,
        rendering.skirmish_learning,
    ),
    Entry("checkup", ("checkup.json",), ("python3 scripts/captures.py checkup",), 0.1, rendering.checkup),
    Entry("workers", ("workers.json",), ("python3 scripts/captures.py workers",), 0.1, rendering.workers),
    Entry("auto", ("auto.json",), (f"{BENCHMARK} auto --repeats 2",), 100, rendering_checks.auto),
    Entry(
        "stock-suites", ("stock_suites.json",), ("python3 scripts/stock_suites.py",), 10, rendering_checks.stock_suites
    ),
    Entry("compare", ("compare.json",), ("python3 scripts/captures.py compare",), 20, rendering_studies.compare),
    Entry("ablate", ("ablate.json",), ("python3 scripts/captures.py ablate",), 10, rendering_studies.ablate),
    Entry("tune", ("tune.json",), ("python3 scripts/captures.py tune",), 5, rendering_studies.tune),
    Entry(
        "limits",
        tuple(f"limits/{name}.json" for name in rendering_studies.EXAMINED),
        (f"{BENCHMARK} limits --repeats 3",),
        30,
        rendering_studies.limits,
    ),
    Entry("faults", ("faults.json",), ("python3 scripts/faults.py",), 75, rendering_faults.faults),
    Entry(
        "wrong-inputs", ("wrong_inputs.json",), ("python3 scripts/wrong_inputs.py",), 15, rendering_checks.wrong_inputs
    ),
    Entry("export", ("first-run.json",), ("python3 scripts/captures.py first-run",), 1, rendering.export),
    Entry(
        "speed",
        tuple(f"{name}.json" for name in rendering.speed_works()),
        (
            f"{BENCHMARK} skullking",
            f"{BENCHMARK} ppo-update --repeats 3",
            f"{BENCHMARK} ppo-cartpole --repeats 1 --peers",
            f"{BENCHMARK} dqn --repeats 3",
            f"{BENCHMARK} per --repeats 3 --peers",
            f"{BENCHMARK} vecenv-collect",
            f"{BENCHMARK} vecenv-wargame",
            f"{BENCHMARK} vecenv-auto",
            f"{BENCHMARK} vecenv-step --repeats 3",
            f"{BENCHMARK} groups --repeats 3",
            f"{BENCHMARK} skirmish --repeats 3",
        ),
        120,
        rendering.speed,
    ),
    Entry(
        "speed-figure",
        ("ppo.png",),
        (f"{BENCHMARK} plot",),
        0.1,
        rendering.picture("docs/results/ppo.png", "Training speed beside other frameworks"),
    ),
    Entry(
        "learning-ppo",
        tuple(sorted({f"learning/{task}.json" for task, _ in rendering.PPO})),
        (
            "python3 scripts/learning.py --tasks ppo",
            "python3 scripts/learning.py --tasks lunarlander --seeds 11",
            "python3 scripts/learning.py --tasks skullking-short --sides baseline,balance",
        ),
        120,
        rendering.learning_ppo,
    ),
    Entry(
        "learning-dqn",
        tuple(sorted({f"learning/{task}.json" for task, _ in rendering.DQN})),
        (
            "python3 scripts/learning.py --tasks dqn",
            "python3 scripts/learning.py --tasks dqn-cartpole --seeds 16",
            "python3 scripts/learning.py --tasks dqn-lunarlander --sides baseline,double-per",
        ),
        90,
        rendering.learning_dqn,
    ),
    Entry(
        "memory-speed",
        rendering_recurrent.SPEED_FILES,
        (f"{BENCHMARK} recurrent --repeats 3 --peers",),
        25,
        rendering_recurrent.speed,
    ),
    Entry(
        "learning-memory",
        rendering_recurrent.FILES,
        ("python3 scripts/learning_recurrent.py all",),
        240,
        rendering_recurrent.learned,
    ),
    Entry("zoo-tuned", ("zoo-tuned.json",), ("python3 scripts/zoo.py tuned",), 12, rendering_home.tuned),
    Entry("zoo-entries", ("zoo-entries.json",), ("python3 scripts/zoo.py entries",), 45, rendering_home.entries),
    Entry(
        "zoo-figure",
        ("zoo-tuned.png",),
        (f"{BENCHMARK} plot",),
        0.1,
        rendering.picture(
            "results/zoo-tuned.png", "Training curves of the tuned settings, three seeds: median and range"
        ),
    ),
    Entry(
        "home-vector", ("home-vector-64.json",), (f"{BENCHMARK} home-vector-64 --repeats 3",), 5, rendering_home.vector
    ),
    Entry(
        "home-pong",
        ("home-pong-ppo.json", "home-pong-dqn.json"),
        (f"{BENCHMARK} home-pong --repeats 1",),
        20,
        rendering_home.pong,
    ),
    Entry(
        "daemons",
        tuple(f"{name}.json" for name in rendering_engines.DAEMONS),
        (f"{BENCHMARK} daemons --repeats 3",),
        15,
        rendering_engines.daemons,
    ),
    Entry("go", rendering_engines.stored("go"), (f"{BENCHMARK} go --repeats 1",), 8, rendering_engines.go),
    Entry("go-learning", ("go-5-learning.json",), (f"{LEARNING} go --minutes 25",), 26, rendering_engines.go_learning),
    Entry(
        "go-9-learning",
        ("go-9-learning.json",),
        (f"{LEARNING} go --size 9 --minutes 98 --games 80",),
        80,
        functools.partial(rendering_engines.go_learning, size=9),
    ),
    Entry(
        "showdown",
        rendering_engines.stored("showdown"),
        (f"{BENCHMARK} showdown --repeats 1",),
        8,
        rendering_engines.showdown,
    ),
    Entry(
        "showdown-learning",
        ("showdown-learning.json",),
        (f"{LEARNING} showdown --minutes 60",),
        45,
        rendering_engines.showdown_learning,
    ),
    Entry(
        "showdown-legal",
        ("showdown-legal.json",),
        (f"{LEARNING} legal --of showdown",),
        30,
        rendering_engines.showdown_legal,
    ),
    Entry(
        "daemons-faults",
        ("faults_daemons.json",),
        ("python3 scripts/faults_daemons.py",),
        10,
        rendering_engines.daemon_faults,
    ),
    Entry(
        "home-trackers",
        ("home-trackers.json",),
        (f"{BENCHMARK} home-trackers --repeats 3",),
        5,
        rendering_home.trackers,
    ),
    Entry(
        "learning-figure",
        ("learning.png",),
        (f"{BENCHMARK} plot",),
        0.1,
        rendering.picture(
            "results/learning.png", "Training curves of stock and speed, median and middle half of the seeds"
        ),
    ),
    Entry(
        "masks",
        ("masks.json",),
        ("python3 scripts/sample_masks.py --json docs/results/masks.json",),
        5,
        rendering.masks,
    ),
    Entry(
        "faster-settings",
        ("faster-settings.json",),
        ("python3 scripts/bench_settings.py",),
        5,
        rendering.faster_settings,
    ),
    Entry("start", ("start.json",), (f"{BENCHMARK} start --repeats 3",), 10, rendering.start),
)


# --- blocks


def rendered(entries: Iterable[Entry], folder: Path) -> dict[str, str]:
    """Markdown of each entry.

    Raises:
        SystemExit: data are missing, or do not have what is asked of them.
    """
    found = {}
    for entry in entries:
        missing = [name for name in entry.files if not (folder / name).exists()]
        if missing:
            raise SystemExit(f"{entry.name}: {', '.join(missing)} not in {folder.name}; run --only {entry.name}")
        try:
            found[entry.name] = entry.render(rendering.loader(folder))
        except (KeyError, IndexError, ValueError, TypeError) as error:
            told = f"{entry.name}: its data cannot be rendered: {error!r}; run --only {entry.name}"
            raise SystemExit(told) from error
    return found


def read_pages() -> str:
    """All of them as one text."""
    return BREAK.join(page.read_text(encoding="utf-8") for page in PAGES)


def filled(pages: str, blocks: dict[str, str]) -> str:
    """The pages with those blocks' contents.

    Raises:
        SystemExit: a block is missing, there twice, or of no entry.
    """
    names = BLOCK.findall(pages)
    there = [name for name, _ in names]
    for name in blocks:
        if there.count(name) != 1:
            raise SystemExit(
                f"the pages have {there.count(name)} blocks <!-- results: {name} --> … <!-- end -->, not one"
            )
    if foreign := sorted(set(there) - {entry.name for entry in ENTRIES}):
        raise SystemExit(f"the pages: no entry makes {', '.join(foreign)}; the entries are in scripts/reproduce.py")

    def fill(match: re.Match[str]) -> str:
        name, before = match[1], match[2]
        return f"<!-- results: {name} -->\n{blocks.get(name, before)}\n<!-- end -->"

    return BLOCK.sub(fill, pages)


def problems(pages: str, blocks: dict[str, str]) -> list[str]:
    """Where the pages differ from the stored data, and measured figures that no data stand behind."""
    wanted = filled(pages, blocks)
    changed = difflib.unified_diff(pages.splitlines(), wanted.splitlines(), "pages", "stored", n=0, lineterm="")
    found = [line for line in changed if not line.startswith("@@")]
    loose = [line.strip() for line in BLOCK.sub("", pages).splitlines() if LOOSE.search(line)]
    return found + [f"measured, but in no block: {line}" for line in loose]


# --- running and listing


def age_days(path: Path, today: datetime.date) -> int | None:
    """By `measured` in the file, else by git; None where neither says."""
    if not path.exists():
        return None
    day = json.loads(path.read_text(encoding="utf-8")).get("measured") if path.suffix == ".json" else None
    if day is None:
        command = ["git", "log", "-1", "--follow", "--diff-filter=AM", "--format=%cs", "--"]
        try:
            day = subprocess.run(
                [*command, path.name], cwd=path.parent, capture_output=True, text=True, check=True
            ).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            day = ""
    return (today - datetime.date.fromisoformat(day)).days if day else None


def listing(entries: Sequence[Entry], folder: Path, today: datetime.date) -> list[str]:
    """A line an entry: name, minutes, age of the oldest of its data, commands."""
    lines = []
    for entry in entries:
        missing = sum(not (folder / name).exists() for name in entry.files)
        ages = [age for age in (age_days(folder / name, today) for name in entry.files) if age is not None]
        stored = f"{missing} of {len(entry.files)} files missing" if missing else _days(max(ages, default=None))
        takes = f"{entry.minutes:g} min" if entry.minutes >= 1 else f"{60 * entry.minutes:.0f} s"
        lines.append(f"{entry.name:<19}{takes:>8}   {stored:<24}{'; '.join(entry.commands)}")
    return lines


def _days(age: int | None) -> str:
    if age is None:
        return "of unknown age"
    return "measured today" if age == 0 else f"measured {age} day{'s' if age != 1 else ''} ago"


def run(entries: Sequence[Entry]) -> None:
    """Every command once, one after another.

    Raises:
        SystemExit: one failed.
    """
    done: set[str] = set()
    for entry in entries:
        for command in entry.commands:
            if command in done:
                continue
            done.add(command)
            print(f"== {entry.name}: {command}", flush=True)
            _, *arguments = shlex.split(command)
            code = subprocess.run([sys.executable, *arguments], cwd=ROOT).returncode
            if code:
                raise SystemExit(f"{command}: exit code {code}")


def chosen(names: Sequence[str] | None) -> list[Entry]:
    """Those entries, in the order of the list; all without names."""
    return [entry for entry in ENTRIES if names is None or entry.name in names]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[entry.name for entry in ENTRIES], metavar="NAME")
    for name in ("list", "show", "check", "write"):
        parser.add_argument(f"--{name}", action="store_true")
    options = parser.parse_args(arguments)
    entries = chosen(options.only)
    if options.list:
        print("\n".join(listing(entries, RESULTS, datetime.date.today())))
        return 0
    if not (options.show or options.check or options.write):
        print(f"{len(entries)} entries, about {sum(entry.minutes for entry in entries):.0f} minutes", flush=True)
        run(entries)
    blocks = rendered(entries, RESULTS)
    if options.write:
        for page, text in zip(PAGES, filled(read_pages(), blocks).split(BREAK), strict=True):
            page.write_text(text, encoding="utf-8")
    elif options.check:
        found = problems(read_pages(), blocks)
        print("\n".join(found) or "README.md and docs/ say what is stored")
        return 1 if found else 0
    else:
        for name, text in blocks.items():
            print(f"<!-- results: {name} -->\n{text}\n<!-- end -->\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
