"""What `fasttrain doctor` says of a training's limit, beside loops of this file that share no code with it.

`rate` is the limit: what the training would reach if envs, policy and update alone were all it did.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import trainings
from benchmarks.work import OURS, Sample, Work, works_of

JOBS = {
    "skullking": ("+profile=speed",),
    "python-100us": ("+profile=speed", "env.entry_point=benchmarks.envs:Working"),
    "python-100us-dummy": ("+profile=speed", "env.entry_point=benchmarks.envs:Working", "vec_env=dummy"),
    "dqn-cartpole": ("+profile=speed", "algo=dqn", "env.id=CartPole-v1"),
}
BLOCKS, BLOCK_S = 12, 0.25


def doctor(arguments: tuple[str, ...]) -> Sample:
    from fasttrain.cli import main
    from fasttrain_studies import doctor as module

    module.TRIED = 0
    with tempfile.TemporaryDirectory() as folder:
        if main(["doctor", *arguments, f"hydra.run.dir={folder}/run"]):
            raise SystemExit(1)
        told = json.loads((Path(folder) / "run" / "doctor.json").read_text(encoding="utf-8"))
    advice = told["advice"][0]["change"] if told["advice"] else "none"
    return {"rate": told["limit_steps_per_s"], "share_of_limit": told["share_of_limit"], "chosen": advice}


def parts_alone(arguments: tuple[str, ...]) -> Sample:
    """Envs, policy and update one after another, on the model of such a training after a rollout of real play."""
    plan, model = trainings.built(arguments)
    config = plan.config
    dqn = config.algo.name == "dqn"
    if dqn:
        model.learning_starts = 20_000  # random play until then
    model.learn(20_000 if dqn else config.algo.rollout_size)
    start = {key: value.clone() for key, value in model.policy.state_dict().items()}

    def update() -> float:
        if not dqn:  # from the same weights
            model.policy.load_state_dict(start)
        begun = time.perf_counter()
        model.train(config.updates_per_step, config.batch_size) if dqn else model.train()
        return time.perf_counter() - begun

    per_update = config.num_envs if dqn else config.algo.rollout_size
    spent = [
        blocks(env_step(config, model), config.num_envs),
        blocks(acting(model, dqn), config.num_envs),
        blocks(update, per_update),
    ]
    return {
        "rate": 1 / sum(spent),
        "alone": dict(zip(("env", "policy", "update"), (1 / s for s in spent), strict=True)),
    }


def blocks(step: Callable[[], float], per_call: int) -> float:
    """Lower quartile over blocks of calls, in seconds per env step; `step` returns the seconds that count."""
    found = []
    for _ in range(BLOCKS + 1):
        spent, calls, until = 0.0, 0, time.perf_counter() + BLOCK_S
        while not calls or time.perf_counter() < until:
            spent += step()
            calls += 1
        found.append(spent / calls / per_call)
    return statistics.quantiles(found[1:], n=4)[0]


def env_step(config: Any, model: Any) -> Callable[[], float]:
    """Random legal actions, drawn beforehand as far as masks allow."""
    import numpy as np

    source = model.collector.source_of(model.env)
    keys = np.random.default_rng(0).random((config.num_envs, int(model.action_space.n)), np.float32) + 1.0
    masked = source.masked and config.algo.name != "ppo"

    def step() -> float:
        begun = time.perf_counter()
        masks = source.read_masks() if masked else None
        read = time.perf_counter() - begun
        np.random.shuffle(keys)
        actions = keys.argmax(axis=1) if masks is None else (keys * masks).argmax(axis=1)
        begun = time.perf_counter()
        source.step_slots(actions)
        return read + time.perf_counter() - begun

    return step


def acting(model: Any, dqn: bool) -> Callable[[], float]:
    """On the observations and masks of one rollout, of DQN on those of now."""
    import numpy as np

    engine, turn = model.engine_now(), 0
    seen, masks = (model._last_obs[None], None) if dqn else (None, None)
    if not dqn:
        engine.begin()
        storage = model.rollout_buffer
        seen, masks = np.array(storage.observations), getattr(storage, "action_masks", None)

    def act() -> float:
        nonlocal turn
        turn = (turn + 1) % len(seen)  # type: ignore[arg-type]
        begun = time.perf_counter()
        engine.act(seen[turn], None if masks is None else np.array(masks[turn], np.bool_))  # type: ignore[index]
        return time.perf_counter() - begun

    return act


WORKS = works_of(
    *(
        Work(
            f"doctor-{job}",
            f"The limit of `{' '.join(arguments)}`, by `fasttrain doctor` and by separate loops.",
            {OURS: partial(doctor, arguments), "separate loops": partial(parts_alone, arguments)},
            equal=(),
        )
        for job, arguments in JOBS.items()
    )
)
