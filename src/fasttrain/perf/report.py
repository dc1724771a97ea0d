"""[PERF]: disjoint phases in milliseconds per 1,000 env steps, as one machine-readable line, table rows and JSON.

The column "alone" has the steps/s that the run would reach if all other phases took no time. `enemy_turn_ms` is a part
of `env_step_ms`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from fasttrain.perf.clock import PHASES, UPDATE_PHASES
from fasttrain.terminal import rate_text

PER_STEP_BELOW = 20.0  # runs with fewer steps/s show times per step instead of per 1,000 steps


class EnvTimes(NamedTuple):
    """Times and counts that the envs report. `num_workers` to `in_step` are about worker processes."""

    opponents_ns: int = 0  # a part of env_step; the mean over workers, because they run in parallel
    num_workers: int = 0
    envs_ns: int = 0  # time in the envs, of all workers together
    slowest_ns: int = 0  # sum over all steps of the slowest worker's time
    waiting_ns: int = 0  # time that the trainer waited for workers
    in_step: bool = True  # all workers step together; False: the policy acts for one group while others step
    restarts: int = 0  # envs, workers, actors and engines that were replaced
    lost_steps: int = 0
    causes: tuple[tuple[str, int], ...] = ()  # why they were replaced, since the training began
    games: tuple[tuple[str, int], ...] = ()  # (name of a part of a game's time, ns), means over games
    episodes: int = 0  # episodes that ended
    ticks: float = 0  # ticks of the games' own clocks, if the env reports them
    lags: tuple[int, int, int, int] = (0, 0, 0, 0)  # in updates: sum and largest; transitions: all and dropped

    def since(self, before: EnvTimes) -> EnvTimes:
        """The times and counts since an earlier reading."""
        counters = {*self._fields} - {"num_workers", "in_step", "causes", "games", "lags"}
        then = dict(before.games)
        games = tuple((name, ns - then.get(name, 0)) for name, ns in self.games)
        return self._replace(games=games, **{name: getattr(self, name) - getattr(before, name) for name in counters})


@dataclass(frozen=True, kw_only=True, slots=True)
class PerfWindow:
    """Counters over a part of the training."""

    env_steps: int
    updates: int  # gradient updates
    phases_ns: Mapping[str, int]  # phase → time of the main thread
    envs: EnvTimes
    cpu_share: float | None  # CPU time of the process and its children ÷ (wall × cores), 0..1
    gpu_share: float | None  # 0..1, None without a GPU or without its library
    memory_bytes: int  # resident memory, with child processes

    @property
    def worker_parts_ns(self) -> dict[str, int]:
        """Parts of env_step with workers: slowest worker and transport; or only the waiting if envs step in groups."""
        envs, env_step = self.envs, self.phases_ns.get("env_step", 0)
        if not envs.num_workers:
            return {}
        if not envs.in_step:
            return {"waiting": min(envs.waiting_ns, env_step)}
        slowest = min(envs.slowest_ns, env_step)
        return {"slowest_worker": slowest, "transport": env_step - slowest}

    @property
    def wall_ns(self) -> int:
        return sum(self.phases_ns.values())

    @property
    def steps_per_s(self) -> float:
        return self.env_steps * 1e9 / self.wall_ns if self.wall_ns else 0.0

    @property
    def rates(self) -> dict[str, float]:
        """`episodes_per_s` if any ended, and `ticks_per_s` of an env that reports ticks."""
        counts = {"episodes_per_s": self.envs.episodes, "ticks_per_s": self.envs.ticks}
        return {name: count * 1e9 / (self.wall_ns or 1) for name, count in counts.items() if count}

    @property
    def per_thousand(self) -> bool:
        """Whether tables show times per 1,000 steps; for slow steps they show times per step."""
        return self.steps_per_s >= PER_STEP_BELOW or not self.env_steps

    @property
    def update_ratio(self) -> float:
        """Gradient updates per environment step (transition)."""
        return self.updates / self.env_steps if self.env_steps else 0.0

    def ms(self, nanoseconds: int) -> float:
        """Milliseconds per 1,000 env steps."""
        return nanoseconds / 1e3 / self.env_steps if self.env_steps else 0.0

    def rounded(self, times_ns: Iterable[tuple[str, int]]) -> dict[str, float]:
        """The times for JSON, in milliseconds, named `NAME_ms`."""
        return {f"{name}_ms": round(self.ms(ns), 6) for name, ns in times_ns}

    def shown_times(self) -> Iterator[tuple[str, int, bool]]:
        """(name, ns, whether it is a part of the phase before it) for each phase that took time, and for `other`."""
        for phase in PHASES:
            spent = self.phases_ns.get(phase, 0)
            if spent > 0 or phase == "other":
                yield phase, spent, False
            if spent > 0 and phase == "env_step":
                opponents = {"enemy_turn": self.envs.opponents_ns} if self.envs.opponents_ns else {}
                yield from ((name, ns, True) for name, ns in (opponents | self.worker_parts_ns).items())


def perf_line(window: PerfWindow) -> str:
    """`[PERF] steps/s 61234 action_ms 3.10 env_step_ms 2.20 (enemy_turn_ms 1.80) … update_ratio 0.004 cpu 97% …`."""
    rates = {"steps_per_s": window.steps_per_s, **window.rates}
    shown = [f"{name.replace('_per_', '/')} {rate_text(rate).replace(',', '')}" for name, rate in rates.items()]
    parts = ["[PERF]", *shown]
    for name, ns, inside in window.shown_times():
        text = f"{name}_ms {window.ms(ns):.3f}"
        parts.append(f"({text})" if inside else text)
    parts += [f"({name}_ms {window.ms(ns):.3f})" for name, ns in window.envs.games]
    if lag := lag_dict(window):
        parts.append(f"lag {lag['mean']:g} lag_max {lag['largest']}")
    if window.envs.restarts:
        parts.append(f"replaced {window.envs.restarts} lost_steps {window.envs.lost_steps}")
    parts.append(f"update_ratio {window.update_ratio:.5f}")
    for name, share in (("cpu", window.cpu_share), ("gpu", window.gpu_share)):
        parts.append(f"{name} -" if share is None else f"{name} {100 * share:.0f}%")
    parts.append(f"mem {window.memory_bytes / 2**20:.0f}MB")
    return " ".join(parts)


def perf_rows(window: PerfWindow) -> list[tuple[str, str, str, str]]:
    """Rows of the table: phase, ms per 1,000 steps or per step, share of the wall time, steps/s of the phase alone."""
    times = window.shown_times()
    rows = [_row(f"  of it {name}_ms" if inside else f"{name}_ms", ns, window) for name, ns, inside in times]
    rows.append(_row("total", window.wall_ns, window))
    if lag := lag_dict(window):
        rows.append(("lag in updates", f"mean {lag['mean']:g}", f"max {lag['largest']}", f"dropped {lag['dropped']:,}"))
    return rows + [_row(f"of a game's time {name}_ms", ns, window) for name, ns in window.envs.games]


def _row(name: str, nanoseconds: int, window: PerfWindow) -> tuple[str, str, str, str]:
    share = nanoseconds / window.wall_ns if window.wall_ns else 0.0
    alone = rate_text(window.env_steps * 1e9 / nanoseconds) if nanoseconds else "-"
    milliseconds = window.ms(nanoseconds) / (1 if window.per_thousand else 1000)
    return name, f"{milliseconds:,.3f}", f"{100 * share:.1f} %", alone


def perf_dict(window: PerfWindow) -> dict[str, Any]:
    """The content of `perf.json`, and of `perf` in `summary.json`."""
    return {
        "unit": "milliseconds per 1000 env steps on the main thread",
        "steps_per_s": round(window.steps_per_s, 3),
        **{name: round(rate, 3) for name, rate in window.rates.items()},
        "env_steps": window.env_steps,
        "updates": window.updates,
        "update_ratio": window.update_ratio,
        "wall_s": window.wall_ns / 1e9,
        **phases_dict(window),
        **(_workers(window) if window.envs.num_workers else {}),
        **({"replaced": dict(window.envs.causes)} if window.envs.causes else {}),
        **({"of_a_game": window.rounded(window.envs.games)} if window.envs.games else {}),
        **({"lag": lag} if (lag := lag_dict(window)) else {}),
        "covered_share": round(1.0 - window.phases_ns.get("other", 0) / (window.wall_ns or 1), 6),
    }


def phases_dict(window: PerfWindow) -> dict[str, float]:
    """`action_ms` … `other_ms`, which are disjoint, and `enemy_turn_ms`, which is part of `env_step_ms`."""
    phases = [(phase, window.phases_ns.get(phase, 0)) for phase in PHASES]
    return window.rounded([*phases, ("enemy_turn", window.envs.opponents_ns)])


def _workers(window: PerfWindow) -> dict[str, Any]:
    envs = window.envs
    mean = envs.envs_ns / envs.num_workers
    workers = {
        "num_workers": envs.num_workers,
        "busy_share": round(mean / window.wall_ns, 4) if window.wall_ns else 0.0,  # mean share of the wall time
        "slowest_over_mean": round(envs.slowest_ns / mean, 4) if mean and envs.in_step else None,
        "restarts": envs.restarts,
        "lost_steps": envs.lost_steps,
    }
    return {**window.rounded(window.worker_parts_ns.items()), "workers": workers}


def lag_dict(window: PerfWindow) -> dict[str, Any]:
    """The lags since the run began: updates between acting and learning; empty unless schedule=continuous."""
    total, largest, count, dropped = window.envs.lags
    return {"mean": round(total / count, 3), "largest": largest, "dropped": dropped} if count else {}


def limits_dict(window: PerfWindow) -> dict[str, float | None]:
    """Name → steps/s if only this part of the work took time: env, policy or update. None: it took no time."""
    phases = window.phases_ns
    groups = {
        "env_only_steps_per_s": phases.get("env_step", 0),
        "policy_only_steps_per_s": phases.get("action", 0),
        "update_only_steps_per_s": sum(phases.get(name, 0) for name in UPDATE_PHASES),
    }
    return {name: round(window.env_steps * 1e9 / ns, 1) if ns else None for name, ns in groups.items()}


BOTTLENECKS = {  # bottleneck → its phases, and what to do about it; each phase belongs to one bottleneck
    "env": (("env_step",), ""),  # see `_env_advice`
    "act": (("action",), "acting is the bottleneck: more envs per step (num_envs) amortise each forward pass"),
    "update": (UPDATE_PHASES, "the update is the bottleneck: fewer or larger updates (PPO: algo.n_epochs, batch_size; "
               "DQN: updates_per_step), check the quality of each"),
    "buffer": (("buffer",), "storing is the bottleneck: more envs per step (num_envs) amortise it; or smaller "
               "observations (uint8 for images); or smaller infos (lean_info=true)"),
    "log": (("log",), "logging is the bottleneck: raise log_every; or train_log_enabled=false"),
    "eval": (("eval",), "evaluating is the bottleneck: raise eval_every; or lower eval.episodes; or eval_async=true"),
    "checkpoint": (("checkpoint",), "saving is the bottleneck: raise checkpoint_every; or checkpoint_async=true"),
    "other": (("other",), "most of it belongs to no phase, such as callbacks of yours: py-spy record names it"),
}  # fmt: skip
SAMPLING = (
    "drawing replay minibatches is the bottleneck: fewer of them (updates_per_step); or prefetch=on with a "
    "core to spare; or algo.prioritized=false if it is on"
)


def advice(window: PerfWindow, cores: int, effective: Mapping[str, Any]) -> str:
    """The bottleneck, and what to try against it. Settings that are in use already (`effective`) are left out."""
    phases = window.phases_ns
    times = {name: sum(phases.get(phase, 0) for phase in members) for name, (members, _) in BOTTLENECKS.items()}
    name = max(times, key=times.__getitem__)
    text = _env_advice(window, cores, effective) if name == "env" else BOTTLENECKS[name][1]
    if name == "update" and phases.get("replay_sample", 0) > 0.5 * times[name]:
        text = SAMPLING
    bottleneck, _, remedies = text.partition(": ")
    left = "; or ".join(remedy for remedy in remedies.split("; or ") if _is_new(remedy, effective))
    return f"{100 * times[name] / max(1, window.wall_ns):.0f} % of the time: {bottleneck}{left and ': '}{left}"


def _is_new(remedy: str, effective: Mapping[str, Any]) -> bool:
    settings = re.findall(r"([\w.]+)=(\w+)", remedy)
    return all(str(effective.get(key)).lower() not in (value, "not applicable") for key, value in settings)


def _env_advice(window: PerfWindow, cores: int, effective: Mapping[str, Any]) -> str:
    envs, parts = window.envs, window.worker_parts_ns
    if envs.games:
        most = max(envs.games, key=lambda part: part[1])[0]
        waits = "they wait for each other" if envs.in_step else "they wait for the policy"
        theirs = waits if most == "queue" else f"their time is {most}"
        return f"waiting for games is the bottleneck, {theirs} most of all: fasttrain doctor names remedies"
    if not envs.num_workers:
        batched = effective.get("vec_env") in ("native", "vector")
        ways = "" if batched else "; or a native batch (vec_env=native); or worker processes (vec_env=shared)"
        return f"the environment is the bottleneck: make its step cheaper{ways}"
    if parts.get("transport", 0) > 0.4 * window.phases_ns.get("env_step", 1):
        ways = "more envs per worker (num_envs); or one process (vec_env=dummy)"
        return f"sending data to the workers takes longer than their work: {ways}"
    mean = envs.envs_ns / envs.num_workers
    if envs.in_step and envs.slowest_ns > 1.4 * mean:
        return (
            f"the slowest worker takes {envs.slowest_ns / max(1.0, mean):.1f} times the mean and all wait for it: "
            "schedule=first_ready (not repeatable); or more envs per worker, which evens out their times"
        )
    if envs.num_workers < cores:
        return f"the envs are the bottleneck and {envs.num_workers} of {cores} cores step them: raise workers"
    if envs.in_step and 0.3 * envs.slowest_ns < window.phases_ns.get("action", 0):
        return "the envs are the bottleneck and wait while the policy acts: schedule=first_ready (not repeatable)"
    return "the envs are the bottleneck and every core steps them: try a native batch or a cheaper step"
