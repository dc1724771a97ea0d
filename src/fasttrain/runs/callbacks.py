"""The SB3 callback that connects a run's parts to `learn()`: counters, episodes, live view, [PERF], evaluations, stop.

In self-play it also takes snapshots of the policy, which are stored beside the model and rated in summary.json.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import numpy as np
import sb3_contrib
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.vec_env import VecEnv, unwrap_vec_wrapper

from fasttrain.algos.causes import check_step
from fasttrain.algos.engine import Collector, Fast
from fasttrain.algos.joint import Joint
from fasttrain.algos.policy_view import action_dims
from fasttrain.algos.self_play import SnapshotPool
from fasttrain.buffers.prefetch import Prefetching
from fasttrain.buffers.recurrent import RecurrentStorage
from fasttrain.buffers.replay_storage import ReplayStorage
from fasttrain.machine import process_age_s
from fasttrain.perf.report import perf_dict
from fasttrain.perf.stock import StockPhases, TimedVecEnv, is_stock, optimizers_of
from fasttrain.runs.loggers import instance_of, log_figures
from fasttrain.runs.parts import Parts
from fasttrain.runs.progress import EVALUATING
from fasttrain.runs.state import stateful_noise
from fasttrain.runs.stopping import Stop
from fasttrain.spec.backends import lends_games
from fasttrain.spec.config import SELF, Config
from fasttrain.spec.infos import InfoReader, enemy_turn_ms, record_of, sb3_statistics, score_of
from fasttrain.spec.reading import evaluates_in_training_env
from fasttrain.spec.setting import named
from fasttrain.vec.base import EmptyMasks
from fasttrain.vec.self_play import Opponent, SelfPlayVecEnv


class RunCallback(BaseCallback):
    """The run's own callback. Its time counts as phase `log`; evaluations and checkpoints have phases of their own."""

    def __init__(self, run: Parts) -> None:
        super().__init__()
        self.run, self.course, config = run, run.course, run.config
        self._evaluates_beside = bool((config.eval_every or config.video.every) and config.eval_async)
        self._lends = (evaluates_in_training_env(config) or lends_games(config)) and not config.eval_async
        self._unsupported = ""  # the last printed reason why PyTorch computes in place of kernels

    def _on_training_start(self) -> None:
        # fasttrain's algorithms count updates themselves: a hook on the optimizer would disable the fused kernels.
        self._ours = self.model if isinstance(self.model, Fast) else None
        self._checks_steps = self.run.config.nan_guard != "off" and self._ours is None
        if self._ours is not None and self._ours.engine.guard is not None:
            self._ours.engine.guard.say = self.run.say
        self._counts_itself = not isinstance(self.model, OnPolicyAlgorithm)
        watched = [] if self._ours is not None or self._counts_itself else optimizers_of(self.model)[:1]
        self._hooks = [optimizer.register_step_post_hook(self._count_update) for optimizer in watched]
        progress = self.run.progress
        self._updates_before = progress.updates
        self.run.meter.start(progress.env_steps, progress.updates)
        progress.started = time.perf_counter() - progress.before_s
        if self.run.curriculum is not None:
            self.run.curriculum.prepare(self.run.env)
        for noise, previous in zip(stateful_noise(self.model), self.course.noise, strict=False):  # undo learn()'s reset
            noise.noise_prev = noise.noise_prev if previous is None else previous

    def _count_update(self, *_: object) -> None:
        self.run.progress.updates += 1

    def _take_updates(self) -> None:
        """Read the model's count of updates. It is called between updates, so every counted update has ended."""
        progress = self.run.progress
        if self._ours is not None:
            progress.updates = self._ours.engine.gradient_updates
        elif self._counts_itself:
            progress.updates = int(self.model._n_updates)
        if progress.first_update_s is None and progress.updates > self._updates_before:
            progress.first_update_s = round(process_age_s(), 3)

    def _on_rollout_start(self) -> None:
        run, course = self.run, self.course
        self._take_updates()
        if run.pool is not None and course.snapshot.due(run.progress.updates):
            with run.clock.phase("other"):
                run.pool.take(self.model.num_timesteps)
        run.progress.mark()
        if course.log.due(run.progress.updates):
            with run.clock.phase("log"):
                self._write_logs()
        run.meter.tick(run.progress.env_steps, run.progress.updates)
        if self._evaluates_beside:
            with run.clock.phase("eval"):
                run.evaluator.collect()
        if self._lends:  # an evaluation may use the training's env only between two rollouts
            self._evaluate_if_due()
        env_steps = self.model.num_timesteps  # self.num_timesteps is updated only in `on_step`
        stopping = course.stopped is not None or run.stop.requested
        run.checkpoints.at_rest(env_steps, course.checkpoint.due(env_steps), stopping)
        self._change_engine()

    def _on_rollout_end(self) -> None:
        with self.run.clock.phase("log"):
            if self.run.curriculum is not None:
                self.run.curriculum.take_value_errors(self.model)
            if self.run.phases is not None:
                self.run.phases.take_rollout()

    def _change_engine(self) -> None:
        """Called between rollouts: if the kernels are compiled now, switch to them and write this to plan.json."""
        run, reason = self.run, None if self._ours is None else self._ours.engine.unsupported_reason
        if reason and reason != self._unsupported:  # the policy or the algorithm was changed during training
            self._unsupported = reason
            run.say(f"from here on PyTorch computes, not the compiled kernels: {reason}")
        switch = run.engine_switch
        if switch is None or switch.done:
            return
        before = run.plan
        with run.clock.phase("other"):
            switch.at_rest(run.progress)
        if switch.done and switch.beside_s is not None and switch.at is not None:  # not yet in plan.json
            run.plan = run.plan._replace(engine_switch_at=switch.at)
        if run.plan is not before:
            with run.saving.of("plan.json"):
                run.write_plan()

    def _write_logs(self) -> None:
        run, progress = self.run, self.run.progress
        self.course.logged_updates = progress.updates
        line = run.meter.line(progress.env_steps, progress.updates)
        log_figures(self.model.logger, "perf", lambda: perf_dict(run.meter.newest), progress.env_steps)
        if (curriculum := run.curriculum) is not None:
            log_figures(self.model.logger, "tasks", curriculum.to_dict, progress.env_steps)
        if run.phases is not None:
            log_figures(self.model.logger, "phases", run.phases.to_dict, progress.env_steps)
        if run.config.train_log_to_console:
            run.say(line)
        if run.config.train_log_enabled if run.config.loggers is None else run.config.loggers:
            with run.saving.of("progress.csv"):
                if isinstance(self.model, OnPolicyAlgorithm):  # SB3's base classes name the argument differently
                    self.model.dump_logs(iteration=0)
                else:
                    self.model.dump_logs()

    def _on_step(self) -> bool:
        run = self.run
        before = run.clock.enter("log")
        if self._checks_steps:
            step = self.locals
            check_step(step["new_obs"], step["rewards"], (), self.num_timesteps, self.model._vec_normalize_env)
        run.progress.env_steps = self.num_timesteps
        self._collect_episodes()
        run.live.tick()
        run.clock.enter(before)
        if not self._lends:
            self._evaluate_if_due()
        return self._continues()

    def _evaluate_if_due(self) -> None:
        """If it is due, evaluate or film the present policy, here or in the second process."""
        run, steps = self.run, self.model.num_timesteps
        measure, film = self.course.evaluate.due(steps), self.course.film.due(steps)
        if not (measure or film):
            return
        here = run.evaluator.background is None
        with run.clock.phase("eval"), run.status.doing(EVALUATING) if here else nullcontext():
            wall_s = time.perf_counter() - run.progress.started
            run.evaluator.evaluate(run.progress.env_steps, wall_s, measure, film)

    def _continues(self) -> bool:
        """False if there is a reason to stop and `Checkpoints.may_stop` allows it. Prints the reason."""
        run, course = self.run, self.course
        if course.stopped is None:
            course.stopped = self._reason()
        if course.stopped is None or not self._may_stop():
            return True
        course.at_rest = False
        run.say(f"stopped at {self.num_timesteps:,} steps: {course.stopped.text}")
        return False

    def _may_stop(self) -> bool:
        run = self.run
        until = (run.config.stop.at_steps or 0) if self.course.continues and not run.stop.requested else 0
        return run.checkpoints.may_stop(run.stop.requested or self.course.continues, until)

    def _reason(self) -> Stop | None:
        run = self.run
        if run.stop.requested:
            return Stop("signal", "by a signal")
        if run.users.stopped_by:
            return Stop("callback", f"by {run.users.stopped_by}")
        if not run.stopping.active:
            return None
        with run.clock.phase("log"):
            return run.stopping.reason(time.perf_counter() - run.progress.started, self.num_timesteps)

    def _collect_episodes(self) -> None:
        run, infos, dones = self.run, self.locals["infos"], self.locals["dones"]
        curriculum, ended = run.curriculum, dones.nonzero()[0].tolist()
        if "perf" in infos[0]:  # not with lean_info: then the workers add up these times
            self.course.enemy_turn_ms += sum(map(enemy_turn_ms, infos))
        for index in ended:
            episode = record_of(infos[index])
            if episode is None:
                continue
            info, progress = run.reader.read(infos[index], index), run.progress
            progress.add_episode(float(episode["r"]), info)
            if run.stopping.active:
                run.stopping.add(self.num_timesteps, float(episode["r"]), progress.updates > 0)
            wall_s = round(time.perf_counter() - progress.started, 3)
            if curriculum is not None:
                curriculum.count(info, float(episode["r"]), int(episode["l"]))
            fixed = (progress.episodes, self.num_timesteps, index, episode["r"], episode["l"], wall_s)
            run.episodes.add(fixed, info)
        if curriculum is not None:
            curriculum.step(run.env, ended, self.num_timesteps)
        if self._ours is None:
            for info, done in zip(infos, dones, strict=True):  # remove entries that SB3 cannot average
                for key in {"episode", "is_success"} & info.keys() - (sb3_statistics(info) if done else {}).keys():
                    del info[key]

    def _on_training_end(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._take_updates()
        if self.course.at_rest:  # the training ended between two rollouts, by total_timesteps and not by `stopped`
            self.course.stopped = None
        with self.run.clock.phase("log"):
            if self.run.progress.updates > self.course.logged_updates:  # log the updates after the last row
                self._write_logs()
            self.run.episodes.flush()


def callbacks_of(run: Parts, users: bool = True) -> list[BaseCallback]:
    """The callbacks for `learn()`: phase timing of a stock class, the user's callbacks, and the run's own."""
    stock = [StockPhases(run.clock)] if is_stock(run.model) else []
    return [*stock, *([run.users] if users and run.users.callbacks else []), RunCallback(run)]


def replay_dict(model: BaseAlgorithm) -> dict[str, Any] | None:
    """Fill and size of the replay buffer, and how often prefetched batches were ready. None without a buffer."""
    storage, ours = getattr(model, "replay_buffer", None), getattr(model, "collector", None)
    if not isinstance(ours, Collector) or not isinstance(storage, ReplayStorage):
        return None
    sampler = ours.sampler
    facts: dict[str, Any] = {
        "transitions": storage.size() * storage.n_envs,
        "capacity": storage.buffer_size * storage.n_envs,
        "memory_bytes": storage.memory_bytes,
    }
    if isinstance(sampler, Prefetching):
        facts["prefetch"] = {"hits": sampler.hits, "waits": sampler.waits, "wait_s": sampler.wait_ns / 1e9}
    return facts


def replay_words(model: BaseAlgorithm) -> str:
    """For the [PERF] line: `buffer 34% prefetch_hits 120 prefetch_waits 3`. Both counts are totals of the run."""
    if (facts := replay_dict(model)) is None:
        return ""
    prefetch = facts.get("prefetch")
    more = "" if prefetch is None else f" prefetch_hits {prefetch['hits']} prefetch_waits {prefetch['waits']}"
    return f"buffer {100 * facts['transitions'] / facts['capacity']:.0f}%{more}"


def policies_words(model: BaseAlgorithm) -> str:
    """For the [PERF] line: `manager_update_ms 8.1 worker_update_ms 30.2` per 1,000 env steps of this process."""
    figures: dict[str, Any] = model.figures() if isinstance(model, Joint) else {}
    thousands = max(1, model.num_timesteps - model._num_timesteps_at_start) / 1000
    return " ".join(f"{name}_update_ms {1000 * own['update_s'] / thousands:.1f}" for name, own in figures.items())


def replay_line(facts: dict[str, Any]) -> str:
    size = f"{facts['memory_bytes'] / 1e6:,.0f} MB when full"
    line = f"replay buffer: {facts['transitions']:,} of {facts['capacity']:,} transitions, {size}"
    if (prefetch := facts.get("prefetch")) is None:
        return line
    waits = f"{prefetch['waits']:,} were not ready ({prefetch['wait_s']:.1f} s)"
    return f"{line}; prefetched batches: {prefetch['hits']:,} were ready, {waits}"


def sequences_line(model: Any) -> str:
    """The number of sequences and the padding of a recurrent policy's last rollout; empty for other policies."""
    storage = getattr(getattr(model, "rollout_buffer", None), "storage", None)
    if not isinstance(storage, RecurrentStorage) or not storage.full:
        return ""
    count, stock, groups = storage.padding(model.batch_size)
    layout = getattr(getattr(model.engine, "view", None), "layout", "")  # "": kernels; they have no view, no padding
    ours = {"padded": stock, "grouped": groups}.get(layout, 0.0)
    return f"sequences: {count:.1f} a minibatch; {100 * ours:.0f} % padding, in stock's layout {100 * stock:.0f} %"


def count_empty_masks(model: BaseAlgorithm, empty: EmptyMasks) -> None:
    """Let `empty` count masks without a legal action. For a stock class, `TimedVecEnv` passes the masks to it."""
    timed = unwrap_vec_wrapper(model.env, TimedVecEnv) if model.env is not None else None
    if model.env is not None and isinstance(model.env.unwrapped, SelfPlayVecEnv):
        model.env.unwrapped.empty_masks = empty
    if isinstance(model, Fast):
        model.collector.empty_masks = empty
    elif timed is not None and isinstance(model, sb3_contrib.MaskablePPO):
        dims = action_dims(model.action_space)
        timed.look_at_masks = lambda masks: empty.check(np.stack(masks), dims, model.num_timesteps)


def pool_for(config: Config, model: BaseAlgorithm, env: VecEnv) -> SnapshotPool | None:
    """Give a self-play env its opponents: a pool of snapshots or the user's class. Returns the pool, or None."""
    if not isinstance(env, SelfPlayVecEnv):
        return None
    if config.opponent not in (None, SELF):
        kind: Any = Opponent  # mypy does not accept a protocol as `type[T]`
        env.set_opponent(instance_of(*named(config.opponent, "opponent", "opponent"), "opponent", kind))
        return None
    settings = config.self_play
    alone = config.env.kwargs.get(str(config.env.spec.opponent_key)) == SELF  # True: no bots affect the score
    infos = InfoReader.of(config.env)
    rated = (lambda info: score_of(infos.read(info))) if alone else lambda _: None
    turns = env.turns
    shown: dict[str, Any] = {"seats": lambda: turns.seats, "again": lambda: turns.again}
    pool = SnapshotPool(model, env.num_envs, settings.pool, config.seed, rated, **shown)
    env.set_opponent(pool)
    return pool
