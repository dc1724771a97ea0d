"""Groups of settings for evaluation, stopping, checkpoints and single commands. Others are in `spec/config.py`."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from typing import Any, Literal

from fasttrain.spec.setting import setting

MAX_SEED = 2**32 - 1 - 1_000_000  # numpy's largest seed minus 1,000,000, because env number i has seed + i


@dataclass(frozen=True, kw_only=True, slots=True)
class GateConfig:
    """When a candidate counts as no worse than its baseline (`compare`, `ablate`)."""

    margin: float | None = setting(
        None,
        "How much worse a candidate may be. null: 0.03 of a win rate, or 5 % of the baseline's mean reward.",
        least=0,
    )
    metric: str = setting(
        "auto",
        "Figure that is judged. auto: win_rate where there is one, else mean_reward; for DQN the tail of the "
        "training curve. Or tail, or one of env.result.scores.",
    )
    threshold: float | None = setting(
        None, "Reward or win rate for the time-to-threshold figure. null: 90 % of the rise of the baseline's curve."
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class TuneConfig:
    """The search of `fasttrain tune`."""

    objective: str = setting(
        "steps_per_s",
        "What tune maximizes: reward, win_rate, steps_per_s or reward_per_hour. time_to:0.5 minimizes the time "
        "until 100 episodes have this mean return or win rate.",
    )
    space: dict[str, tuple[Any, ...] | dict[str, int | float | bool] | None] | None = setting(
        None,
        "What is searched: {batch_size: [256, 512], algo.learning_rate: {low: 1e-4, high: 1e-2, log: true}}. null "
        "stands for the usual values. Without tune.space, all usual keys are searched that you did not type.",
    )
    trials: int | None = setting(
        None, "Ends the search after this number of trials. null searches until minutes=… is over.", least=1
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepConfig:
    """The limits of a sweep (`fasttrain -m`)."""

    max_parallel: int | Literal["auto"] = setting(
        "auto",
        "Trainings side by side on one machine, each on cores of its own: of a sweep by a launcher plugin of Hydra, of "
        "compare or of a population. auto: n_jobs of joblib, the cores divided by cpus_per_task of submitit, 1 of "
        "compare, the number of cores of a population.",
        least=1,
    )
    minutes: float | None = setting(None, "After this time no further cell of a sweep begins.", least=0)
    stop_on_error: bool = setting(False, "After a failed cell no further cell of a sweep begins.")


@dataclass(frozen=True, kw_only=True, slots=True)
class PopulationConfig:
    """Several models that are trained side by side (`population=8`)."""

    size: int = setting(
        1,
        "Number of models, trained side by side; also typed as population=8. They differ in their seed, or by "
        "population.settings.",
        least=1,
        most=1000,
    )
    settings: tuple[dict[str, Any], ...] = setting(
        (),
        "Settings in which the models differ: [{algo.learning_rate: 1e-3}, {algo.learning_rate: 1e-4}]. With more "
        "models than entries, the entries repeat with the next seed.",
    )
    exchange_every: int = setting(
        0,
        "Env steps between two exchanges of population-based training. In an exchange the worst quarter of the models "
        "continues with the weights of the best quarter. 0: never.",
        least=0,
    )
    explore: dict[str, tuple[Any, ...] | dict[str, int | float | bool]] = setting(
        {},
        "Settings that an exchange changes, with their limits or values: {algo.ent_coef: {low: 1e-4, high: 0.1}}.",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class DoctorConfig:
    """The settings of `fasttrain doctor`: what it measures."""

    test: Literal["all", "env", "policy", "update", "replay", "transport", "logging"] = setting(
        "all", "Which part is measured. Also --test."
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    """How quality is measured, in environments with seeds of their own."""

    episodes: int = setting(
        MISSING, "Episodes of an evaluation. 0 evaluates nothing. Without it, the game's own number.", least=0
    )
    seed: int = setting(
        1_000_003,
        "Seed of the evaluation's environments. Those of the training have seed, seed + 1, and so on.",
        least=0,
        most=MAX_SEED,
    )
    env_kwargs: dict[str, Any] = setting({}, "Arguments of the evaluation's environment that differ from env.kwargs.")
    num_envs: int | None = setting(
        None,
        "Environments of an evaluation. null uses up to 8, or 64 of a game that steps all in one call.",
        least=1,
        most=4096,
    )
    max_steps: int = setting(
        27_000, "Longest episode of an evaluation. A longer one is cut and counts with the reward so far.", least=1
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class SelfPlayConfig:
    """Which snapshots of the learner are its opponents under `opponent=self`."""

    pool: int = setting(
        8, "Number of older snapshots, used in half of the episodes. The other half has the latest snapshot.", least=0
    )
    every: int = setting(500, "Gradient updates between two snapshots.", least=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class CloneConfig:
    """Which decisions `fasttrain clone` imitates, and how long it learns."""

    of: str | None = setting(
        None,
        "Whom to imitate: a file of decisions (.npz), the folder of a run, the name of one of the game's bots, or a "
        "class of yours as module:Class with act(observations, action_masks, envs).",
    )
    episodes: int = setting(1000, "Episodes that are recorded, where clone.of is no file.", least=2)
    epochs: int = setting(30, "Maximum passes over the decisions; fewer if held-out decisions gain nothing.", least=1)
    held_out: float = setting(0.1, "Share of the episodes that only test what was learned.", least=0.001, most=0.9)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlayConfig:
    """How `fasttrain play` shows a game."""

    episodes: int = setting(1, "Number of episodes to show.", least=1)
    speed: float = setting(2.0, "Decisions per second. 0 waits for Enter at each decision.", least=0)
    seed: int | None = setting(None, "Seed of the game. null plays another game every time.", least=0, most=MAX_SEED)
    human: bool = setting(False, "You play against the agent.")
    deterministic: bool = setting(True, "true takes the best action. false draws one from the policy's distribution.")


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoConfig:
    """Videos of the greedy policy during training. After training, use `fasttrain play run=… output=game.mp4`."""

    every: int = setting(
        0,
        "Env steps between two videos during training, each of one episode and at most a minute. 0 makes none.",
        least=0,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class StopConfig:
    """The rules that end a training before `total_timesteps`."""

    at_reward: float | None = setting(
        None, "Ends the training when the mean return of the last 100 episodes reaches this value."
    )
    max_minutes: float | None = setting(
        None, "Ends the training after this number of minutes, without start-up.", least=0.001
    )
    at_steps: int | None = setting(
        None,
        "Ends the training at this env step. Schedules still count to total_timesteps, so a resumed run continues "
        "them.",
        least=1,
    )
    patience: float | None = setting(
        None,
        "Ends the training when the reward has not risen for this share of total_timesteps, for example 0.2. "
        "null never does.",
        least=0.01,
        most=1,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """Checkpoints, from which `fasttrain resume run=…` continues."""

    keep: int = setting(3, "Number of checkpoints that stay; older ones are deleted.", least=1)
    grace_s: float = setting(5.0, "Seconds to wait for the end of rollout and update after a signal to stop.", least=0)
    copy_to: str | None = setting(
        None,
        "Folder or address (s3://bucket/run, gs://…) to which the run is copied with each checkpoint. "
        "on_existing=resume continues a run from there on any machine.",
    )
