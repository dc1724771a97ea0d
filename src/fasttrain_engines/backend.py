"""The backend `env.backend=daemons`: checks, plans and builds games with external engines. Defines their GameSpecs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fasttrain.spec.backends import Backend
from fasttrain.spec.games import GameSpec
from fasttrain_engines.settings import DaemonsConfig, check_daemons, shared_out, workers_for

if TYPE_CHECKING:
    from fasttrain.spec.config import Config
    from fasttrain_engines.vec_env import DaemonVecEnv

CONF = Path(__file__).parent / "conf"
OWN = {"total_timesteps": 1_000_000, "eval_episodes": 400}
GO = GameSpec(own={**OWN, "num_envs": 16}, conf=CONF)
SHOWDOWN = GameSpec(own={**OWN, "num_envs": 32}, opponent_key="opponent", eval_opponent="max_damage", conf=CONF)


class _Daemons(Backend):
    name, vec_env, why = "daemons", "daemons", "external engines play"
    what, instead, lends = "the engine plays", "the game's own class to do it", True
    settings, conf = DaemonsConfig, CONF

    def check(self, config: Config) -> None:
        check_daemons(self.own(config), config)

    def build(self, config: Config, num_envs: int, folder: Path | None) -> DaemonVecEnv:
        from fasttrain.machine import usable_cores
        from fasttrain.spec.reading import env_kwargs, evaluation_config, is_self_play, num_guests
        from fasttrain_engines.vec_env import DaemonVecEnv

        env = config.env
        workers = config.workers if isinstance(config.workers, int) else None
        guests = num_guests(config) if folder else 0
        return DaemonVecEnv(
            str(env.entry_point), env_kwargs(config), num_envs, self.own(config), usable_cores(), workers, folder,
            config.engine != "stock", is_self_play(config), guests,
            env_kwargs(evaluation_config(config)) if guests else None, env.on_empty_mask == "raise",
        )  # fmt: skip

    def workers(self, config: Config, requested: int | str, num_envs: int, cores: int) -> tuple[int, str]:
        most = shared_out(self.own(config), num_envs, cores)[0]
        if requested in (0, "auto"):
            return workers_for(self.own(config), num_envs, cores), "they play with the engines"
        return min(int(requested), most), "" if int(requested) <= most else "no more than there are daemons"

    def evaluations(self, config: Config, guests: int, cores: int) -> str:
        most = self.own(config).games_per_daemon
        daemons, per_daemon = shared_out(self.own(config), config.num_envs, cores)
        if most == "auto" or daemons * per_daemon - config.num_envs >= guests:
            return f"evaluations play {guests} games with the training's engines; the training's games wait meanwhile"
        return f"daemons.games_per_daemon={most}: evaluations end the training's games, which start again afterwards"


BACKEND = _Daemons()
