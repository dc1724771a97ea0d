"""Envs of a training that its evaluations play on: its one env with `num_envs=1`, and its external engines.

Where one instance of a simulator can live (a port, a licence, a seat, a window), no second one is opened beside it. A
lent env is brought back to where the training left it by the same means as after a resume (`saving/env_state.py`);
where that fails the training goes on with a new episode.

Engines play the games of an evaluation beside the training's, which wait; where they take no more games, these are
ended, and begun anew. Only the last evaluation plays on in the training's own games.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.vec_env import VecEnv, VecNormalize

from fasttrain.runs.envs import settled, wrapped
from fasttrain.runs.evaluate import Quality, evaluate_both
from fasttrain.runs.evaluator import EVALUATION
from fasttrain.runs.state import SEED_STRIDE, begin_anew, traced
from fasttrain.runs.times import engines_of
from fasttrain.saving.env_state import env_state, load_env_state, own_random_state
from fasttrain.spec.config import Config
from fasttrain.spec.reading import evaluated, lends_engines, lends_env


@contextmanager
def lent(model: BaseAlgorithm, env: VecEnv, config: Config, returned: bool) -> Iterator[VecEnv]:
    """The env to evaluate on; `env.normalize` as it is now, and not learning.

    Args:
        env: the training's, without what SB3 puts around it.
        returned: the training goes on with it.
    """
    whole: Any = model.get_env()
    games = None if lends_engines(config) and not returned else engines_of(env)
    with own_random_state(config.eval.seed):
        state, views = env_state(whole, traced(config))
        arrays = {name: np.array(array) for name, array in views.items()}
        if games is not None:
            lent = wrapped(games.guests(), evaluated(config), model.get_vec_normalize_env())
        else:
            lent = settled(env.venv, config, env) if isinstance(env, VecNormalize) else env
        try:
            yield lent
        finally:
            if games is not None:
                lent.close()
            if returned and (games is None or games.ended):
                other_seed = (config.seed + SEED_STRIDE + model.num_timesteps) % 2**31
                begun = load_env_state(whole, state, arrays, other_seed, traced(config))
                if begun is not None:
                    begin_anew(model, begun)


def measured(run: Any, final: bool) -> Quality:
    """The quality of a `train.Run`'s policy: on fresh envs, or on its own, which the final one need not bring back."""
    config: Config = run.config
    lends = lends_env(config) or engines_of(run.env) is not None
    with lent(run.model, run.env, config, not final) if lends else nullcontext() as env:
        return evaluate_both(
            run.model, config, run.console, lambda: run.stop.requested, sampled=final, env=env, reader=run.reader
        )


def why_no_quality(run: Any) -> dict[str, str]:
    """For summary.json, where the final evaluation was left out or failed."""
    if not run.config.eval.episodes:
        return {"evaluation": "left out: eval.episodes=0"}
    failed = run.saving.failed.get(EVALUATION)
    return {"evaluation": f"failed: {failed}"} if failed else {}
