"""Evaluates a policy on separate envs and seeds, without changing the training's random state. This file also
reads plan and model of finished runs, for commands that take `run=…`.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces
from rich.console import Console
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.vec_env import VecEnv

from fasttrain.algos.causes import check_step
from fasttrain.algos.predicting import predict_of
from fasttrain.batch import BoolArray, Int64Array, Observations, each_array
from fasttrain.envs.user_code import process_settings
from fasttrain.errors import ConfigError
from fasttrain.intervals import student, wilson
from fasttrain.runs.engine import set_threads
from fasttrain.runs.envs import Statistics, build_vec_env
from fasttrain.runs.models import find_statistics, load_policy
from fasttrain.runs.view import activity, make_console, say, show_quality
from fasttrain.saving.env_state import own_random_state
from fasttrain.saving.files import parse_json, write_json
from fasttrain.spec import plugins
from fasttrain.spec.checks import BATCHED, FLAGS
from fasttrain.spec.config import Config
from fasttrain.spec.infos import END_KEY, SCORES, InfoReader, candidate_entries, record_of, score_diff_of, truth, win_of
from fasttrain.spec.plain import from_dict
from fasttrain.spec.reading import (
    evaluation_config,
    evaluation_envs,
    from_mapping,
    has_monitor_wrapper,
    with_eval_settings,
)
from fasttrain.spec.removed import flat, removal_message
from fasttrain.terminal import near, one_line
from fasttrain.vec.base import close_envs, resets_and_rests
from fasttrain.vec.stock import resting

LONGEST_REASON, MOST_REASONS = 200, 100  # summary.json: most characters of an end reason, most reasons
MAX_EPISODE_STEPS = 27_000  # Atari's usual limit; without a limit a greedy policy may never end its episode
NOT_ENDED = "not ended"
Quality = dict[str, dict[str, Any]]  # "greedy" or "sampled" → what `summarise` returns


def evaluate(
    model: BaseAlgorithm,
    env: VecEnv,
    episodes: int,
    deterministic: bool,
    seed: int,
    keep_on: Callable[[int], bool] = lambda _: True,
    reader: InfoReader | None = None,
    monitored: bool = False,
    max_steps: int = MAX_EPISODE_STEPS,
    rests: bool = False,
) -> dict[str, Any]:
    """Play `episodes` episodes and return what `summarise` computes from them.

    Each env plays the same number of episodes (or one less), because the first episodes to end are the short ones.

    Args:
        keep_on: is called after every step with the number of episodes so far; False ends the evaluation.
        monitored: the envs have a Monitor, whose records are the episodes: in Atari whole games with all lives.
        max_steps: a longer episode is cut off, and is included with end reason `NOT_ENDED`.
        rests: an env of a DummyVecEnv that has played its episodes makes no further step.
    """
    predict = predict_of(model)
    masked = "action_masks" in inspect.signature(model.predict).parameters and env.has_attr("action_masks")
    quota = np.array([(episodes + i) // env.num_envs for i in range(env.num_envs)])
    returns, lengths = np.zeros(env.num_envs), np.zeros(env.num_envs, np.int64)
    finished: list[tuple[float, int, dict[str, Any]]] = []
    checksums = EpisodeChecksums(env)
    with own_random_state(seed), resting(env, rests) as rest:
        env.seed(seed)
        observations: Any = env.reset()
        states: Any = None
        starts = np.ones(env.num_envs, dtype=bool)
        while quota.any() and keep_on(len(finished)):
            extra = {"action_masks": np.stack(env.env_method("action_masks"))} if masked else {}
            before = states
            try:
                actions, states = predict(
                    observations, state=states, episode_start=starts, deterministic=deterministic, **extra
                )
            except (RuntimeError, ValueError):  # torch raises one of them for NaN; `check_step` names the env
                check_step(observations, np.zeros(1, np.float32), (), sum(lengths))
                raise
            acted_on = observations
            observations, rewards, dones, infos = env.step(actions)
            late = resets_and_rests(env)[0]  # envs that made no step: the action was refused, or the env only reset
            starts = dones if late is None else dones | (late & starts)
            if late is not None and before is not None:
                states = each_array(partial(np.where, late[:, None]), before, states)  # (L, N, H)
            checksums.add(acted_on, lengths, quota == 0 if late is None else late | (quota == 0))
            returns += rewards
            lengths += 1 if late is None else ~late
            for index in np.flatnonzero(dones):
                record = record_of(infos[index])
                if monitored and record is None:
                    continue
                lost = record is None and "lost" in infos[index]  # the engine failed: the game has no result
                if quota[index] and not lost:
                    quota[index] -= 1
                    totals = (record["r"], record["l"]) if monitored and record else (returns[index], lengths[index])
                    finished.append((*totals, infos[index]))
                    checksums.end(index, lengths[index], returns[index])
                    if not quota[index]:
                        rest(int(index))
                returns[index] = lengths[index] = checksums.running[index] = 0
            for index in np.flatnonzero((lengths >= max_steps) & (quota > 0)):
                quota[index] = 0
                finished.append((returns[index], lengths[index], {**infos[index], "end_reason": NOT_ENDED}))
                checksums.end(index, lengths[index], returns[index])
    return checksums.with_distinct(summarise(finished, reader))


class EpisodeChecksums:
    """Finds equal episodes of an evaluation by a checksum of their observations."""

    def __init__(self, env: VecEnv) -> None:
        self.running = np.zeros(env.num_envs, np.int64)  # (N,) the running episodes' checksums so far
        self.ended = set[tuple[Any, ...]]()
        # With continuous actions rounding errors change later observations, so only the first one is compared.
        self._all = not isinstance(env.action_space, spaces.Box)

    def add(self, observations: Observations, lengths: Int64Array, idle: BoolArray) -> None:
        """Add the observations that the policy acted on. An `idle` env made no step, or has played its episodes."""
        parts = observations.values() if isinstance(observations, dict) else (observations,)
        for index in np.flatnonzero((self._all | (lengths == 0)) & ~idle):
            for part in parts:
                self.running[index] = zlib.crc32(part[index].tobytes(), int(self.running[index]))

    def end(self, index: np.integer[Any], length: np.integer[Any], episode_return: float) -> None:
        self.ended.add((int(self.running[index]), int(length), f"{episode_return:.5g}"))

    def with_distinct(self, quality: dict[str, Any]) -> dict[str, Any]:
        """`quality`, with `distinct_episodes` if some episodes were equal, as in greedy play of deterministic games."""
        distinct = len(self.ended)
        if distinct == 1 < quality["episodes"]:  # all episodes were the same, so an interval has no meaning
            quality["ci95"] = dict.fromkeys(quality["ci95"])
        return {**quality, "distinct_episodes": distinct} if distinct < quality["episodes"] else quality


def summarise(
    finished: Sequence[tuple[float, int, dict[str, Any]]], reader: InfoReader | None = None
) -> dict[str, Any]:
    """Means and 95 % intervals (`ci95`) over episodes given as (return, length, last info). None: not reported.

    `win_rate` lies in 0..1 and has Wilson's interval, the rest Student's. Entries that `env.result.scores` names
    have a mean under their own name, and their names are in `scores`. If infos reported nothing besides reward, or a
    key was missing, `untold` lists the entries of the last info and the missing keys.
    """
    if not finished:
        none = dict.fromkeys(("mean_reward", "win_rate", "score_diff"))
        more: dict[str, Any] = {"draw_rate": None, "end_reason": {}, "mean_length": 0.0, "mean_turns": None}
        return {"episodes": 0, **none, **more, "ci95": dict(none)}
    reader = reader or InfoReader()
    rewards, lengths = [reward for reward, _, _ in finished], [length for _, length, _ in finished]
    last, infos = finished[-1][2], [reader.read(info) for *_, info in finished]
    missing = reader.missing(infos)
    wins = [won for info in infos if (won := win_of(info)) is not None]
    scores = [ahead for info in infos if (ahead := score_diff_of(info)) is not None]
    own = {key: [info[SCORES][key] for info in infos if key in info.get(SCORES, {})] for key in reader.scores}
    named = {key: values for key, values in own.items() if values}
    silent = not (wins or scores or named or any(END_KEY in info for info in infos))
    ends = ["truncated" if truth(info.get("TimeLimit.truncated")) else "terminated" for info in infos]
    reasons = Counter(one_line(info.get(END_KEY, end), LONGEST_REASON) for info, end in zip(infos, ends, strict=True))
    return {
        "episodes": len(finished),
        **{key: _mean(values) for key, values in named.items()},
        "mean_reward": _mean(rewards),
        "win_rate": _mean(wins),
        "draw_rate": _mean([info["is_draw"] for info in infos if "is_draw" in info]),
        "score_diff": _mean(scores),
        "end_reason": {name: count / len(finished) for name, count in reasons.most_common(MOST_REASONS)},
        "mean_length": _mean(lengths),
        "mean_turns": _mean([float(info["turn"]) for info in infos if "turn" in info]),
        **({"scores": list(named)} if named else {}),
        **(
            {"untold": {"missing": missing, "held": candidate_entries(last)}}
            if missing or (silent and candidate_entries(last))
            else {}
        ),
        "ci95": {
            **{key: mean_interval(values) for key, values in (named | {"mean_reward": rewards}).items()},
            "win_rate": [float(end) for end in wilson(sum(wins), len(wins))] if wins else None,
            "score_diff": mean_interval(scores) if scores else None,
        },
    }


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(np.array(values, dtype=np.float64))) if values else None


def mean_interval(numbers: Sequence[float]) -> list[float] | None:
    """Student's 95 % interval of the mean; None for a single value and for equal values."""
    values = np.array(numbers, dtype=np.float64)
    mean, half = map(float, student(values))
    return [mean - half, mean + half] if len(values) > 1 and np.ptp(values) else None


def evaluate_both(
    model: BaseAlgorithm,
    config: Config,
    console: Console,
    stop: Callable[[], bool] = lambda: False,
    statistics: Statistics | None = None,
    sampled: bool = True,
    env: VecEnv | None = None,
    reader: InfoReader | None = None,
) -> Quality:
    """Evaluate greedy play, and sampled play if the policy is stochastic and `sampled` is true, until `stop()` is true.

    Args:
        statistics: of `env.normalize`; None: those of the model's env.
        env: where to play; None: new envs, closed afterwards.
        reader: the training's reader of infos, which has reported wrong names to the user already.
    """
    set_threads(config.torch_threads)  # as in training: with two busy cores two threads are five times slower than one
    config = evaluation_config(config)
    own = config if config.vec_env in BATCHED else dataclasses.replace(config, vec_env="dummy")
    statistics = model.get_vec_normalize_env() if statistics is None else statistics
    ways = ["greedy", "sampled"] if sampled and not config.algo.spec.greedy else ["greedy"]
    quality = {way: summarise([]) for way in ways}
    reader = reader or InfoReader.of(config.env, lambda line: say(console, f"  {line}"))
    if not config.eval.episodes:
        return quality
    with activity(console, "evaluating") as doing, ExitStack() as opened:
        if new := env is None:
            # Warnings that the training gave are not repeated. The second process of `eval_async` gives none.
            old = {*process_settings()} if console.quiet else getattr(model.env and model.env.unwrapped, "warned", None)
            env = build_vec_env(own, evaluation_envs(config), config.eval.seed, statistics, doing.now, reported=old)
            opened.callback(close_envs, env)
        for way in ways:
            steps = itertools.count(1)

            def keep_on(played: int, way: str = way, steps: Iterator[int] = steps) -> bool:
                doing.count(played, config.eval.episodes, f"{way} episodes", f", {next(steps):,} steps")
                return not stop()

            quality[way] = evaluate(
                model, env, config.eval.episodes, way == "greedy", config.eval.seed, keep_on, reader,
                has_monitor_wrapper(config), config.eval.max_steps, rests=new,
            )  # fmt: skip
    for way, found in quality.items():
        if cut := round(found["end_reason"].get(NOT_ENDED, 0.0) * found["episodes"]):
            say(console, f"{cut} of {found['episodes']} {way} episodes did not end within "
                f"eval.max_steps={config.eval.max_steps:,}; they count with their rewards so far")  # fmt: skip
    return quality


def check_evaluation(model: BaseAlgorithm, config: Config, statistics: Statistics | None = None) -> None:
    """Raises ConfigError or EnvSpecError if the env of `eval.env_kwargs` cannot be built or has other spaces."""
    if not config.eval.env_kwargs:
        return
    own, batched = evaluation_config(config), config.vec_env in BATCHED
    own = own if batched else dataclasses.replace(own, vec_env="dummy")
    with own_random_state(config.eval.seed):
        statistics = model.get_vec_normalize_env() if statistics is None else statistics
        env = build_vec_env(own, config.num_envs if batched else 1, config.eval.seed, statistics)
    env.close()
    for mine, its in ((model.observation_space, env.observation_space), (model.action_space, env.action_space)):
        if _form(mine) != _form(its):
            raise ConfigError(f"eval.env_kwargs={config.eval.env_kwargs}: its env has {its}, the policy is for {mine}")


def _form(space: spaces.Space[Any]) -> object:
    """The part of a space that a policy depends on, for comparison. The order of an image's dimensions may differ."""
    if isinstance(space, spaces.Dict):
        return {name: _form(part) for name, part in space.items()}
    return sorted(space.shape) if isinstance(space, spaces.Box) else str(space)


# Keys that `eval` accepts besides run=… and --trust. Typed values replace those of the run.
MAY_DIFFER = ("model", "opponent", "eval.", "env.kwargs.")


def main(config: Config, sources: Mapping[str, str], folder: Path, overrides: Sequence[str]) -> int:
    """`fasttrain eval run=FOLDER`: evaluate a finished run's model on the env it was trained on."""
    where, console = named_run("eval", config, sources, *MAY_DIFFER), make_console()
    with activity(console, "loading the model"):
        file = "best_model.zip" if config.model == "best" else "model.zip"
        trained, model, statistics = load_run(where, file, config.trust)
    trained = with_eval_settings(trained, config, [key for key, source in sources.items() if source == "command line"])
    if not trained.eval.episodes:
        raise ConfigError("eval.episodes=0: no episode would be played; use eval.episodes=100 for example")
    check_evaluation(model, trained, statistics)
    quality = evaluate_both(model, trained, console, statistics=statistics)
    show_quality(console, quality)
    write_json(folder / "eval.json", {"run": config.run, "quality": quality})
    say(console, f"written to {near(folder / 'eval.json')}")
    return 0


# --- finished runs

MOST_PLAN_BYTES = 16 << 20  # a plan usually has 10 kB


class Finished(NamedTuple):
    """A finished run: its effective configuration, one of its models, and the file of `env.normalize`'s statistics."""

    config: Config
    model: BaseAlgorithm
    statistics: Path | None


def named_run(command: str, config: Config, sources: Mapping[str, str], *keys: str) -> Path:
    """The folder of `run=…`. Raises ConfigError if the command line sets other keys than run, trust and `keys`."""
    typed = [key for key, source in sources.items() if source == "command line"]
    groups = tuple(key for key in keys if key.endswith("."))
    ignored = sorted(key for key in typed if key not in ("run", "trust", *keys) and not key.startswith(groups))
    ignored = [key for key in ignored if key != "env" or ignored == ["env"]]  # `env.id=…` implies `env=gym`
    if ignored:
        takes = ", ".join(f"{key}…" if key.endswith(".") else f"{key}=…" for key in ("run", *keys))
        raise ConfigError(f"{command} takes {takes} and --trust only: {', '.join(ignored)} would do nothing")
    return Path(str(config.run)).absolute()  # an env may change the working directory


def load_run(folder: Path, model: str = "model.zip", trust: bool = False) -> Finished:
    """Load a finished run of fasttrain or rl_zoo3, with one of its models. Raises ConfigError if the run or model is
    missing. `trust`: SB3 loads the model and executes pickles in the zip.
    """
    of_zoo: Any = None
    if not (folder / "plan.json").exists() and "zoo" in plugins.names(plugins.INTEGRATIONS):
        of_zoo = plugins.load(plugins.INTEGRATIONS, "zoo").zoo_run(folder, model)
    for name in () if of_zoo else ("plan.json", "model.zip", model):
        if not (folder / name).is_file():
            best = name == "best_model.zip"
            way_out = "the run was made without eval_every=…" if best else "name the folder of a finished run"
            raise ConfigError(f"run={folder}: no {name} there; {way_out}")
    config, file, pickled = of_zoo or (config_of(folder), folder / model, None)
    statistics = find_statistics(config, file, trust, pickled)
    with own_random_state(config.seed):  # making a network draws random numbers
        return Finished(config, load_policy(config, file, trust), statistics)


def _plan_of(folder: Path) -> dict[str, Any]:
    path = folder / "plan.json"
    if path.stat().st_size > MOST_PLAN_BYTES:
        raise ConfigError(f"{path} is too large for a plan ({path.stat().st_size:,} bytes)")
    plan = parse_json(path.read_bytes(), str(path))
    return plan if isinstance(plan, dict) else {}


def flags_of(folder: Path) -> list[dict[str, Any]]:
    """The rows of plan.json. Raises ConfigError if the file has no rows."""
    rows = _plan_of(folder).get("flags")
    if not isinstance(rows, list) or not all(
        isinstance(row, dict) and {"flag", "requested", "source"} <= row.keys() for row in rows
    ):
        raise ConfigError(f"run={folder}: its plan.json has no list of flags")
    return rows


def config_of(folder: Path) -> Config:
    """The configuration in plan.json. A setting that is newer than the run gets the value of a plain SB3 script."""
    stored = from_dict(_plan_of(folder).get("config"))
    if not isinstance(stored, dict):
        raise ConfigError(f"{folder / 'plan.json'} holds no configuration; name the folder of a run")
    if removed := next(filter(removal_message, flat(stored)), ""):
        raise ConfigError(
            f"run={folder} is of an older version and cannot be read: it stores {removed}, which is no setting any "
            f"more; init_from={folder} begins a new run with its weights"
        )
    try:
        return from_mapping({**{it.name: it.stock for it in FLAGS}, **plugins.without_unused(stored), "trust": False})
    except ConfigError as error:
        raise ConfigError(f"run={folder}: its plan.json does not fit this version of fasttrain ({error})") from error
