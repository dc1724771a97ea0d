"""Each part of a run by itself, with the run's own objects: a window of some tenths of a second, seconds per env step.

Windows of all parts, and of configurations that are compared, take turns, so that a machine that slows down slows all
of them; the first of each is not counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from stable_baselines3.common.callbacks import CallbackList

from fasttrain.algos.fast import check_masks
from fasttrain.algos.grouped import groups_of
from fasttrain.buffers.prefetch import Direct
from fasttrain.engines.compiling import untouched
from fasttrain.perf.limits import Rates
from fasttrain.perf.stock import StockPhases, TimedVecEnv
from fasttrain.studies.rig import Rig
from fasttrain.vec.groups import WorkerGroups

ROUNDS = 12  # the first is not counted; short windows in many rounds, so that what else the machine does hits all alike
LEAST_ROUNDS, SLACK = 2, 1.5  # of parts whose iterations take long: so many windows, or this times what was asked for
Window = dict[str, float]  # part → seconds per env step


def env_window(rig: Rig, seconds: float) -> Window:
    """The run's own vector env by random legal actions; drawing them is not counted, reading the masks is."""
    with rig.apart():
        if not rig.stock and not rig.off_policy and not rig.model.use_sde:
            groups = groups_of(rig.model, rig.source)
            if groups is not None:
                return {"env": _grouped(rig, groups, seconds)}
        return _in_step(rig, seconds)


def _in_step(rig: Rig, seconds: float) -> Window:
    source, shared = rig.source, rig.shared
    slowest = shared.slowest_ns if shared else 0
    spent, steps, until = 0.0, 0, time.perf_counter() + seconds
    while steps < 3 or time.perf_counter() < until:
        begun = time.perf_counter()
        masks = source.read_masks() if rig.masked else None
        if masks is not None and not rig.stock:
            check_masks(masks, rig.env.action_space, steps)
        spent += time.perf_counter() - begun
        actions = rig.random.draw(masks)
        begun = time.perf_counter()
        source.step_slots(actions)
        spent += time.perf_counter() - begun
        steps += 1
    env_steps = steps * rig.num_envs
    if shared is None:
        return {"env": spent / env_steps}
    transport = spent - (shared.slowest_ns - slowest) / 1e9
    return {"env": spent / env_steps, "transport": max(0.0, transport) / env_steps}


def _grouped(rig: Rig, groups: WorkerGroups, seconds: float) -> float:
    """Workers in groups, each sent off again as soon as it is ready; every env takes equally many steps."""
    slots, everyone = groups.env.slots, range(len(groups.rows))
    steps, until = 0, time.perf_counter() + seconds
    begun = time.perf_counter()
    while not steps or time.perf_counter() < until:
        goal = 32  # steps of each env until all wait for the slowest, as at the end of a rollout
        left = dict.fromkeys(everyone, goal)
        under_way: list[int] = []
        ready = list(everyone)
        while under_way or ready:
            for group in ready:
                if left[group]:
                    left[group] -= 1
                    rows = groups.rows[group]
                    masks = slots.action_masks[rows] if rig.masked and slots.action_masks is not None else None
                    groups.send(group, rig.random.draw(masks, rows))
                    under_way.append(group)
            ready = []
            if under_way:
                ready = groups.first_ready(under_way) if rig.config.schedule == "first_ready" else under_way[:1]
                for group in ready:
                    groups.wait(group)
                    under_way.remove(group)
        steps += goal
    spent = time.perf_counter() - begun
    groups.finish([])
    return spent / (steps * rig.num_envs)


def policy_window(rig: Rig, seconds: float) -> Window:
    """The run collecting from recorded steps: choosing actions, and storing what comes of them."""
    model, clock = rig.model, rig.run.clock
    with _recorded(rig) as collect:
        before, steps = clock.snapshot(), model.num_timesteps
        until = time.perf_counter() + seconds
        while model.num_timesteps == steps or time.perf_counter() < until:
            collect()
        clock.enter("other")
        after, env_steps = clock.snapshot(), model.num_timesteps - steps
    return {
        part: (after[phase] - before[phase]) / 1e9 / env_steps
        for part, phase in (("policy", "action"), ("storing", "buffer"))
    }


@contextmanager
def _recorded(rig: Rig) -> Iterator[Callable[[], None]]:
    """Inside, the run's algorithm collects from recorded steps: a rollout at each call, of DQN a vector step."""
    model, clock = rig.model, rig.run.clock
    recorded = rig.recorded()
    env = TimedVecEnv(recorded, clock) if rig.stock else recorded
    callback = CallbackList([StockPhases(clock)] if rig.stock else [])
    with rig.apart():
        model._last_obs = recorded.reset()
        model._last_episode_starts = rig.frames[-1].dones
        callback.init_callback(model)
        try:
            yield lambda: collect_once(rig, env, callback)
        finally:
            callback.on_training_end()


def collect_once(rig: Rig, env: Any, callback: Any) -> None:
    """One rollout, or one vector step of DQN."""
    model = rig.model
    if rig.off_policy:
        model.collect_rollouts(
            env, callback, model.train_freq, model.replay_buffer, learning_starts=0, log_interval=None
        )
    else:
        model.collect_rollouts(env, callback, model.rollout_buffer, n_rollout_steps=model.n_steps)


def update_window(rig: Rig, seconds: float) -> Window:
    """The run's own `train` on what was collected last. PPO begins with the same weights every time."""
    if not rig.off_policy and not rig.model.rollout_buffer.full:
        with _recorded(rig) as collect:
            collect()
    spent, calls, until = 0.0, 0, time.perf_counter() + seconds
    while not calls or time.perf_counter() < until:
        spent += _dqn_updates(rig) if rig.off_policy else _ppo_update(rig, seconds)
        calls += 1
    per_call = rig.num_envs if rig.off_policy else rig.model.n_steps * rig.num_envs
    return {"update": spent / calls / per_call}


def _dqn_updates(rig: Rig) -> float:
    begun = time.perf_counter()
    rig.model.train(gradient_steps=rig.model.gradient_steps, batch_size=rig.model.batch_size)
    return time.perf_counter() - begun


def _ppo_update(rig: Rig, seconds: float) -> float:
    """One update here and now, with the threads it has beside collecting where it runs there (overlap).

    Where it takes longer than `seconds`, the next are of one epoch, counted as so many.
    """
    model, epochs = rig.model, rig.model.n_epochs
    with untouched(model.policy):
        try:
            model.n_epochs = 1 if rig.slow_update else epochs
            begun = time.perf_counter()
            if rig.stock:
                model.train()
            else:
                _update_once(model)
            took: float = (time.perf_counter() - begun) * epochs / model.n_epochs
            rig.slow_update = took > seconds and model.target_kl is None
            return took
        finally:
            model.n_epochs = epochs


def _update_once(model: Any) -> None:
    """By the engine that learns: beside collecting that is another one, of a copy of the policy."""
    engine, rollout, work = model.engine_now(), model.rollout_buffer, model.work()
    if engine.settings.overlap:
        engine = engine.overlapped.prepared(engine, rollout, work)
    engine.update(rollout, work)


def replay_window(rig: Rig, seconds: float) -> Window:
    """Drawing an iteration's batches from the replay buffer, in the trainer."""
    model, calls, until = rig.model, 0, time.perf_counter() + seconds
    storage, updates, size = model.replay_buffer, model.gradient_steps, model.batch_size
    normalizer = model.get_vec_normalize_env()
    in_blocks = not rig.stock and model.engine_now().kind == "kernels"
    begun = time.perf_counter()
    while not calls or time.perf_counter() < until:
        if in_blocks:
            Direct().block(storage, updates, size)
        elif rig.stock:
            for _ in range(updates):
                storage.sample(size, env=normalizer)
        else:
            list(Direct().batches(storage, updates, size, normalizer))
        calls += 1
    return {"replay": (time.perf_counter() - begun) / calls / rig.num_envs}


def logging_window(rig: Rig, seconds: float) -> Window:
    """The run's own callback on recorded steps, with the log lines that fall due meanwhile."""
    callback, frames, model = rig.run.callback, rig.frames, rig.model
    progress, counters = rig.run.progress, None if rig.stock else model.engine
    per_rollout = 1 if rig.off_policy else model.n_steps
    updates = updates_per_step(rig) * per_rollout * rig.num_envs
    callback.on_training_start({}, {})
    kept = progress.updates if counters is None else counters.gradient_updates
    steps, until = 0, time.perf_counter() + seconds
    begun = time.perf_counter()
    while not steps or time.perf_counter() < until:
        done = kept + round(updates * (steps // per_rollout))
        if counters is None:
            progress.updates = done
        else:
            counters.gradient_updates = done
        callback.on_rollout_start()
        for _ in range(per_rollout):
            frame = frames[steps % len(frames)]
            seen = {"infos": frame.infos, "dones": frame.dones, "rewards": frame.rewards}
            callback.update_locals({**seen, "new_obs": frame.observations})
            callback.on_step()
            steps += 1
        callback.on_rollout_end()
    spent = time.perf_counter() - begun
    if counters is None:
        progress.updates = kept
    else:
        counters.gradient_updates = kept
    callback.on_training_end()
    return {"logging": spent / (steps * rig.num_envs)}


def updates_per_step(rig: Rig) -> float:
    """Gradient updates per env step."""
    if rig.off_policy:
        return float(rig.model.gradient_steps / rig.num_envs)
    size = rig.model.n_steps * rig.num_envs
    return float(rig.model.n_epochs * -(-size // rig.model.batch_size) / size)


def train_window(rig: Rig, seconds: float) -> Window:
    """The run itself."""
    return {"train": rig.train(seconds)}


WINDOWS: dict[str, Callable[[Rig, float], Window]] = {
    "env": env_window,
    "policy": policy_window,
    "update": update_window,
    "replay": replay_window,
    "logging": logging_window,
    "train": train_window,
}
IN_WINDOW = {"transport": "env", "storing": "policy"}  # parts that another part's window measures too


def windows_of(rig: Rig, wanted: Sequence[str]) -> list[str]:
    """Names of the windows that measure the parts `wanted`, of those that exist for this run."""
    names = dict.fromkeys(IN_WINDOW.get(part, part) for part in wanted)
    return [name for name in names if name != "replay" or rig.off_policy]


Samples = dict[str, list[float]]  # part → seconds per env step, window by window


def measure(
    rigs: Mapping[str, Rig],
    names: Sequence[str],
    seconds: float,
    samples: Mapping[str, Samples],
    tell: Callable[[str], None] = lambda _: None,
    rounds: int = ROUNDS,
) -> None:
    """Run windows in turn: round by round, part by part, configuration by configuration.

    Args:
        seconds: per part and configuration, all rounds together.
        samples: configuration → part → what was measured; added to, so that an interrupted measurement leaves what it
            has. The first round is not in it.
        tell: is told what comes next.
    """
    spent = dict.fromkeys(((name, key) for name in names for key in rigs), 0.0)
    for turn in range(rounds):
        for name in names:
            for key, rig in rigs.items():
                if turn >= LEAST_ROUNDS and spent[name, key] > SLACK * seconds:
                    continue
                tell(f"{name} {turn + 1}/{rounds}")
                rig.activate()
                begun = time.perf_counter()
                found = WINDOWS[name](rig, seconds / rounds)
                took = time.perf_counter() - begun
                spent[name, key] += took
                if turn or took > seconds / 2:  # what took so long has warmed up on the way
                    for part, value in found.items():
                        samples[key].setdefault(part, []).append(value)


def typical(values: Sequence[float]) -> float:
    """The lower quartile: what else the machine does can only add time.

    On two cores at load 10 the medians of five parts and of the whole drifted apart by up to 40 %, these by 10 %.
    """
    return float(np.quantile(values, 0.25))


def rates_of(samples: Samples) -> Rates:
    """Typical windows."""
    return Rates(**{part: typical(values) for part, values in samples.items() if part in Rates._fields})


def ratios_of(changed: Samples, base: Samples) -> dict[str, float]:
    """Typical changed ÷ typical base, of the parts that both have."""
    both = [part for part in changed if part in base and typical(base[part]) > 0]
    return {part: typical(changed[part]) / typical(base[part]) for part in both}
