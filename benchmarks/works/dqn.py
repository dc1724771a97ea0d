"""DQN: CartPole end to end, and the update alone, without masks and with them.

Both sides of an update are given the very same replay buffer: our model fills it with random play, and stock's is
filled with that. An update's cost does not depend on what the weights are, so they are trained on and on.
"""

from __future__ import annotations

import statistics
import time
from functools import partial
from typing import Any

from benchmarks import peers, trainings
from benchmarks.work import OURS, Sample, Work, works_of

WINDOW = 100  # last episodes, whose mean return is the quality
NUM_ENVS, UPDATES_PER_STEP, WARM_UP, STEPS, NET = 8, 8, 1000, 20_000, [64, 64]
ALGO: dict[str, Any] = {  # every hyperparameter that a default might choose differently
    "buffer_size": 50_000, "learning_rate": 1e-3, "gamma": 0.99, "tau": 1.0, "target_update_interval": 500,
    "exploration_fraction": 0.1, "exploration_initial_eps": 1.0, "exploration_final_eps": 0.05, "max_grad_norm": 10.0,
}  # fmt: skip


TRAININGS = {"dqn-cartpole": 64, "dqn-batch-256": 256}  # batch size


def ours(batch_size: int) -> Sample:
    """A whole `fasttrain` run."""
    settings = {
        "algo": "dqn", "env.id": "CartPole-v1", "vec_env": "dummy", "num_envs": NUM_ENVS, "batch_size": batch_size,
        "updates_per_step": UPDATES_PER_STEP, "warmup_steps": WARM_UP, "total_timesteps": STEPS, "algo.net_arch": NET,
        "eval.episodes": 8,
    }  # fmt: skip
    arguments = ["+profile=speed", *trainings.typed(settings), *trainings.typed(ALGO, "algo.")]
    return trainings.command(arguments, batch_size, WINDOW)


def stock(batch_size: int, subproc: bool, threads: int | None = None) -> Sample:
    """What an SB3 user writes."""
    begun = time.perf_counter()
    from stable_baselines3 import DQN

    trainings.threads(threads)
    model = DQN(
        "MlpPolicy", trainings.stock_envs("CartPole-v1", NUM_ENVS, subproc), batch_size=batch_size,
        learning_starts=WARM_UP, train_freq=1, gradient_steps=UPDATES_PER_STEP, policy_kwargs={"net_arch": NET},
        stats_window_size=WINDOW, seed=0, device="cpu", **ALGO,
    )  # fmt: skip
    return trainings.stock_learn(model, STEPS, begun)


TRANSITIONS, BLOCKS = 50_000, 21
STORED = ("observations", "next_observations", "actions", "rewards", "dones", "timeouts")
UPDATES = {"dqn-update-64": (64, 40, False), "dqn-update-masked": (256, 8, True)}  # batch, calls in a block, masks


def update_alone(name: str, ours: bool, stock_threads: int | None = None) -> Sample:
    """Samples per second of `model.train(8, batch_size)` on a filled buffer: CartPole, or Skull King with masks.

    Stock knows no masks: its maximum is over all actions, which is less work.
    """
    begun = time.perf_counter()
    import torch

    batch_size, calls, masked = UPDATES[name]
    stock_threads = stock_threads or torch.get_num_threads()
    model = our_model(batch_size, masked)
    if ours:
        model.use_engine("kernels")
    trained = model if ours else stock_twin(model, batch_size)
    torch.set_num_threads(1 if ours else stock_threads)  # 1: what torch_threads=auto takes for such a net
    updates, seconds, ready = trainings.count_updates(trained), [], time.perf_counter()
    for _ in range(BLOCKS):
        before = time.perf_counter()
        for _ in range(calls):
            trained.train(UPDATES_PER_STEP, batch_size)
        seconds.append(time.perf_counter() - before)
    return {
        "rate": calls * UPDATES_PER_STEP * batch_size / statistics.median(seconds[1:]),
        "updates": updates() / (BLOCKS * calls),
        "samples_per_update": batch_size,
        "startup_s": ready - begun,
    }


def our_model(batch_size: int, masked: bool, buffer_size: int = TRANSITIONS) -> Any:
    """Our DQN, whose buffer is filled with 50,000 transitions of random play, over and over; without kernels yet."""
    import numpy as np

    from fasttrain.accelerators.kernels_q import kernel_calls
    from fasttrain.algos.dqn import DQN
    from fasttrain.vec.native import NativeVecEnv
    from fasttrain_games.skullking.game import SkullKingGame
    from fasttrain_kernels.kernel_cache import compile_all

    compile_all(kernel_calls())
    env: Any = NativeVecEnv(SkullKingGame(NUM_ENVS)) if masked else trainings.stock_envs("CartPole-v1", NUM_ENVS)
    env.seed(0)
    model: Any = DQN("MlpPolicy", env, **_arguments(batch_size, buffer_size))
    _, callback = model._setup_learn(model.buffer_size)
    callback.on_training_start({}, {})
    model.collect_rollouts(env, callback, model.train_freq, model.replay_buffer, learning_starts=model.learning_starts)
    storage = model.replay_buffer
    for array in (getattr(storage, name) for name in STORED if not storage.full):
        array[storage.pos :] = array[np.arange(len(array) - storage.pos) % storage.pos]
    storage.full = True
    return model


def _arguments(batch_size: int, buffer_size: int = TRANSITIONS) -> dict[str, Any]:
    """The same for both; no step is taken by the stock model."""
    return {
        "buffer_size": buffer_size, "batch_size": batch_size, "learning_starts": TRANSITIONS,
        "train_freq": TRANSITIONS // NUM_ENVS, "policy_kwargs": {"net_arch": NET}, "seed": 0, "device": "cpu",
    }  # fmt: skip


def stock_twin(model: Any, batch_size: int) -> Any:
    """Stock's model with the same weights, hyperparameters and transitions."""
    import numpy as np
    from stable_baselines3 import DQN

    stock: Any = DQN("MlpPolicy", model.env, **_arguments(batch_size))
    stock._setup_learn(model.buffer_size)
    stock.policy.load_state_dict(model.policy.state_dict())
    buffer, storage = stock.replay_buffer, model.replay_buffer
    for name in STORED:
        mine = getattr(buffer, name)
        mine[:] = np.asarray(getattr(storage, name)).reshape(mine.shape)
    buffer.pos, buffer.full = storage.pos, storage.full
    return stock


def asked(batch_size: int) -> dict[str, Any]:
    """What SBX is asked for. It does not clip gradients, which is less work."""
    return {
        "algo": "DQN", "env": "CartPole-v1", "num_envs": NUM_ENVS, "batch_size": batch_size, "warm_up": 2 * WARM_UP,
        "steps": STEPS, "from_start": True, "arguments": {
            "batch_size": batch_size, "learning_starts": WARM_UP, "train_freq": 1, "gradient_steps": UPDATES_PER_STEP,
            "policy_kwargs": {"net_arch": NET}, **{key: ALGO[key] for key in ALGO if key != "max_grad_norm"},
        },
    }  # fmt: skip


WORKS = works_of(
    *(
        Work(
            name,
            f"Training CartPole, DQN [64, 64], 8 envs, 8 updates of {batch_size} a step.",
            {
                OURS: partial(ours, batch_size),
                "stock DQN, DummyVecEnv": partial(stock, batch_size, False),
                # On a busy machine torch's own threads wait for each other: the better of both is the opponent.
                "stock DQN, DummyVecEnv, 1 thread": partial(stock, batch_size, False, 1),
                **({"stock DQN, SubprocVecEnv": partial(stock, batch_size, True)} if batch_size == 64 else {}),
                "SBX": partial(peers.run, "SBX, off-policy", asked(batch_size)),
            },
            target="T4" if batch_size == 64 else "",
            peers=frozenset({"SBX"}),
        )
        for name, batch_size in TRAININGS.items()
    ),
    *(
        Work(
            name,
            f"The update of DQN alone, batch {batch_size}{', Skull King with masks' if masked else ''}.",
            {
                OURS: partial(update_alone, name, True),
                "stock": partial(update_alone, name, False),
                "stock, 1 thread": partial(update_alone, name, False, 1),
            },
            unit="samples/s",
            equal=("updates", "samples_per_update"),
            target="T4",
        )
        for name, (batch_size, _, masked) in UPDATES.items()
    ),
)
