#!/usr/bin/env python3
"""Speed, ours and theirs in turn: python3 scripts/benchmark.py WORK [--repeats 5] [--json FILE] [--peers]

WORK is one of the works below, `all`, `show` (the table of what was measured last, from docs/results/) or `plot`
(its picture, docs/results/ppo.png; needs matplotlib).
Every measurement is a fresh process; ours and each opponent take turns (A B C, A B C, …), so that a machine that slows
down slows all of them; the ratio is taken turn by turn and its median reported. Work that is not equal gets no ratio.

  skullking-step    native Skull King, random legal actions, observations and masks written, against the single-env
                    class in a plain loop and in SB3's DummyVecEnv
  skullking-train   `fasttrain +profile=speed` against stock sb3-contrib MaskablePPO on the single-env class, at
                    the same hyperparameters, envs, steps and updates, in DummyVecEnv: SubprocVecEnv would
                    need 256 processes of 350 MB, and with 64 it was several times slower than DummyVecEnv
  vecenv            all works vecenv-*: SharedMemoryVecEnv against SB3's vector envs and Gymnasium's AsyncVectorEnv:
                    collecting with masks from 64 envs of 100 µs, stepping alone at 8, 64 and 256 envs, and what
                    vec_env=auto takes for CartPole (scripts/bench_vecenv.py)
  groups            all works groups-*: collecting a rollout first-ready against in step
  ppo               skullking-train and all works ppo-* (scripts/bench_ppo.py): the PPO update alone against stock's
                    on the same rollout ([64, 64] at minibatches of 256 and 2,048, and [512, 512, 256]); CartPole end
                    to end with 8 and 64 envs, against SB3 and with --peers against SBX, Tianshou, TorchRL, Sample
                    Factory and a lean loop; [1024, 512, 256] on a GPU. How soon a reward is reached:
                    scripts/learning.py
  recurrent         all works recurrent-* (scripts/bench_recurrent.py): RecurrentPPO on CartPole without velocities
                    against sb3-contrib's and a lean loop; what masks and memory cost in Skull King
  dqn               all works dqn-* (scripts/bench_dqn.py): CartPole end to end with 8 envs and 8 updates a step, and
                    the update alone at batches of 64, and of 256 with Skull King's masks
  sac               all works sac-* (scripts/bench_sac.py): Pendulum and HalfCheetah, an update of 256 a step,
                    against stock and with --peers against SBX
  per               all works per-* (scripts/bench_per.py): drawing 256 transitions by priority and setting theirs,
                    against numpy in O(N) and with --peers against cpprb and TorchRL
  limits            all works limits-*: what `fasttrain doctor` says of Skull King, a 100 µs Python env and DQN CartPole
                    beside measurements that do without it, and its first advice, followed (scripts/bench_limits.py)
  auto              what the profiles `balance` and `speed` choose for 14 kinds of training, quiet and on busy cores,
                    against the better of stock's own choices and against every explicit choice; `--only quiet` measures
                    those whose name (ppo cartpole quiet) holds it (scripts/bench_auto.py)
  start             from the command to the first update of the default job and of CartPole, with an empty cache of
                    compiled kernels and with a full one, and CPU seconds of compiling; with --against CHECKOUT in turn
                    with another checkout (scripts/bench_start.py)
  home              all works home-*: CartPole end to end by its own VectorEnv, by EnvPool and one env after another;
                    Pong beside stock, the default job beside each tracker that is installed (scripts/bench_home.py)
  daemons           all works daemons-*: games with an external engine that sleeps 5 ms a decision, with four engine
                    processes and with 1, 4, 16 and 64 games in flight, against one blocking process per env in
                    SubprocVecEnv; and one that computes, against what it can do (scripts/bench_daemons.py)
  go                all works go-*: GNU Go on 5×5 with 1 to 64 boards, against one blocking process per env in
                    SubprocVecEnv, and against what the engines can do (scripts/bench_engines.py)
  showdown          all works showdown-*: random battles of Pokémon Showdown, 1 to 64 at once, against the same two
                    (scripts/bench_showdown.py)
  skirmish          all works skirmish-* (scripts/bench_skirmish.py): native stepping against the plain Python env, with
                    the planner, without caches, with secondary rewards, and training against itself
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BARE = find_spec("fasttrain") is None and Path(sys.prefix) != ROOT / ".venv"
if __name__ == "__main__" and BARE:  # go on in the checkout's own .venv
    import _bootstrap

    sys.exit(_bootstrap.run_script(Path(__file__), sys.argv[1:], extras=("dev",)))

import bench_auto  # noqa: E402
import bench_daemons  # noqa: E402
import bench_dqn  # noqa: E402
import bench_engines  # noqa: E402
import bench_home  # noqa: E402
import bench_limits  # noqa: E402
import bench_machine  # noqa: E402
import bench_peers  # noqa: E402
import bench_per  # noqa: E402
import bench_plot  # noqa: E402
import bench_ppo  # noqa: E402
import bench_recurrent  # noqa: E402
import bench_sac  # noqa: E402
import bench_showdown  # noqa: E402
import bench_skirmish  # noqa: E402
import bench_skullking  # noqa: E402
import bench_start  # noqa: E402
import bench_vecenv  # noqa: E402
import learning  # noqa: E402

RESULTS = ROOT / "docs" / "results"

PEERS_ONLY = bench_ppo.PEERS_ONLY | bench_per.PEERS_ONLY | bench_sac.PEERS_ONLY
Measurement = Callable[[], dict[str, Any]]  # rate, env_steps, updates, samples_per_update, …; in its own process
WORKS: dict[str, dict[str, Measurement]] = {
    **bench_skullking.WORKS,
    **bench_vecenv.WORKS,
    **bench_ppo.WORKS,
    **bench_recurrent.WORKS,
    **bench_dqn.WORKS,
    **bench_sac.WORKS,
    **bench_per.PER_WORKS,
    **bench_skirmish.WORKS,
    **bench_home.WORKS,
    **bench_daemons.WORKS,
    **bench_engines.WORKS,
    **bench_showdown.WORKS,
}
TOGETHER = {"ppo": ["skullking-train"]}  # what a group holds besides the works that begin with its name


def works_of(name: str) -> list[str]:
    """`all`, one work, or the works that begin with `name-`."""
    if name == "all":
        return list(WORKS)
    if name in WORKS:
        return [name]
    return [*TOGETHER.get(name, ()), *(work for work in WORKS if work.startswith(f"{name}-"))]


# --- the harness


def measure(work: str, contestant: str) -> dict[str, Any]:
    """One measurement in a fresh process."""
    command = [sys.executable, __file__, work, "--one", contestant]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{work}, {contestant}: failed\n{done.stderr[-2000:]}{done.stdout[-1000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def run_work(work: str, repeats: int, peers: bool) -> dict[str, Any] | None:
    """All contestants in turn, `repeats` times. None: ours cannot be measured on this machine."""
    ours, *theirs = [name for name in WORKS[work] if peers or name not in PEERS_ONLY]
    samples: dict[str, list[dict[str, Any]]] = {name: [] for name in (ours, *theirs)}
    skipped: dict[str, str] = {}
    long = work in bench_home.LONG  # minutes, and nothing of it is compiled
    reason = None if long else measure(work, ours).get("skipped")  # compiles and fills the disk cache; not counted
    if reason:
        print(f"  skipped: {reason}")
        return None
    for turn in range(repeats):
        for name in [name for name in samples if name not in skipped]:
            sample = measure(work, name)
            if "skipped" in sample:
                skipped[name] = sample["skipped"]
                print(f"  {name}: {skipped[name]}", flush=True)
                continue
            samples[name].append(sample)
            print(f"  turn {turn + 1}/{repeats}  {name:<28} {sample['rate']:>14,.0f} {_unit(sample)}", flush=True)
    result = compared(ours, {name: found for name, found in samples.items() if name not in skipped}, work)
    return {
        "work": work,
        **bench_machine.about(),
        "command": f"python3 scripts/benchmark.py {work} --repeats {repeats}{' --peers' if peers else ''}",
        **result,
        **({"skipped": skipped} if skipped else {}),
    }


def compared(ours: str, samples: dict[str, list[dict[str, Any]]], work: str) -> dict[str, Any]:
    """Medians and ratios. Whoever did other work than ours gets no ratio, and that is said.

    Raises:
        SystemExit: no opponent did the same work.
    """
    equal = {key: samples[ours][0][key] for key in ("env_steps", "updates", "samples_per_update")}
    unequal: dict[str, dict[str, Any]] = {}
    for name, found in samples.items():
        for sample in found:
            done = {key: sample[key] for key in equal}
            if done != equal:
                unequal[name] = done
    theirs = [name for name in samples if name != ours and name not in unequal]
    for name, done in unequal.items():
        print(f"  {name} did other work than ours ({done} against {equal}): no ratio", flush=True)
    if not theirs:
        raise SystemExit(f"{work}: no opponent did the same work: no ratio")
    rates = {name: [sample["rate"] for sample in found] for name, found in samples.items()}
    best = max(theirs, key=lambda name: statistics.median(rates[name]))
    ratios = {name: spread([a / b for a, b in zip(rates[ours], rates[name], strict=True)]) for name in theirs}
    first = samples[ours][0]
    return {
        "unit": first.get("unit", "env steps per second"),
        "ours": spread(rates[ours]),
        "theirs": {name: spread(rates[name]) for name in theirs},
        "best_of_theirs": best,
        "ratio": ratios[best],
        "ratios": ratios,
        "equal_work": equal,
        **({"unequal_work": unequal} if unequal else {}),
        "quality": _by_contestant(samples, "quality"),
        "startup_s": _by_contestant(samples, "startup_s"),
        **{key: _by_contestant(samples, key) for key in ("finish_s", "tracker_share") if key in first},
        "warm_up_s": _by_contestant(samples, "warm_up_s"),
        **{key: _by_contestant(samples, key) for key in ("p95_ms", "games_per_s") if key in first},
        "sample_us": _by_contestant(samples, "sample_us"),
        "update_us": _by_contestant(samples, "update_us"),
        **{
            key: spread([sample[key] for sample in samples[ours]])
            for key in ("covered_share", "share_of_ideal", "gpu_share")
            if first.get(key) is not None
        },
        **{key: first[key] for key in ("chosen", "limits") if key in first},
    }


def _by_contestant(samples: dict[str, list[dict[str, Any]]], key: str) -> dict[str, dict[str, float]]:
    return {name: spread([sample[key] for sample in found]) for name, found in samples.items() if key in found[0]}


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def _unit(result: dict[str, Any]) -> str:
    return result.get("unit", "env steps per second").removeprefix("env ").replace(" per second", "/s")


def show() -> None:
    """The table of all stored results."""
    for path in sorted(RESULTS.glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        if "ratio" in result:  # captures of single runs lie there too
            show_result(result)
    bench_auto.show(RESULTS / "auto.json")
    bench_start.show(RESULTS / "start.json")
    bench_limits.show(RESULTS / "limits")
    learning.show(learning.RESULTS, list(learning.TASKS))


def show_result(result: dict[str, Any]) -> None:
    """One work's lines."""
    ratio, unit, startup = result["ratio"], _unit(result), result.get("startup_s", {})
    print(f"\n{result['work']}  ({result['machine']}; {result['command']})")
    for name, rate in {"fasttrain": result["ours"], **result["theirs"]}.items():
        against = f"{result['ratios'][name]['median']:>9.2f}×" if name in result["ratios"] else " " * 10
        ready = f"   start-up {startup[name]['median']:.1f} s" if name in startup else ""
        if name in result.get("p95_ms", {}):
            ready += f"   P95 of a decision {result['p95_ms'][name]['median']:.1f} ms"
        ready += f", finish {result['finish_s'][name]['median']:.1f} s" if name in result.get("finish_s", {}) else ""
        if name in result.get("tracker_share", {}):
            ready += f", in tracker {100 * result['tracker_share'][name]['median']:.2f} %"
        print(f"  {name:<34}{rate['median']:>14,.0f} {unit}{against}{ready}")
    print(f"  against {result['best_of_theirs']}: {ratio['median']:.2f}× [{ratio['min']:.2f}, {ratio['max']:.2f}]")
    if "covered_share" in result:
        print(f"  [PERF] phases cover {100 * result['covered_share']['min']:.2f} % of the wall time or more")
    if "limits" in result:
        rates = [(key.removesuffix("_only_steps_per_s"), rate) for key, rate in result["limits"].items() if rate]
        print(f"  each part alone: {', '.join(f'{part} {rate:,.0f}' for part, rate in rates)} steps/s")
    if "share_of_ideal" in result:
        low, median, high = (100 * result["share_of_ideal"][key] for key in ("min", "median", "max"))
        print(f"  {median:.0f} % of cores ÷ env time [{low:.0f}, {high:.0f}]")
    if "gpu_share" in result:
        print(f"  GPU busy {100 * result['gpu_share']['median']:.0f} %")
    if result.get("warm_up_s"):
        took = ", ".join(f"{name} {1000 * value['median']:.0f} ms" for name, value in result["warm_up_s"].items())
        print(f"  first update, not counted: {took}")
    for name, sample in result.get("sample_us", {}).items():
        print(f"  {name}: sample {sample['median']:.1f} µs, update {result['update_us'][name]['median']:.1f} µs")
    if isinstance(result.get("chosen"), dict):
        print(f"  ran with {', '.join(f'{key}={value}' for key, value in result['chosen'].items())}")
    elif "chosen" in result:
        print(f"  vec_env=auto took {result['chosen']}")
    for name, reason in result.get("skipped", {}).items():
        print(f"  {name}: {reason}")
    for name, done in result.get("unequal_work", {}).items():
        print(f"  {name}: no ratio, it did other work ({done})")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", help="a work, the beginning of several (ppo), all, show or plot")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="where to write the result (default: docs/results/WORK.json)")
    parser.add_argument("--peers", action="store_true", help="also the opponents that are slow or heavy to run")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="of `start`: another checkout, in turn")
    parser.add_argument("--only", metavar="PART", help="of `auto`: cells whose name holds it")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work in ("limits", *bench_limits.CASES):
        return bench_limits.run(arguments.work, max(1, arguments.repeats), RESULTS / "limits")
    if arguments.work == "auto":
        return bench_auto.run(max(1, arguments.repeats), RESULTS, arguments.only)
    if arguments.work == "start":
        return bench_start.run(max(1, arguments.repeats), RESULTS, arguments.against)
    os.environ.setdefault("FASTTRAIN_ENGINE_SWITCH_AT", "0")  # compile first: what is measured is one engine
    if arguments.work not in ("show", "plot") and not works_of(arguments.work):
        parser.error(f"no work {arguments.work!r}; choose from {', '.join([*WORKS, *TOGETHER])}, all, show, plot")
    if arguments.one:
        print(json.dumps(WORKS[arguments.work][arguments.one]()))
        return 0
    if arguments.work == "show":
        show()
        return 0
    if arguments.work == "plot":
        return bench_plot.draw(RESULTS, learning.RESULTS)
    if arguments.peers:
        for peers, works in ((bench_peers.PEERS, bench_ppo.CARTPOLE), (bench_per.PEERS, bench_per.PER_WORKS)):
            if works.keys() & set(works_of(arguments.work)):
                bench_peers.install(peers)  # here, where its progress can be seen
    for work in works_of(arguments.work):
        print(work, flush=True)
        result = run_work(work, max(1, arguments.repeats), arguments.peers)
        if result is None:
            continue
        target = arguments.json or RESULTS / f"{work}.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    show()
    return 0


if __name__ == "__main__":
    sys.exit(main())
