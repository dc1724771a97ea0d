"""python -m benchmarks list | run WORK… | guard --against REV | report FILE | account [JOB…]

run: WORK is a name, the beginning of several (`ppo`), or `all`. Results are appended to a file, a JSON line a work.
guard: two revisions of fasttrain in turn; exit code 1 where the first is slower beyond doubt.
report: a file of results as a page, benchmarks/reports/DATE-NAME.md.
account: what trainings must cost on this machine and what they cost, as a page.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks import account, guard, machine, report, runner, work


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="all works")
    run = commands.add_parser("run", help="measure works")
    run.add_argument("works", nargs="+", metavar="WORK")
    run.add_argument("--peers", action="store_true", help="also other libraries, in environments of their own")
    run.add_argument("--against", type=Path, metavar="CHECKOUT", help="also another checkout of fasttrain")
    guards = commands.add_parser("guard", help="measure two revisions in turn")
    guards.add_argument("works", nargs="*", metavar="WORK", help="default: those of the speed targets")
    guards.add_argument("--against", required=True, metavar="REV")
    guards.add_argument("--revision", default="HEAD", metavar="REV", help="default: HEAD")
    run.add_argument("--narrow", action="store_true", help="with the instructions of a processor that has AVX2 alone")
    for command in (run, guards):
        command.add_argument("--repeats", type=int, default=5)
        command.add_argument("--json", type=Path, help="file of results (default: outputs/benchmarks/DATE.jsonl)")
    commands.add_parser("report", help="a page of results").add_argument("file", type=Path)
    jobs = commands.add_parser("account", help="needed and spent time of trainings, as a page")
    jobs.add_argument("jobs", nargs="*", metavar="JOB")
    one = commands.add_parser("one")  # a measurement in this process; `run` starts it
    for name in ("work", "measurement", "turn"):
        one.add_argument(name)
    options = parser.parse_args(arguments)
    if options.command == "list":
        for found in work.every_work().values():
            print(f"{found.name:<28} {found.target:<4} {found.text}")
    elif options.command == "one":
        chosen = work.every_work().get(options.work)
        measurement = chosen.measurements.get(options.measurement) if chosen else None
        if chosen is None or measurement is None:
            print(json.dumps({"skipped": "this checkout has no such measurement"}))
        else:
            print(json.dumps(measurement(int(options.turn)) if chosen.seeded else measurement()))
    elif options.command == "account":
        if unknown := [job for job in options.jobs if job not in account.JOBS]:
            raise SystemExit(f"no job {unknown[0]}; there are {', '.join(account.JOBS)}")
        print(account.write(options.jobs, partial(print, flush=True)))
    elif options.command == "report":
        print(report.write(options.file))
    else:
        return _measure(options, arguments)
    return 0


def _measure(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    if options.repeats < 1:
        raise SystemExit("--repeats must be at least 1")
    file = options.json or machine.ROOT / "outputs" / "benchmarks" / f"{datetime.date.today()}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    os.environ |= machine.NARROW if getattr(options, "narrow", False) else {}
    about = machine.about(arguments)
    results, say = [], partial(print, flush=True)

    def store(result: dict[str, object]) -> None:
        results.append(result)
        with file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({**about, **result}) + "\n")

    works = work.chosen(options.works) if options.works else guard.guarded()
    if options.command == "guard":
        for result in guard.guard(options.revision, options.against, works, options.repeats, say):
            store(result)
    else:
        for found in works:
            say(found.name)
            sides = runner.sides_of(found, options.peers, options.against)
            store(runner.run(found, sides, options.repeats, say))
            say("\n".join(report.section(results[-1])))
    say(f"stored; `python -m benchmarks report {file}` makes a page of it")
    return 1 if any(result.get("verdict") == "slower" for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
