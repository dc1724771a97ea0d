"""What `fasttrain doctor` says, beside what is measured without it: benchmark.py limits [--repeats 5].

For each case, in turn and each in a fresh process: the doctor; a real training; envs, policy and update alone, by loops
of this file that share no code with the doctor's. Its share of the limit shall agree with theirs within 15 %. Then its
first advice is followed in real trainings, in turn with trainings as they were: the gain shall be what it said ± 50 %.
Times are lower quartiles of windows (doctor) and of blocks (here) and the best of all turns, because what else the
machine does only adds time.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import bench_machine

HERE = Path(__file__).resolve().parent


class Case(NamedTuple):
    """A configuration, and how long its real trainings are."""

    arguments: tuple[str, ...]
    total_timesteps: int


CASES = {
    "limits-skullking": Case(("+profile=speed",), 2_500_000),
    "limits-python-100us": Case(("+profile=speed", "env.entry_point=bench_vecenv:Working"), 80_000),
    "limits-python-100us-dummy": Case(
        ("+profile=speed", "env.entry_point=bench_vecenv:Working", "vec_env=dummy"), 80_000
    ),
    "limits-dqn-cartpole": Case(("+profile=speed", "algo=dqn", "env.id=CartPole-v1"), 100_000),
}
PARTS = ("env", "policy", "update")
BLOCKS, BLOCK_S = 12, 0.25


# --- the parts alone: each in a process of its own


def alone(case: Case, part: str) -> float:
    """Seconds per env step of one part."""
    plan, model = built(case)
    measured = {"env": env_alone, "policy": policy_alone, "update": update_alone}[part]
    return measured(plan.config, model)


def built(case: Case) -> tuple[Any, Any]:
    """The plan and the model as a training has them, after one rollout of real play."""

    from fasttrain.cli.compose import configured
    from fasttrain.kernel_cache import compile_all
    from fasttrain.perf.clock import PhaseClock
    from fasttrain.runs import engine, envs, models
    from fasttrain.runs.engine import learner_calls, settle_engine, settle_kernels
    from fasttrain.spec.plan import resolve

    config = configured(case.arguments)
    plan = resolve(config, {}, envs.env_facts(config), envs.this_machine())
    engine.set_threads(plan.config.torch_threads)
    compile_all([*envs.game_calls(plan.config), *learner_calls(plan.config)])
    env = envs.build_vec_env(plan.config, plan.config.num_envs, seed=0)
    model: Any = models.build_algorithm(plan.config, env, PhaseClock())
    plan = settle_engine(settle_kernels(plan, model), model)
    dqn = plan.config.algo.name == "dqn"
    if dqn:
        model.learning_starts = 20_000  # random play until then
    model.learn(20_000 if dqn else plan.config.algo.rollout_size)
    return plan, model


def blocks(step: Any, per_call: int) -> float:
    """Lower quartile over blocks of calls of `step`, in seconds per env step; `step` returns the seconds that count."""
    found = []
    for _ in range(BLOCKS + 1):
        spent, calls, until = 0.0, 0, time.perf_counter() + BLOCK_S
        while not calls or time.perf_counter() < until:
            spent += step()
            calls += 1
        found.append(spent / calls / per_call)
    return statistics.quantiles(found[1:], n=4)[0]


def env_alone(config: Any, model: Any) -> float:
    """Random legal actions, drawn beforehand as far as masks allow."""
    import numpy as np

    source = model.collector.source_of(model.env)
    width = int(model.action_space.n)
    keys = np.random.default_rng(0).random((8, config.num_envs, width), np.float32) + 1.0
    free = [row.argmax(axis=1) for row in keys]
    masked = source.masked and config.algo.name != "ppo"
    turn = 0

    def step() -> float:
        nonlocal turn
        turn = (turn + 1) % 8
        begun = time.perf_counter()
        masks = source.read_masks() if masked else None
        read = time.perf_counter() - begun
        actions = free[turn] if masks is None else (keys[turn] * masks).argmax(axis=1)
        begun = time.perf_counter()
        source.step_slots(actions)
        return read + time.perf_counter() - begun

    return blocks(step, config.num_envs)


def policy_alone(config: Any, model: Any) -> float:
    """Acting on the observations and masks of one rollout, of DQN on those of now."""
    import numpy as np

    engine, turn = model.engine_now(), 0
    if config.algo.name == "dqn":
        seen, masks = model._last_obs[None], None
    else:
        engine.begin()
        seen, masks = np.array(model.rollout_buffer.observations), getattr(model.rollout_buffer, "action_masks", None)

    def act() -> float:
        nonlocal turn
        turn = (turn + 1) % len(seen)
        begun = time.perf_counter()
        engine.act(seen[turn], None if masks is None else np.array(masks[turn], np.bool_))
        return time.perf_counter() - begun

    return blocks(act, config.num_envs)


def update_alone(config: Any, model: Any) -> float:
    """`train` again and again, of PPO from the same weights."""
    if config.algo.name == "dqn":

        def learn() -> float:
            begun = time.perf_counter()
            model.train(config.updates_per_step, config.batch_size)
            return time.perf_counter() - begun

        return blocks(learn, config.num_envs)
    start = {key: value.clone() for key, value in model.policy.state_dict().items()}

    def update() -> float:
        model.policy.load_state_dict(start)
        begun = time.perf_counter()
        model.train()
        return time.perf_counter() - begun

    return blocks(update, config.algo.rollout_size)


# --- commands in fresh processes


def command(word: str, overrides: list[str], result: str) -> dict[str, Any]:
    """`fasttrain WORD overrides…`; the JSON file it leaves."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])}
    with tempfile.TemporaryDirectory() as name:
        line = [sys.executable, "-m", "fasttrain", word, *overrides, f"hydra.run.dir={name}"]
        done = subprocess.run(line, capture_output=True, text=True, env=environment)
        if done.returncode:
            raise SystemExit(f"{' '.join(line)}: failed\n{done.stderr[-2000:]}{done.stdout[-1000:]}")
        return json.loads((Path(name) / result).read_text(encoding="utf-8"))


def training(case: Case, changes: list[str] | tuple[str, ...] = ()) -> float:
    """Steps/s of a real training: the upper quartile of its windows of a second, the first fifth (warm-up) left out."""
    more = [f"total_timesteps={case.total_timesteps}", "eval.episodes=2", "live=off", "report=false", *changes]
    windows = command("train", [*case.arguments, *more], "perf.json")["windows"]
    rates = [row["steps_per_s"] for row in windows[len(windows) // 5 :]]
    return statistics.quantiles(rates, n=4)[2] if len(rates) > 1 else rates[0]


def part_in_process(name: str, part: str) -> float:
    """`alone` in a fresh process."""
    line = [sys.executable, str(HERE / "bench_limits.py"), name, part]
    done = subprocess.run(line, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name}, {part}: failed\n{done.stderr[-2000:]}")
    return float(done.stdout.strip().splitlines()[-1])


# --- doctor and benchmark beside each other


def run_case(name: str, repeats: int) -> dict[str, Any]:
    """Everything about one case, in turn."""
    case = CASES[name]
    told: list[dict[str, Any]] = []
    real: list[float] = []
    seconds: dict[str, list[float]] = {part: [] for part in PARTS}
    training(case)  # compiles and fills the disk cache; not counted
    for turn in range(repeats):
        told.append(command("doctor", [*case.arguments, "doctor.tries=0"], "doctor.json"))
        real.append(training(case))
        for part in PARTS:
            seconds[part].append(part_in_process(name, part))
        limit = 1 / sum(values[-1] for values in seconds.values())
        print(
            f"  turn {turn + 1}/{repeats}: the doctor says {100 * told[-1]['share_of_limit']:.0f} % of "
            f"{told[-1]['limit_steps_per_s']:,.0f} steps/s; measured {100 * real[-1] / limit:.0f} % of {limit:,.0f}",
            flush=True,
        )
    shares = [rate * sum(seconds[part][turn] for part in PARTS) for turn, rate in enumerate(real)]
    says = [one["share_of_limit"] for one in told]
    # The best of all turns: disturbed processes are slower, none is faster than the machine.
    best = max(real) * sum(min(values) for values in seconds.values())
    measured = {**spread(shares), "best": best}
    result = {
        "work": name,
        "doctor_share": spread(says),
        "measured_share": measured,
        "ratio": statistics.median(says) / best,
        "alone_steps_per_s": {part: spread([1 / value for value in values]) for part, values in seconds.items()},
        "doctor_alone_steps_per_s": {
            part: spread([one["alone_steps_per_s"][part] for one in told]) for part in PARTS
        },
        "steps_per_s": spread(real),
        "doctor_steps_per_s": spread([one["steps_per_s"] for one in told]),
        **follow(case, told, repeats),
    }  # fmt: skip
    return result


def follow(case: Case, told: list[dict[str, Any]], repeats: int) -> dict[str, Any]:
    """The first advice, in real trainings, in turn with trainings as they were."""
    firsts = [one["advice"][0]["change"] for one in told if one["advice"]]
    if not firsts:
        return {"advice": None}
    change = statistics.mode(firsts)
    found = [advice for one in told for advice in one["advice"] if advice["change"] == change]
    expected = [advice["expected_gain"] for advice in found]
    before, after = [], []
    for turn in range(repeats):
        before.append(training(case))
        after.append(training(case, change.split()))
        print(f"  turn {turn + 1}/{repeats}: {change}: {100 * (after[-1] / before[-1] - 1):+.0f} %", flush=True)
    gains = [ours / theirs - 1 for ours, theirs in zip(after, before, strict=True)]
    real = {**spread(gains), "best": max(after) / max(before) - 1}
    return {
        "advice": change,
        "class": found[0]["class"],
        "expected_gain": spread(expected),
        "real_gain": real,
        "real_over_expected": real["best"] / statistics.median(expected),
    }


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def show_case(result: dict[str, Any]) -> None:
    """One case's lines."""
    used = f"; on {result['usable_cores']} of them" if "usable_cores" in result else ""
    print(f"\n{result['work']}  ({result.get('machine', '')}{used}; {result.get('command', '')})")
    for who, part in (("doctor", "doctor_"), ("benchmark", "")):
        rates = result[f"{part}alone_steps_per_s"]
        alone_words = ", ".join(f"{name} {rate['median']:,.0f}" for name, rate in rates.items())
        print(f"  {who:<10} alone: {alone_words}; training {result[f'{part}steps_per_s']['median']:,.0f} steps/s")
    says, measured = result["doctor_share"], result["measured_share"]
    print(
        f"  share of the limit: doctor {_percent(says)}, measured {100 * measured['best']:.0f} %: "
        f"ratio {result['ratio']:.2f} (wanted 0.85 to 1.15)"
    )
    if result["advice"] is None:
        print("  no advice")
        return
    print(
        f"  first advice {result['advice']} ({result['class']}): {100 * result['expected_gain']['median']:+.0f} % "
        f"expected, {100 * result['real_gain']['best']:+.0f} % real: ratio {result['real_over_expected']:.2f} "
        "(wanted 0.50 to 1.50)"
    )


def _percent(found: dict[str, float]) -> str:
    return f"{100 * found['median']:.0f} % [{100 * found['min']:.0f}, {100 * found['max']:.0f}]"


def run(work: str, repeats: int, results: Path) -> int:
    """The cases that `work` means, stored in `results`, one file each."""
    from fasttrain.machine import usable_cores

    results.mkdir(parents=True, exist_ok=True)
    for name in CASES if work == "limits" else [work]:
        print(name, flush=True)
        command_line = f"python3 scripts/benchmark.py {name} --repeats {repeats}"
        result = {**run_case(name, repeats), **bench_machine.about(), "command": command_line}
        result["usable_cores"] = usable_cores()  # fewer than the machine's under taskset
        (results / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    show(results)
    return 0


def show(results: Path) -> None:
    """What is stored."""
    for path in sorted(results.glob("*.json")):
        show_case(json.loads(path.read_text(encoding="utf-8")))


if __name__ == "__main__":
    print(alone(CASES[sys.argv[1]], sys.argv[2]))
