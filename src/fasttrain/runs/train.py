"""One training run, from the configuration to the files in its folder. Read this first.

checkup → plan → envs → algorithm → learn (with one callback) → model.zip → evaluation → perf.json, summary.json.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import configure
from stable_baselines3.common.vec_env import VecEnv

from fasttrain import __version__
from fasttrain.algos.ppo import PPO, MaskablePPO
from fasttrain.config import Config, against_bots
from fasttrain.errors import EnvError
from fasttrain.machine import usable_cores
from fasttrain.perf.clock import PhaseClock
from fasttrain.perf.meter import PerfMeter
from fasttrain.perf.report import EnvTimes, PerfWindow, limits_dict, perf_dict
from fasttrain.perf.stock import StockPhases, is_stock
from fasttrain.plan import Plan, make_plan
from fasttrain.runs import console as show
from fasttrain.runs.build import (
    build_algorithm,
    build_vec_env,
    compile_kernels,
    env_facts,
    set_threads,
    settle_fused_update,
    this_machine,
)
from fasttrain.runs.callbacks import Parts, RunCallback, StopFlag
from fasttrain.runs.check import run_checkup
from fasttrain.runs.episodes import EpisodeLog
from fasttrain.runs.evaluate import Quality, evaluate_both
from fasttrain.runs.evaluations import EvaluationLog
from fasttrain.runs.files import SUMMARY_SCHEMA, write_json
from fasttrain.runs.live import LiveView
from fasttrain.runs.opponents import SnapshotCallback, pool_for, save_pool
from fasttrain.runs.progress import Progress
from fasttrain.runs.replay_report import replay_dict, replay_line, replay_words
from fasttrain.runs.settle import settle_acceleration, warmup_s
from fasttrain.runs.wrap import save_model
from fasttrain.vec.self_play import SelfPlayVecEnv
from fasttrain.vec.shared import SharedMemoryVecEnv

EXIT_DONE, EXIT_STOPPED = 0, 4
WORKER_ERRORS = (EOFError, BrokenPipeError, ConnectionResetError)  # what SB3 raises when a worker process is gone


def main(config: Config, sources: Mapping[str, str], folder: Path, overrides: Sequence[str]) -> int:
    """Train as `config` says and leave everything in `folder`; returns the exit code."""
    console = show.make_console()
    facts = env_facts(against_bots(config), measure=lambda: run_checkup(config, folder, console))
    plan = make_plan(config, sources, facts, this_machine())
    run = Run(plan, folder, console)
    write_json(folder / "plan.json", run.plan.to_dict())
    show.show_plan(console, run.plan)
    try:
        with run.stop.listening():
            window = run.learn()
            run.save(folder / "model.zip")
            run.report(window, list(overrides))
    except Exception as error:
        run.note_crash(error)
        if isinstance(error, WORKER_ERRORS) and run.config.vec_env == "subproc":
            raise EnvError("a worker process died; what it said stands above") from error
        raise
    finally:
        run.model.logger.close()
        with suppress(*WORKER_ERRORS):  # a dead worker's pipe
            run.env.close()
    return EXIT_STOPPED if run.stop.requested else EXIT_DONE


class Run:
    """The parts of one run, wired."""

    def __init__(self, plan: Plan, folder: Path, console: Console) -> None:
        self.folder, self.console = folder, console
        self.config = config = plan.config
        self.clock = PhaseClock()
        self.stop = StopFlag()
        self.best_reward = float("-inf")
        torch.use_deterministic_algorithms(config.deterministic)
        set_threads(config.torch_threads)
        with console.status("compiling kernels (a few seconds on the first use)"):
            compile_kernels(config)
        self.env: VecEnv = build_vec_env(config, config.num_envs, config.seed)
        try:
            self.model = self._build_model()
            plan = settle_fused_update(plan, self.model)
            with console.status("compiling the policy (up to a minute)"):
                self.plan = settle_acceleration(plan, self.model)
            if config.overlap and isinstance(self.model, (PPO, MaskablePPO)):
                self.model.overlap_updates(usable_cores())
        except BaseException:
            self.env.close()
            raise
        self.pool = pool_for(config, self.model, self.env)
        self.evaluations = EvaluationLog(folder / "evaluations.csv")
        self._counts_opponents = self.env.has_attr("opponents_ns")
        self.progress = Progress(config.total_timesteps, self.clock)
        self.meter = PerfMeter(self.clock, self._env_times, lambda: replay_words(self.model))
        self.callback = self._build_callback()

    def _build_model(self) -> BaseAlgorithm:
        config = self.config
        model = build_algorithm(config, self.env, self.clock)
        if (replay := replay_dict(model)) is not None:  # np.zeros takes the memory page by page, as it is written
            self.say(f"replay buffer: {replay['capacity']:,} transitions, {replay['memory_bytes']:,} bytes when full")
        formats = ["csv"] if config.train_log_to_file and config.train_log_enabled else []
        formats += ["stdout"] if config.train_log_to_console and config.train_log_enabled else []
        model.set_logger(configure(str(self.folder), formats))
        return model

    def _build_callback(self) -> RunCallback:
        config = self.config
        title = f"{config.algo.name} on {config.env.id or config.env.entry_point}"
        panel = config.live == "on" or (config.live == "auto" and self.console.is_terminal)
        parts = Parts(
            progress=self.progress,
            episodes=EpisodeLog(self.folder / "episodes.csv", config.reward_debug),
            live=LiveView(self.progress, self.console, title, panel),
            meter=self.meter,
            stop=self.stop,
            evaluate=self.evaluate,
            checkpoint=self.checkpoint,
            say=self.say,
        )
        return RunCallback(config, parts)

    def learn(self) -> PerfWindow:
        """Train until the horizon or a signal; where the time of that went."""
        callbacks: list[BaseCallback] = [StockPhases(self.clock)] if is_stock(self.model) else []
        if self.pool is not None:
            callbacks.append(SnapshotCallback(self.pool, self.config.self_play.every, self.clock))
        self.startup_s = time.time() - psutil.Process().create_time()
        with self.callback.parts.live:
            self.model.learn(self.config.total_timesteps, callback=[*callbacks, self.callback], log_interval=None)  # type: ignore[arg-type]
            return self.meter.overall(self.progress.env_steps, self.progress.updates)

    def checkpoint(self) -> None:
        """checkpoints/model_STEPS.zip."""
        target = self.folder / "checkpoints"
        target.mkdir(exist_ok=True)
        self.save(target / f"model_{self.progress.env_steps}.zip")

    def save(self, file: Path) -> None:
        """The model, and what belongs to it."""
        save_model(self.model, file)
        if self.pool is not None:
            save_pool(self.pool, file)

    def evaluate(self) -> None:
        """Quality now; the best greedy mean reward so far goes to best_model.zip."""
        greedy = self._quality(sampled=False)["greedy"]
        if not greedy["episodes"]:
            return
        self.evaluations.add(self.progress.env_steps, time.perf_counter() - self.progress.started, greedy)
        if greedy["mean_reward"] > self.best_reward:
            self.best_reward = greedy["mean_reward"]
            self.save(self.folder / "best_model.zip")
        win = "" if greedy["win_rate"] is None else f", win rate {100 * greedy['win_rate']:.1f} %"
        self.say(f"[EVAL] {self.progress.env_steps:,} steps: mean reward {greedy['mean_reward']:.3g}{win}")

    def say(self, line: str) -> None:
        """One line, above the live view where there is one."""
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def report(self, window: PerfWindow, overrides: list[str]) -> None:
        """Evaluate the final model; print and write perf.json and summary.json."""
        show.show_perf(self.console, window, kernels=self.plan.config.fused_update == "on")
        if window.envs.restarts:
            lost = window.envs.lost_steps
            self.say(f"  {window.envs.restarts} envs or workers failed and were replaced; {lost:,} env steps were lost")
        if terms := self.progress.mean_terms():
            parts = ", ".join(f"{name} {value:+.3g}" for name, value in terms.items())
            self.say(f"  reward per episode, last {len(self.progress.returns):,} episodes: {parts}")
        perf = {"total": perf_dict(window), "lines": self.meter.lines}
        if (replay := replay_dict(self.model)) is not None:
            self.say(f"  {replay_line(replay)}")
            perf["replay"] = replay
        write_json(self.folder / "perf.json", perf)
        quality = self._quality()
        if quality["greedy"]["episodes"]:
            show.show_quality(self.console, quality)
        write_json(self.folder / "summary.json", self._summary(window, quality, overrides))
        self.say(f"everything is in {self.folder}")

    def note_crash(self, error: Exception) -> None:
        """Keep what there is: the episodes so far and a summary.json that says what happened."""
        self.callback.parts.episodes.flush()
        what = {"schema": SUMMARY_SCHEMA, "version": __version__, "status": "crashed", "error": repr(error)}
        write_json(
            self.folder / "summary.json", {**what, "env_steps": self.progress.env_steps, "seed": self.config.seed}
        )

    def _quality(self, sampled: bool = True) -> Quality:
        return evaluate_both(self.model, self.config, self.say, lambda: self.stop.requested, sampled=sampled)

    def _summary(self, window: PerfWindow, quality: Quality, overrides: list[str]) -> dict[str, Any]:
        perf = perf_dict(window)
        return {
            "schema": SUMMARY_SCHEMA,
            "version": __version__,
            "status": "stopped" if self.stop.requested else "done",
            **{key: perf[key] for key in ("env_steps", "wall_s", "steps_per_s", "updates", "update_ratio")},
            "startup_s": round(self.startup_s, 3),
            "compile_s": round(warmup_s(self.model), 3),  # of the startup: torch.compile
            "episodes": self.progress.episodes,
            "perf": perf,
            "limits": limits_dict(window),
            "utilization": {"cpu": window.cpu_share, "gpu": window.gpu_share, "memory_bytes": window.memory_bytes},
            **({} if (replay := replay_dict(self.model)) is None else {"replay": replay}),
            "quality": {**quality["greedy"], **({"sampled": quality["sampled"]} if "sampled" in quality else {})},
            **({} if self.pool is None else {"self_play": self.pool.summary()}),
            "evaluations": self.evaluations.rows,
            **({"reward_terms": terms} if (terms := self.progress.mean_terms()) else {}),
            "plan": self.plan.to_dict()["flags"],
            "seed": self.config.seed,
            "overrides": overrides,
            "model": "model.zip",
        }

    def _env_times(self) -> EnvTimes:
        """What the envs report: opponents' time by `opponents_ns` or info["perf"], and where workers spent theirs."""
        stepping = self.env.inner if isinstance(self.env, SelfPlayVecEnv) else self.env.unwrapped
        shared = stepping if isinstance(stepping, SharedMemoryVecEnv) else None
        opponents = int(self.callback.enemy_turn_ms * 1e6) if hasattr(self, "callback") else 0
        if self._counts_opponents:
            counts = self.env.get_attr("opponents_ns")
            one_count = self.config.vec_env == "native" or self.pool is not None
            opponents = int(counts[0] if one_count else sum(counts))
        outside = 0
        if self.pool is not None:  # decided here, whatever the envs below do meanwhile
            opponents, outside = 0, opponents
        if shared is None:
            return EnvTimes(opponents + outside)
        times = shared.times_ns()
        return EnvTimes(
            opponents_ns=(times["opponents"] or opponents) // shared.num_workers + outside,
            num_workers=shared.num_workers,
            envs_ns=times["envs"],
            slowest_ns=times["slowest"],
            waiting_ns=times["waiting"],
            in_step=not (self.config.async_envs or self.config.pipeline not in (1, "auto")),
            restarts=shared.restarts,
            lost_steps=shared.lost_steps,
        )
