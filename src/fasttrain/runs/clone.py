"""`fasttrain clone`: behaviour cloning. A policy learns to imitate recorded decisions.

The policy maximises the likelihood of the recorded actions among the legal ones. Its value network learns the recorded
returns. `fasttrain train init_from=FOLDER` then continues with reinforcement learning.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from sb3_contrib.common.maskable.policies import MaskableActorCriticPolicy
from stable_baselines3.common.vec_env import VecEnv
from torch import Tensor
from torch.nn import functional

from fasttrain.batch import BoolArray
from fasttrain.envs.names import callable_at
from fasttrain.errors import ConfigError, naming
from fasttrain.runs.demonstrations import Demonstrations, Player, check_actions, read_demonstrations, record
from fasttrain.runs.envs import with_statistics
from fasttrain.runs.evaluate import evaluate_both, load_run
from fasttrain.runs.parts import Parts
from fasttrain.runs.spaces import check_same_spaces
from fasttrain.runs.train import open_run
from fasttrain.runs.view import activity, say, show_quality
from fasttrain.saving.env_state import own_random_state
from fasttrain.saving.files import SUMMARY_SCHEMA, write_json
from fasttrain.spec.config import Config
from fasttrain.vec.base import close_envs

PATIENCE = 3  # learning ends after this number of epochs without a better likelihood of held-out decisions
FILE = "demonstrations.npz"
SEED = 20_000_003  # seed of the environments in which decisions are recorded


def main(config: Config, sources: Mapping[str, str], folder: Path, overrides: Sequence[str]) -> int:
    """Read or record decisions (`clone.of`), learn from them, evaluate. Writes a run's folder with model.zip."""
    if config.clone.of is None:
        raise ConfigError("clone needs clone.of: a file of decisions (.npz), a run's folder, a bot, or module:Class")
    if not config.algo.spec.on_policy or config.algo.spec.recurrent:
        raise ConfigError(f"clone with algo={config.algo.name}: it learns policies of ppo, maskable_ppo, a2c and trpo")
    if config.env.normalize:
        raise ConfigError("clone with env.normalize: it needs statistics of a training, and there are none; remove it")
    if config.policies:
        raise ConfigError("clone learns one policy: remove policies; later use policies.NAME.init_from=FOLDER")
    if config.curriculum.tasks:
        raise ConfigError("curriculum.tasks has no effect in clone, which records whole games; remove it")
    with open_run(config, sources, folder, overrides) as run:
        try:
            shown = demonstrations_of(run)
            learned = learn(run, shown)
            run.save(folder / "model.zip")
            with activity(run.console, "evaluating"):
                quality = evaluate_both(run.model, run.config, run.console)
            show_quality(run.console, quality)
            write_json(
                folder / "summary.json",
                {"schema": SUMMARY_SCHEMA, "status": "done", "env_steps": 0, "clone": learned._asdict(),
                 "quality": quality["greedy"], "overrides": list(overrides), "model": "model.zip"},
            )  # fmt: skip
            run.status.now("done")
            say(run.console, f"to continue: fasttrain init_from={folder}")
        finally:
            run.evaluator.close()
            close_envs(run.env)
    return 0


# --- the recorded decisions


def demonstrations_of(run: Parts) -> Demonstrations:
    """Read the file that `clone.of` names, or record the player that it names and store the decisions."""
    config, model, of = run.config, run.model, str(run.config.clone.of)
    if of.endswith(".npz"):
        shown = read_demonstrations(Path(of), model.observation_space, model.action_space)
    else:
        with own_random_state(SEED), activity(run.console, f"recording {of}") as doing:
            run.env.seed(SEED)
            tell = lambda done, steps: doing.count(done, config.clone.episodes, "episodes", f", {steps:,} steps")  # noqa: E731
            shown = record(run.env, _player(of, run.env), config.clone.episodes, tell)
        check_actions(f"clone.of={of}", shown.actions, shown.action_masks, model.action_space)
        shown.save(run.folder / FILE)
    if config.algo.spec.masks == "must" and shown.action_masks is None:
        raise ConfigError(f"clone.of={of}: it has no action_masks, and algo={config.algo.name} needs them")
    episodes = int(shown.episode_starts.sum())
    if episodes < 2:
        raise ConfigError(f"clone.of={of}: {episodes} episode; at least 2 are needed, because some are held out")
    say(run.console, f"{len(shown.actions):,} decisions in {episodes:,} episodes of {of}")
    return shown


def _player(of: str, env: VecEnv) -> Player:
    if Path(of).is_dir():
        return _Policy(of, env)
    if ":" in of:
        player = callable_at(of, f"clone.of={of}")()
        if not hasattr(player, "act"):
            raise ConfigError(f"clone.of={of}: it has no method act(observations, action_masks, envs)")
        return player  # type: ignore[no-any-return]
    if not hasattr(getattr(env.unwrapped, "game", None), "bot_actions"):
        raise ConfigError(f"clone.of={of}: no such folder, and this environment has no bots; name module:Class")
    return _Bot(of, env)


class _Policy:
    """Plays the policy of a finished run without exploration, with the run's statistics of `env.normalize`."""

    def __init__(self, of: str, env: VecEnv) -> None:
        finished = load_run(Path(of))
        self.model: Any = finished.model
        with naming(f"clone.of={of}"):
            check_same_spaces(self.model, env, "this environment's")
        if finished.config.algo.spec.recurrent:
            raise ConfigError(f"clone.of={of}: a recurrent policy cannot be recorded; name a run of another algorithm")
        normalizer = None
        if finished.statistics is not None:
            normalizer = with_statistics(env, finished.config, finished.statistics)
        self.normalizer = normalizer

    def act(self, observations: Any, action_masks: BoolArray | None, envs: NDArray[np.int64]) -> NDArray[Any]:
        masks = {} if action_masks is None else {"action_masks": action_masks}
        seen = observations if self.normalizer is None else self.normalizer.normalize_obs(observations)
        actions, _ = self.model.predict(seen, deterministic=True, **masks)
        return actions  # type: ignore[no-any-return]


class _Bot:
    """Plays a bot of a native game in the learner's place."""

    def __init__(self, name: str, env: VecEnv) -> None:
        self.name, self.game = name, env.unwrapped.game  # type: ignore[attr-defined]

    def act(self, observations: Any, action_masks: BoolArray | None, envs: NDArray[np.int64]) -> NDArray[Any]:
        return self.game.bot_actions(self.name)  # type: ignore[no-any-return]


# --- learning


class Learned(NamedTuple):
    """The result of learning. Figures are those of the held-out decisions."""

    decisions: int  # number of all decisions, held out or not
    episodes: int
    held_out_decisions: int
    epochs: int
    accuracy: float  # share of the decisions in which the recorded action is the policy's most likely one
    log_likelihood: float  # mean, natural logarithm
    value_error: float  # mean absolute error of the predicted returns


def learn(run: Parts, shown: Demonstrations) -> Learned:
    """Fit the policy, and keep the weights of the epoch with the best likelihood of the held-out episodes."""
    config, model = run.config, run.model
    policy: Any = model.policy
    generator = np.random.default_rng((config.seed, SEED))
    returns = shown.returns(model.gamma)  # type: ignore[attr-defined]
    number = np.cumsum(shown.episode_starts) - 1
    held = generator.permutation(number[-1] + 1)[: max(1, round(config.clone.held_out * (number[-1] + 1)))]
    test = np.isin(number, held)
    rows, kept, best, since = np.flatnonzero(~test), copy.deepcopy(policy.state_dict()), -np.inf, 0
    figures, epochs = _rated(policy, shown.rows(test), returns[test]), 0
    finite = returns[np.isfinite(returns)]
    batch_size, spread = config.batch_size or 64, float(finite.std()) or 1.0 if len(finite) else 1.0
    if unknown := len(returns) - len(finite):
        say(run.console, f"{unknown:,} of {len(returns):,} decisions stand before a truncation, so their returns are "
            "not known; the value network does not learn from them")  # fmt: skip
    for epoch in range(1, config.clone.epochs + 1):
        policy.set_training_mode(True)
        generator.shuffle(rows)
        for begin in range(0, len(rows), batch_size):
            part = rows[begin : begin + batch_size]
            log_probs, values = _evaluated(policy, shown.rows(part))
            known = np.flatnonzero(np.isfinite(returns[part]))
            wanted, values = torch.as_tensor(returns[part][known], device=policy.device), values[known]
            loss = -log_probs.mean()
            if len(known):
                loss = loss + functional.mse_loss(values / spread, wanted / spread)
            policy.optimizer.zero_grad()
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(policy.parameters(), config.algo.max_grad_norm)
            policy.optimizer.step()
        figures_now = _rated(policy, shown.rows(test), returns[test])
        say(run.console, f"epoch {epoch}: {_words(figures_now)}")
        if figures_now[1] > best:
            best, since, figures, epochs = figures_now[1], 0, figures_now, epoch
            kept = copy.deepcopy(policy.state_dict())
        elif (since := since + 1) == PATIENCE:
            break
    policy.load_state_dict(kept)
    policy.set_training_mode(False)
    say(run.console, f"kept: epoch {epochs}, {_words(figures)}")
    return Learned(len(shown.actions), int(number[-1]) + 1, int(test.sum()), epochs, *figures)


def _words(figures: tuple[float, float, float]) -> str:
    return f"held-out accuracy {100 * figures[0]:.1f} %, log-likelihood {figures[1]:.3f}, value error {figures[2]:.3g}"


def _evaluated(policy: Any, rows: Demonstrations) -> tuple[Tensor, Tensor]:
    """(B,), (B,): log-probabilities of the recorded actions, and values."""
    observations, _ = policy.obs_to_tensor(rows.observations)
    actions = torch.as_tensor(rows.actions, device=policy.device)
    values, log_probs, _ = policy.evaluate_actions(observations, actions, **_masks(policy, rows))
    return log_probs, values.flatten()


def _masks(policy: Any, rows: Demonstrations) -> dict[str, BoolArray]:
    """The keyword argument `action_masks`, for a policy that takes it."""
    if rows.action_masks is None or not isinstance(policy, MaskableActorCriticPolicy):
        return {}
    return {"action_masks": rows.action_masks}


def _rated(policy: Any, rows: Demonstrations, returns: NDArray[Any]) -> tuple[float, float, float]:
    """Accuracy, mean log-likelihood and mean absolute error of the values."""
    policy.set_training_mode(False)
    count, right, likelihood, missed = len(returns), 0.0, 0.0, 0.0
    for begin in range(0, count, 4096):
        chosen = np.arange(begin, min(begin + 4096, count))
        part = rows.rows(chosen)
        with torch.no_grad():
            log_probs, values = _evaluated(policy, part)
        best, _ = policy.predict(part.observations, deterministic=True, **_masks(policy, part))
        right += int((best == part.actions).reshape(len(chosen), -1).all(axis=1).sum())
        likelihood += float(log_probs.sum())
        missed += float(np.nansum(np.abs(values.cpu().numpy() - returns[chosen])))
    return right / count, likelihood / count, missed / max(1, np.isfinite(returns).sum())
