"""Do recurrent policies learn what needs memory? benchmarks/memory_envs.py says what is seen and paid there.

`fasttrain` is `+profile=speed algo=recurrent_ppo` with an LSTM of 64 units, `stock` sb3_contrib.RecurrentPPO in
DummyVecEnv, `no memory` fasttrain's PPO with a feed-forward layer in the LSTM's place. In the T-mazes of length 50 and
200 one LSTM for policy and value is initialised so that it keeps things for about as long; by torch's own
initialization nothing was learned of length 50 in 500,000 steps. Skull King's sides have equal wall time, not steps.
"""

from __future__ import annotations

from benchmarks.work import OURS, Work, works_of
from benchmarks.works.learning import learning_work

LSTM = ("algo=recurrent_ppo", "algo.lstm_hidden_size=64")
SHARED = ("algo.shared_lstm=true", "algo.enable_critic_lstm=false")
STOCK, NO_MEMORY, GRU = "stock", "no memory", "fasttrain, GRU"
SIDES = {
    OURS: ("+profile=speed", *LSTM),
    STOCK: ("profile=baseline", *LSTM),
    NO_MEMORY: ("+profile=speed", "algo=ppo", "algo.net_arch=[64,64,64]"),
    GRU: ("+profile=speed", *LSTM, "algo.cell=gru"),
}
GATED, UNGATED = (OURS, STOCK, NO_MEMORY), (OURS, NO_MEMORY)
COMMON = ("checkup=off", "torch_threads=1")


def task(
    name: str, env: str, sides: tuple[str, ...], settings: str, measure: str = "win_rate", lasting: int = 0
) -> Work:
    """Envs are stepped one by one in the trainer's process, by every side. `lasting`: steps that an LSTM shall keep."""
    policy = ("algo.policy=benchmarks.memory_envs:LastingPolicy", f"algo.policy_kwargs.steps={lasting}", *SHARED)
    more = ("vec_env=dummy", env, *settings.split(), *COMMON)
    typed = {side: (*SIDES[side], *(policy if lasting and side != NO_MEMORY else ()), *more) for side in sides}
    return learning_work(f"learn-memory-{name}", f"Learning with memory, `{env}`.", typed, measure)


def t_maze(length: int, sides: tuple[str, ...], settings: str, lasting: int = 0) -> Work:
    """Its episodes fit into a rollout, so that gradients reach the entrance."""
    same = f"env.kwargs.length={length} num_envs=32 algo.gamma=0.99 algo.n_epochs=10 "
    same += "algo.target_kl=0.03 eval.episodes=500 "
    rate = " algo.learning_rate=linear_0.001"
    entry = "env.entry_point=benchmarks.memory_envs:t_maze"
    return task(f"tmaze-{length}", entry, sides, same + settings + rate, lasting=lasting)


SMALL = "num_envs=16 algo.rollout_size=2048 algo.learning_rate=linear_0.00{} eval.episodes=200"
MINIGRID = (
    "env.wrappers=[minigrid.wrappers:ImgObsWrapper,gymnasium.wrappers:FlattenObservation,"
    '{wrapper:"gymnasium.wrappers:DtypeObservation",dtype:"numpy:float32"}]'
)
SKULLKING = (
    "+profile=speed", "num_envs=256", "algo.rollout_size=16384", "batch_size=1024", "algo.n_epochs=4",
    "algo.learning_rate=1e-3", "total_timesteps=1e9", "stop.max_minutes=2", "eval.episodes=2000", *COMMON,
)  # fmt: skip
HIDDEN = "env.kwargs.card_memory=false"
WORKS = works_of(
    t_maze(10, (*GATED, GRU), "algo.rollout_size=2048 batch_size=256 algo.ent_coef=0.02 total_timesteps=150000"),
    t_maze(50, GATED, "algo.rollout_size=8192 batch_size=512 algo.ent_coef=0.05 total_timesteps=500000", 50),
    t_maze(200, UNGATED, "algo.rollout_size=16384 batch_size=1024 algo.ent_coef=0.05 total_timesteps=1000000", 200),
    task(
        "cartpole",
        "env.entry_point=benchmarks.memory_envs:cartpole",
        (*GATED, GRU),
        SMALL.format(2)
        + " batch_size=512 algo.n_epochs=10 algo.gamma=0.98 env.normalize=[reward] total_timesteps=150000",
        "mean_reward",
    ),
    task(
        "pendulum",
        "env.entry_point=benchmarks.memory_envs:pendulum",
        UNGATED,
        SMALL.format(1).replace("2048", "3200")
        + " batch_size=640 algo.n_epochs=10 algo.gamma=0.95 total_timesteps=300000",
        "mean_reward",
    ),
    task(
        "minigrid-s7",
        "env.id=minigrid:MiniGrid-MemoryS7-v0",
        UNGATED,
        f"{MINIGRID} {SMALL.format(1)} batch_size=256 algo.n_epochs=5 algo.ent_coef=0.01 total_timesteps=200000",
        "mean_reward",
    ),
    learning_work(
        "learn-memory-skullking",
        "Skull King in two minutes each: memory in place of a record of the cards that were played.",
        {
            OURS: (*SKULLKING, "algo=maskable_recurrent_ppo", "algo.lstm_hidden_size=64", *SHARED, HIDDEN),
            "all cards shown, no memory": (*SKULLKING, "algo=maskable_ppo"),
            NO_MEMORY: (*SKULLKING, "algo=maskable_ppo", HIDDEN),
        },
        "win_rate",
    ),
)
