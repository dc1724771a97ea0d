"""What the envs of a run say of their time, and which of them have games with external engines."""

from __future__ import annotations

from stable_baselines3.common.vec_env import VecEnv

from fasttrain.perf.report import EnvTimes
from fasttrain.spec.config import Config
from fasttrain.vec.external import ExternalVecEnv
from fasttrain.vec.self_play import SelfPlayVecEnv
from fasttrain.vec.shared import SharedMemoryVecEnv


def env_times(env: VecEnv, config: Config, opponents_ns: int, counted: bool) -> EnvTimes:
    """What they report: opponents' time, and where workers or engines spent theirs.

    Args:
        opponents_ns: what info["perf"] said of it.
        counted: whether the envs count it themselves, as `opponents_ns`.
    """
    itself = env if isinstance(env, SelfPlayVecEnv) else None
    stepping = env.unwrapped if itself is None else itself.inner
    if itself is not None:  # the trainer decides for them; what the envs count lies within
        opponents_ns = itself.opponents_ns
    if isinstance(stepping, ExternalVecEnv):
        return EnvTimes(opponents_ns, in_step=config.schedule != "first_ready", **stepping.env_times())
    shared = stepping if isinstance(stepping, SharedMemoryVecEnv) else None
    if counted and itself is None:
        counts = env.get_attr("opponents_ns")
        opponents_ns = int(counts[0] if config.vec_env == "native" else sum(counts))
    if shared is None:
        return EnvTimes(opponents_ns)
    times = shared.times_ns()
    of_workers = (times["opponents"] or opponents_ns) // shared.num_workers  # side by side
    return EnvTimes(
        opponents_ns=of_workers if itself is None else opponents_ns,
        num_workers=shared.num_workers,
        envs_ns=times["envs"],
        slowest_ns=times["slowest"],
        waiting_ns=times["waiting"],
        in_step=config.schedule != "first_ready",
        restarts=shared.restarts,
        lost_steps=shared.lost_steps,
    )


def engines_of(env: VecEnv) -> ExternalVecEnv | None:
    """The vectorized env whose games external engines play, if `env` is one."""
    games = env.inner if isinstance(env, SelfPlayVecEnv) else env.unwrapped
    return games if isinstance(games, ExternalVecEnv) else None
