"""Memory: CartPole without its velocities end to end, and what memory costs in Skull King.

Short episodes: an untrained policy falls after about 20 steps, and a learning rate of 1e-8 keeps it so. Long ones: the
pole may swing, and episodes are over after 500 steps, beyond a rollout of 128. All step single envs one by one:
CartPole's own VectorEnv resets in the step after an episode's end, which recurrent policies refuse.
"""

from __future__ import annotations

import time
from functools import partial

from benchmarks import peers, trainings
from benchmarks.work import OURS, Sample, Work, works_of
from benchmarks.works.skullking import command

NUM_ENVS, NUM_STEPS, EPOCHS, LEARNING_RATE = 64, 128, 4, 1e-8
# Units, minibatch, long episodes, rollouts: stock takes 5 s for one in minibatches of 128.
CARTPOLE = {
    f"recurrent-{units}-{name}": (units, batch_size, long, rollouts)
    for units in (64, 256)
    for name, batch_size, long, rollouts in (
        ("128-short", 128, False, 3),
        ("2048-short", 2048, False, 5),
        ("2048-long", 2048, True, 5),
    )
}


def ours(units: int, batch_size: int, long: bool, rollouts: int) -> Sample:
    """A whole run of the command."""
    settings = {
        "env.entry_point": f"benchmarks.memory_envs:{'long' if long else 'cartpole'}", "algo": "recurrent_ppo",
        "vec_env": "dummy", "num_envs": NUM_ENVS, "batch_size": batch_size,
        "algo.rollout_size": NUM_ENVS * NUM_STEPS, "algo.n_epochs": EPOCHS, "algo.learning_rate": LEARNING_RATE,
        "algo.lstm_hidden_size": units, "total_timesteps": NUM_ENVS * NUM_STEPS * rollouts, "checkup": "off",
        "eval.episodes": 2,
    }  # fmt: skip
    return trainings.command(["+profile=speed", *trainings.typed(settings)], batch_size)


def stock(threads: int | None, units: int, batch_size: int, long: bool, rollouts: int) -> Sample:
    """What an SB3 user writes."""
    begun = time.perf_counter()
    from sb3_contrib import RecurrentPPO

    from benchmarks import memory_envs

    trainings.threads(threads)
    env = trainings.stock_envs(memory_envs.long if long else memory_envs.cartpole, NUM_ENVS)
    kwargs = {"lstm_hidden_size": units}
    model = RecurrentPPO(
        "MlpLstmPolicy", env, n_steps=NUM_STEPS, batch_size=batch_size, n_epochs=EPOCHS,
        learning_rate=LEARNING_RATE, policy_kwargs=kwargs, seed=0, device="cpu",
    )  # fmt: skip
    return trainings.stock_learn(model, NUM_ENVS * NUM_STEPS * rollouts, begun)


def loop(units: int, batch_size: int, long: bool, rollouts: int) -> Sample:
    """A lean single-file loop."""
    from benchmarks import memory_envs
    from benchmarks.peers import lstm_lean

    make = memory_envs.long if long else memory_envs.cartpole
    return lstm_lean.run(make, NUM_ENVS, NUM_STEPS, units, LEARNING_RATE, EPOCHS, batch_size, rollouts)


def sample_factory(units: int, batch_size: int, long: bool, rollouts: int) -> Sample:
    """One LSTM for both nets, behind layers of 64."""
    if long:
        return {"skipped": "it has no such env"}
    # It leaves epochs out where the loss changes by less than 1e-6, as it does at our learning rate.
    work = {
        "num_envs": NUM_ENVS, "num_steps": NUM_STEPS, "n_epochs": EPOCHS, "learning_rate": 1000 * LEARNING_RATE,
        "units": units, "batch_size": batch_size, "rollouts": rollouts, "gamma": 0.99, "gae_lambda": 0.95,
        "clip_range": 0.2, "vf_coef": 0.5, "max_grad_norm": 0.5,
    }  # fmt: skip
    return peers.run("Sample Factory", work)


def cartpole(name: str, numbers: tuple[int, int, bool, int]) -> Work:
    units, batch_size, long, _ = numbers
    episodes = "episodes longer than the rollout" if long else "episodes of some 20 steps"
    return Work(
        name,
        f"Recurrent PPO, CartPole without velocities, LSTM {units}, minibatch {batch_size}, {episodes}.",
        {
            OURS: partial(ours, *numbers),
            "sb3-contrib": partial(stock, None, *numbers),
            "sb3-contrib, 1 thread": partial(stock, 1, *numbers),
            "lean PPO-LSTM loop": partial(loop, *numbers),
            "Sample Factory": partial(sample_factory, *numbers),
        },
        peers=frozenset({"Sample Factory"}),
        target="T11" if units == 64 else "",
    )


SHARED = ("algo.lstm_hidden_size=64", "algo.shared_lstm=true", "algo.enable_critic_lstm=false")
SKULLKING: dict[str, tuple[str, tuple[str, ...]]] = {
    "recurrent-skullking-256": ("LSTMs of 256 units, sb3-contrib's architecture", ()),
    "recurrent-skullking-64": ("LSTMs of 64 units", ("algo.lstm_hidden_size=64",)),
    "recurrent-skullking-shared": ("one LSTM of 64 units for both nets", SHARED),
}
SKULLKING_ROLLOUTS, QUICK = 6, ("checkup=off", "eval.episodes=2")


WORKS = works_of(
    *(cartpole(name, numbers) for name, numbers in CARTPOLE.items()),
    *(
        Work(
            name,
            f"Skull King with memory, {text}, against MaskablePPO without: more arithmetic.",
            {
                OURS: partial(command, "maskable_recurrent_ppo", SKULLKING_ROLLOUTS, *QUICK, *more),
                "fasttrain MaskablePPO, no memory": partial(command, "maskable_ppo", SKULLKING_ROLLOUTS, *QUICK),
            },
        )
        for name, (text, more) in SKULLKING.items()
    ),
)
