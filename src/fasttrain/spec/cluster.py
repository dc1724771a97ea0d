"""The settings `cluster.…`: actors of a Ray cluster act and step, each with envs of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from fasttrain.errors import ConfigError
from fasttrain.spec.setting import setting

ALGORITHMS = ("ppo", "maskable_ppo", "recurrent_ppo", "maskable_recurrent_ppo", "dqn", "sac")


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterConfig:
    """Actors on one or several machines (`cluster=ray`)."""

    engine: Literal["off", "ray"] = setting(
        "off",
        "ray: actors of a Ray cluster act and step for PPO and its variants, DQN and SAC, and this process learns. "
        "It is also typed as cluster=ray. off: envs step on this machine.",
    )
    address: str = setting(
        "local",
        "Where Ray runs. local: started for this training, on this machine. auto: the cluster of this machine. "
        "HOST:PORT: that cluster; it needs RAY_AUTH_MODE=token.",
    )
    actors: int = setting(2, "Number of actors. They share num_envs, and each uses one core.", least=1, most=10_000)


def check_cluster(config: Any) -> None:
    """Raises ConfigError if a setting is not possible with cluster=ray."""
    own, env, algo = config.cluster, config.env, config.algo
    if own.engine == "off":
        if own != ClusterConfig():
            key = "address" if own.address != "local" else "actors"
            raise ConfigError(f"cluster.{key} has no effect without cluster=ray: add it, or remove cluster.{key}")
        return
    if algo.name not in ALGORITHMS:
        raise ConfigError(f"cluster=ray with algo={algo.name}: actors collect for {', '.join(ALGORITHMS)} only")
    if own.actors > config.num_envs:
        raise ConfigError(f"cluster.actors={own.actors} is more than num_envs={config.num_envs}: an actor needs an env")
    refused = {
        "engine=stock": (config.engine == "stock", "SB3's classes step their envs themselves"),
        "env.normalize": (
            bool(env.normalize) and (algo.spec.off_policy or config.schedule == "continuous"),
            "actors merge its statistics after a rollout of lockstep only",
        ),
        "policies": (bool(config.policies), "actors have one policy"),
        "curriculum.tasks": (bool(config.curriculum.tasks), "tasks are drawn in the process that has the envs"),
        "env.phases": (bool(env.phases), "actors send the infos of episode ends only"),
        "reward_debug": (config.reward_debug, "actors send the infos of episode ends only"),
        "env.stagger": (env.stagger > 0, "it counts the copies of one process"),
        "env.info_keys": (bool(env.info_keys), "actors send the infos of episode ends only"),
        "env.frame_stack": (env.frame_stack > 1, "frames are stacked in the process that has the envs"),
        "schedule=first_ready": (config.schedule == "first_ready", "actors step their envs in lockstep"),
        "algo.her": (getattr(algo, "her", "off") != "off", "the envs compute the rewards of other goals"),
        "algo.use_sde": (bool(getattr(algo, "use_sde", False)), "the noise is that of one process"),
        f"env.backend={env.backend}": (env.backend not in ("gymnasium", "daemons"), "its envs belong to one process"),
    }
    for key, (is_set, why) in refused.items():
        if is_set:
            raise ConfigError(f"cluster=ray with {key}: {why}; remove one of them")
