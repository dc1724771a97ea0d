"""One process or workers, where the plan's estimates lie close together: both are tried, before anything counts."""

from __future__ import annotations

import dataclasses
import statistics
import time

import numpy as np
from rich.console import Console
from stable_baselines3.common.vec_env import VecEnv

from fasttrain.envs.masks import random_legal_action
from fasttrain.runs.build import build_vec_env
from fasttrain.runs.view import activity
from fasttrain.saving.buffer_state import own_random_state
from fasttrain.spec.config import Config
from fasttrain.spec.flags import EnvFacts, Machine
from fasttrain.spec.plan import Plan
from fasttrain.spec.reading import plays_itself
from fasttrain.spec.stepping import step_costs
from fasttrain.vec.base import slots_of

CLOSE = 2.0  # estimates of which neither is so many times the other
TURNS, TURN_S = 3, 0.1
PAYS_FROM_S = 20.0  # of stepping in the whole training: starting workers for the trial takes two or three seconds


def with_trial(facts: EnvFacts, plan: Plan, machine: Machine, console: Console) -> EnvFacts:
    """`facts` with what a step of all envs took in one process and in workers, where `vec_env=auto` is a close call.

    The trial's envs are built for it and closed again, and Python's, NumPy's and torch's global random streams are as
    before: the run is the one that it would have been. `deterministic=true` goes by the estimates, which a busy machine
    changes less.
    """
    config = plan.config
    row = next(row for row in plan.rows if row.flag == "vec_env")
    if row.requested != "auto" or facts.step_s is None or config.deterministic or plays_itself(config):
        return facts
    if config.env.on_env_error == "restart":  # only workers can do that
        return facts
    loop_s, shared_s, workers = step_costs(config.num_envs, facts, machine)
    if workers < 2 or not 1 / CLOSE < loop_s / shared_s < CLOSE:
        return facts
    if config.total_timesteps / config.num_envs * loop_s < PAYS_FROM_S:
        return facts
    alone = dataclasses.replace(config, vec_env="dummy", schedule="lockstep")
    shared = dataclasses.replace(config, vec_env="shared", workers=workers, schedule="lockstep")
    try:
        with activity(console, "trying one process and workers"), own_random_state(config.seed):
            return facts._replace(tried=tried(alone, shared))
    except Exception:  # envs that cannot be there twice, say: the run itself tells what is wrong with them
        return facts


def tried(*configs: Config) -> tuple[float, ...]:
    """Median seconds of a step of all envs, with masks where there are any, under each configuration; taken in turn."""
    envs: list[VecEnv] = []
    try:
        for config in configs:
            envs.append(build_vec_env(config, config.num_envs, config.seed))  # noqa: PERF401 - to be closed if one fails
        players = [_Player(env) for env in envs]
        for _ in range(TURNS):
            for player in players:
                player.play(TURN_S)
        return tuple(statistics.median(player.steps_s) for player in players)
    finally:
        for env in envs:
            env.close()


class _Player:
    """Plays a vector env by random legal actions."""

    def __init__(self, env: VecEnv) -> None:
        self.env, self.source = env, slots_of(env)
        self.steps_s: list[float] = []
        self._rng = np.random.default_rng(0)
        self.env.action_space.seed(0)
        env.reset()
        self._masks = self.source.read_masks()

    def play(self, seconds: float) -> None:
        """For so long, and one step at least."""
        space, until = self.env.action_space, time.perf_counter() + seconds
        while True:
            masks = [None] * self.env.num_envs if self._masks is None else self._masks
            actions = np.stack([random_legal_action(space, mask, self._rng) for mask in masks])
            began = time.perf_counter()
            self.source.step_slots(actions)
            self._masks = self.source.read_masks()
            self.steps_s.append(time.perf_counter() - began)
            if time.perf_counter() > until:
                return
