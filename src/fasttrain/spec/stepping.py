"""Resolvers of the plan for stepping: vector env, number of envs and workers, schedule, infos, evaluations."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from fasttrain.errors import ConfigError
from fasttrain.spec.backends import backend_of, lends_games
from fasttrain.spec.checks import NOT_APPLICABLE, SHIPPED, Context, EnvFacts, Machine, Resolved
from fasttrain.spec.config import SELF, Config
from fasttrain.spec.policies import goals_of
from fasttrain.spec.reading import evaluation_envs, is_self_play, memory_inputs, uses_masks
from fasttrain.terminal import duration_text

# Overhead of stepping, measured with CartPole (benchmarks, vecenv-step): per env, in a loop or in a worker, and per
# vector step with workers. The second is the time to wake the workers and wait for them, on a machine that is not idle.
PER_ENV_S = 2e-6
PER_SHARED_STEP_S = 250e-6
# Workers must be faster than a plain loop by these factors, because processes can die. The first is for estimates, the
# second for measurements of both (runs/check.py).
SHARED_MUST_GAIN, TRIED_MUST_GAIN = 1.25, 1.1
# If an env's step takes longer, workers are chosen even if they seem slightly slower. Their overhead does not matter,
# and a busy machine may hide their gain in the measurement (938 against 914 ms for envs of 235 ms).
SLOW_S = 1e-3
WAITS_BELOW = 0.5  # an env that computes less than this share of a step waits for an engine or a socket
MOST_WORKERS_PER_CORE = 16
EVALUATIONS = 10  # number of evaluations in a self-play run without eval_every
ONE_GAME = "copies of the env in one process influence each other (checkup): each needs a process of its own"


def resolve_vec_env(requested: str, context: Context) -> Resolved:
    """`auto` chooses by measurement. Envs that fail or influence each other need workers."""
    value, reason = _choose_vec_env(requested, context)
    if value == "dummy" and context.env.shares == "process" and context.config.num_envs > 1:
        values = {"vec_env": requested, "workers": context.config.workers}
        if any(one != "auto" and context.typed(key) for key, one in values.items()):
            raise ConfigError(f"vec_env={value} with num_envs={context.config.num_envs}: {ONE_GAME}; use num_envs=1")
        value, reason = "shared", ONE_GAME
    if requested == "auto" and context.config.env.spec.native and memory_inputs(context.config):
        reason = f"algo.memory_inputs needs single envs, not the native batch; {reason}"
    if context.config.env.on_env_error == "raise" or value == "shared":
        return value, reason
    if requested == "auto" and value == "dummy" and context.config.workers != 0:
        return "shared", "env.on_env_error=restart: only envs in workers can be replaced"
    raise ConfigError(
        f"env.on_env_error=restart with vec_env={value}: only envs in workers can be replaced; use vec_env=shared, or "
        "env.on_env_error=raise"
    )


def _choose_vec_env(requested: str, context: Context) -> Resolved:
    config, env, machine = context.config, context.env, context.machine
    typed = context.typed("vec_env")
    if (backend := backend_of(config.env)) is not None:
        error = f"vec_env={requested} with env.backend={backend.name}, which steps all envs itself: remove it"
        return context.instead("vec_env", backend.vec_env, backend.why, error, ("auto", backend.vec_env))
    if requested in ("subproc", "shared") and config.workers == 0:
        if typed and context.typed("workers"):
            raise ConfigError(f"vec_env={requested} contradicts workers=0: remove one of them")
        return "dummy", "workers=0: all envs in this process"
    if requested in ("subproc", "shared") and machine.windows and not typed:
        return "dummy", "Windows: worker processes cost more than they save"
    if requested != "auto":
        return requested, ""
    if env.native:
        return "native", "the game has a native batch"
    if config.workers == 0:
        return "dummy", "workers=0: all envs in this process"
    if env.step_s is None or machine.windows:
        return "dummy", "Windows" if machine.windows else "nothing was measured"
    return _by_cost(env.step_s, context)


def _by_cost(step_s: float, context: Context) -> Resolved:
    num_envs, env = context.config.num_envs, context.env
    if env.vector and is_faster(env.vector):
        other, own = map(duration_text, env.vector)
        return "vector", f"tried: a step of {num_envs} envs takes {own} with the env's own vector form, else {other}"
    if env.vector_form and (why := needs_single_envs(context.config)):
        value, reason = _by_cost(step_s, context._replace(env=env._replace(vector_form=False)))
        return value, f"{reason}; {why}"
    loop_s, shared_s, workers = step_costs(num_envs, env, context.machine)
    measured = f"env.step takes {duration_text(step_s)}: {num_envs} envs one after another {duration_text(loop_s)}"
    if env.tried:
        loop_s, shared_s = env.tried
        loop, shared = duration_text(loop_s), duration_text(shared_s)
        must_gain = TRIED_MUST_GAIN if step_s < SLOW_S else 1 / TRIED_MUST_GAIN
        reason = f"tried: a step of {num_envs} envs takes {loop} in one process, {shared} in workers"
        return "shared" if loop_s > must_gain * shared_s else "dummy", reason
    if workers > 1 and loop_s > SHARED_MUST_GAIN * shared_s:
        return "shared", f"{measured}, in {workers} workers about {duration_text(shared_s)}"
    if workers < 2:
        return "dummy", f"{measured}; there is only one {'env' if num_envs == 1 else 'core'}"
    return "dummy", f"{measured}, {workers} workers would not be faster"


def needs_single_envs(config: Config) -> str:
    """Why `auto` must not choose the env's own vector form; empty if the choice is allowed."""
    if config.env.wrappers or config.env.stagger or goals_of(config):
        return "env.wrappers, env.stagger and goals of policies need single envs, not the env's own vector form"
    if config.curriculum.tasks:
        return "tasks of a curriculum are chosen for single envs, not in the env's own vector form"
    if config.cluster.engine != "off":
        return "actors (cluster.engine=ray) step single envs, not the env's own vector form"
    return "callbacks may use single envs, which the env's own vector form does not have" if config.callbacks else ""


def is_faster(vector: tuple[float, float] | None) -> bool:
    """Whether the env's VectorEnv was measured to be clearly faster than single envs. `vector`: `EnvFacts.vector`."""
    return vector is not None and vector[0] > TRIED_MUST_GAIN * vector[1]


def step_costs(num_envs: int, env: EnvFacts, machine: Machine) -> tuple[float, float, int]:
    """Estimated seconds of a step of all envs in one process and in workers, and the number of workers."""
    env_s = (env.step_s or 0.0) + PER_ENV_S
    workers = _auto_workers(num_envs, env, machine)
    longest = math.ceil(num_envs / workers) * env_s
    in_workers = max(longest, num_envs * env_s * env.cpu_share / machine.cores)  # at least the CPU time ÷ cores
    return num_envs * env_s, PER_SHARED_STEP_S + in_workers, workers


def _auto_workers(num_envs: int, env: EnvFacts, machine: Machine) -> int:
    if env.cpu_share >= WAITS_BELOW:
        return min(num_envs, machine.cores)
    return min(num_envs, math.ceil(machine.cores / max(env.cpu_share, 1 / MOST_WORKERS_PER_CORE)))


def resolve_lean_info(requested: bool, context: Context) -> Resolved:
    """Keep infos if all envs step in one process, or if the user's callbacks may read the infos."""
    vec_env = context.effective["vec_env"]
    typed = context.typed("lean_info")
    if vec_env == "dummy" and not typed:
        return False, "in one process infos cost nothing, but dropping them costs time"
    if vec_env != "native" and not typed and context.config.callbacks and not context.config.env.info_keys:
        return False, "callbacks may read any info; env.info_keys=[…] names those that yours read"
    return requested, "a native game sends info only when an episode ends" if vec_env == "native" else ""


def resolve_num_envs(requested: int, context: Context) -> Resolved:
    """The game's own number for a native on-policy run, unless the user has chosen one."""
    if context.env.shares == "machine" and requested > 1:
        why = "copies of the env on one machine influence each other (checkup)"
        return context.instead("num_envs", 1, why, f"num_envs={requested}: {why}; use num_envs=1")
    own = context.config.own.num_envs if context.config.algo.spec.on_policy else None
    chosen = context.sources.get("num_envs", "default") not in SHIPPED
    if context.effective["vec_env"] == "native" and own is not None and not chosen:
        return own, "the game's own number in this tier" if own != requested else ""
    return requested, ""


def resolve_workers(requested: int | str, context: Context) -> Resolved:
    """`auto` is one worker per core, or more workers for envs that wait."""
    vec_env, num_envs = context.effective["vec_env"], context.effective["num_envs"]
    if vec_env == "shared":
        return _shared_workers(requested, num_envs, context)
    if vec_env == "daemons" and (backend := backend_of(context.config.env)) is not None:
        return backend.workers(context.config, requested, num_envs, context.machine.cores)
    if vec_env != "subproc":
        error = f"workers={requested} has no effect with vec_env={vec_env}: it steps all envs in one process; remove it"
        why = f"vec_env={vec_env} steps in one process"
        return context.instead("workers", NOT_APPLICABLE, why, error, (0, "auto"))
    if isinstance(requested, int) and requested != num_envs:
        raise ConfigError(
            f"workers={requested} with num_envs={num_envs}: SubprocVecEnv runs one worker per env; use workers=auto, "
            "or vec_env=shared"
        )
    return num_envs, "SubprocVecEnv: one worker per env"


def _shared_workers(requested: int | str, num_envs: int, context: Context) -> Resolved:
    if context.env.shares == "process":
        error = f"workers={requested} with num_envs={num_envs}: {ONE_GAME}; use workers=auto"
        return context.instead("workers", num_envs, ONE_GAME, error, ("auto", num_envs))
    if isinstance(requested, int):
        return min(requested, num_envs), ""
    workers, cores = _auto_workers(num_envs, context.env, context.machine), context.machine.cores
    if workers > cores:
        return workers, f"env.step computes for {100 * context.env.cpu_share:.0f} % of its time and waits for the rest"
    return workers, f"one worker per core, {num_envs / workers:.3g} envs each"


def resolve_schedule(requested: str, context: Context) -> Resolved:
    """`auto` is first_ready for games with engines, else lockstep, because results of first_ready depend on timing."""
    if why := _why_no_groups(context, requested) or (requested == "continuous" and _why_not_continuous(context.config)):
        return context.instead("schedule", "lockstep", why, f"schedule={requested}: {why}; use schedule=lockstep")
    if requested == "continuous":
        return requested, "envs do not wait for updates; older transitions count by importance weights"
    if requested == "first_ready":
        return requested, "within a rollout no worker waits for another"
    if context.effective["vec_env"] == "daemons":
        return "first_ready", "each game goes at the pace of its engine"
    return "lockstep", "the same seed gives the same run; schedule=first_ready does not wait for slow workers"


def resolve_max_lag(requested: int, context: Context) -> Resolved:
    if context.effective["schedule"] == "continuous":
        return requested, "older transitions are dropped"
    error = f"max_lag={requested} is for schedule=continuous: set that too, or remove max_lag"
    return context.instead("max_lag", NOT_APPLICABLE, "all transitions are of the present policy", error)


def _why_not_continuous(config: Config) -> str:
    if not hasattr(config.algo, "reuse"):
        return f"{config.algo.name} has no importance weights for transitions of an older policy"
    if config.policies:
        return "policies learn from the newest rollout alone"
    noise = getattr(config.algo, "use_sde", False)  # MaskablePPO has no such setting
    return "with algo.use_sde=true a rollout has one noise for all its steps" if noise else ""


def _why_no_groups(context: Context, requested: str) -> str:
    effective, env = context.effective, context.config.env
    if context.config.cluster.engine != "off" and requested == "continuous":
        return ""  # actors step independently
    if effective["vec_env"] not in ("shared", "daemons"):
        return f"vec_env={effective['vec_env']} has no workers that step independently (vec_env=shared has)"
    if is_self_play(context.config):
        return "opponent=self lets the opponents act in all envs together"
    if effective["vec_env"] == "shared" and effective["workers"] < 2 and requested != "continuous":
        return "there is only one worker"
    if env.frame_stack > 1 or env.normalize:
        option = "env.frame_stack" if env.frame_stack > 1 else "env.normalize"
        return f"{option} needs all envs to step at once"
    return ""


def check_self_play(config: Config, effective: Mapping[str, Any], sources: Mapping[str, str]) -> None:
    """Raises ConfigError if self-play does not support a setting, or a setting of self-play has no effect."""
    typed = [key for key, source in sources.items() if source == "command line"]
    kwarg = f"env.kwargs.{config.env.spec.opponent_key}"
    if "opponent" in typed and kwarg in typed:
        raise ConfigError(f"opponent={config.opponent} and {kwarg} set the same thing: remove one of them")
    if not is_self_play(config) or config.opponent not in (None, SELF):
        for key in sorted(key for key in typed if key.startswith("self_play.")):
            raise ConfigError(f"{key} has no effect without opponent=self: add it, or remove {key}")
        return
    if effective["engine"] == "stock":
        raise ConfigError("opponent=self with engine=stock: the stock classes have no opponents; use engine=fast")
    if effective["vec_env"] == "subproc":
        raise ConfigError("opponent=self with vec_env=subproc: use vec_env=auto, native, shared or dummy")
    env, plain = config.env, "the opponents see the env's own observations"
    refused = {
        "env.frame_stack": (env.frame_stack > 1, plain),
        "env.normalize": (bool(env.normalize), plain),
        "algo.memory_inputs": (bool(memory_inputs(config)), plain),
        "action_repeat": (config.action_repeat > 1, "a step is one decision"),
        "env.info_keys": (bool(env.info_keys), "only the infos of episode ends are available"),
        "cluster=ray": (config.cluster.engine != "off", "opponents act in the process that has the envs"),
        "env.stagger": (env.stagger > 0, "an end in the middle of a game has no winner"),
        "env.max_episode_steps": (env.max_episode_steps is not None, "a limit would count both sides' decisions"),
        "env.on_env_error=restart": (env.on_env_error == "restart", "an opponent's decision cannot be repeated"),
    }
    for key, (is_set, why) in refused.items():
        if is_set:
            raise ConfigError(f"opponent=self with {key}: {why}; remove {key}")


def check_masks(config: Any, engine: str, sources: Mapping[str, str]) -> None:
    """Raises ConfigError if a setting about action masks is typed, but the algorithm reads no masks."""
    reads = uses_masks(dataclasses.replace(config, engine=engine))
    for key in ("env.masks", "env.on_empty_mask"):
        if sources.get(key) == "command line" and not reads:
            raise ConfigError(
                f"{key} has no effect with algo={config.algo.name} with engine={engine}, which reads no action masks; "
                f"use algo=maskable_ppo, or remove {key}"
            )


def resolve_eval_every(requested: int, context: Context) -> Resolved:
    """In self-play the reward does not show progress, so there are evaluations by default."""
    if not context.config.eval.episodes:
        error = f"eval_every={requested} contradicts eval.episodes=0: remove one of them"
        return context.instead("eval_every", 0, "eval.episodes=0: no evaluation", error, (0,))
    every, why = requested, ""
    if not requested and is_self_play(context.config) and "eval_every" not in context.sources:
        every = max(1, context.config.total_timesteps // EVALUATIONS)
        why = f"opponent=self: progress is measured against {context.config.env.spec.eval_opponent}"
    engines, backend = "", backend_of(context.config.env)
    if every and backend is not None and backend.lends:
        effective = {name: context.effective[name] for name in ("vec_env", "num_envs")}
        config = dataclasses.replace(context.config, **effective)
        engines = backend.evaluations(config, evaluation_envs(config), context.machine.cores)
    return every, "; ".join(filter(None, (why, engines)))


def resolve_eval_async(requested: bool, context: Context) -> Resolved:
    """Evaluate in a process of its own, if there are evaluations and a second core, and if a second env is possible."""
    why = ""
    if context.machine.cores < 2 and not context.typed("eval_async"):
        why = "there is only one core"
    if context.config.num_envs == 1 and not context.typed("eval_async"):
        why = "num_envs=1: evaluations use the training's env, because a second one might not be possible"
    if lends_games(context.config):
        why = "evaluations play with the training's engines"
    if not context.effective["eval_every"]:
        why = "no evaluations during training without eval_every=…"
    return (False, why) if why else (requested, "")


STOCK_ENVS = 8  # `rollout_size` in the tier `baseline` is for this number of envs: PPO's 16,384 are 8 × 2,048 steps


def usual_rollout(config: Config, algo: Any, effective: Mapping[str, Any], batch_size: int) -> tuple[Any, int]:
    """`algo` with the rollout size for users who set none, and the size before it was reduced (0: not reduced).

    In the tier `baseline` a rollout has stock's `n_steps` per env. In other tiers it is not longer than the training.
    """
    num_envs, size = effective["num_envs"], algo.rollout_size
    if config.tier == "baseline":
        stock = size == algo.spec.tiers["baseline"]["rollout_size"]  # False: a game or a user has set the size
        return (dataclasses.replace(algo, rollout_size=size * num_envs // STOCK_ENVS) if stock else algo), 0
    most = max(config.total_timesteps, batch_size, 2)
    most += -most % num_envs  # whole steps of all envs, not fewer than a minibatch has rows
    if size <= most or effective["engine"] != "fast" or algo.spec.recurrent:
        return algo, 0
    return dataclasses.replace(algo, rollout_size=most), size
