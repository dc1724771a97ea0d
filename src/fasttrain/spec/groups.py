"""Groups of settings for evaluation, stopping, checkpoints and clone. Others are in `spec/config.py`."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from typing import Any

from fasttrain.spec.setting import setting

MAX_SEED = 2**32 - 1 - 1_000_000  # numpy's largest seed minus 1,000,000, because env number i has seed + i


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
