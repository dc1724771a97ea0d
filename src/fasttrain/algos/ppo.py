"""PPO and MaskablePPO: SB3's classes with a faster rollout and a faster update, and the same numbers.

`_PPO` has their common code. It overrides `_setup_model`, `collect_rollouts`, `train` and the exclude list of `save`.
`learn`, `predict`, `load`, `set_env`, schedules, loggers and callbacks are SB3's own.
"""

from __future__ import annotations

import operator
import warnings
from contextlib import nullcontext
from functools import reduce
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import sb3_contrib
import stable_baselines3
import torch
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.vec_env import VecEnv
from torch import Tensor
from torch.nn import functional

from fasttrain.algos.causes import check_actions, check_rollout, check_step, why_rollout
from fasttrain.algos.continuous import LONGEST, continued, going_on
from fasttrain.algos.engine import Fast, Statistics, TorchEngine, note_episodes
from fasttrain.algos.grouped import GroupedRollout, groups_of
from fasttrain.algos.policy_view import Evaluated, action_dims, clip_actions
from fasttrain.algos.reuse import Reuse, update_within
from fasttrain.algos.step import PPOStep, PPOWork, Terms, check_terms, faster_adam, micro_batches
from fasttrain.batch import each_array, written
from fasttrain.buffers.rollout import RolloutBatch, RolloutStorage
from fasttrain.buffers.stock import STOCK_ROLLOUTS, RolloutView, as_stock
from fasttrain.errors import ConfigError, EnvError, NoMasksError
from fasttrain.vec.base import SlotAdapter, SlotSource

# Names in the log that are not terms of the loss. No term of the loss may have such a name.
NOT_TERMS = {"loss", "approx_kl", "clip_fraction", "explained_variance", "std", "n_updates", "clip_range",
             "clip_range_vf", "skipped_steps", "learning_rate"}  # fmt: skip


class _PPO(Fast, OnPolicyAlgorithm):
    """The code that PPO and MaskablePPO share."""

    _torch_engine = TorchEngine
    _storage: ClassVar[type[RolloutStorage]] = RolloutStorage
    rollout_buffer: Any  # a `RolloutView` of the storage, or a buffer of the user's own
    _masked: ClassVar[bool]  # whether the algorithm takes action masks
    dims: list[int]  # sizes of the sub-actions; their sum is a mask's width
    reuse: Reuse | None = None  # updates use the last few rollouts; None: only the newest
    target_tv: float | None = None  # see `reuse.py`
    learning_rate_scale = 1.0  # factor of the learning rate; less than 1 only with `target_tv`

    def _setup_model(self) -> None:
        self.dims = action_dims(self.action_space) if self._masked else []
        super()._setup_model()
        if has_stock_buffer(self):
            storage_of(self, self.n_steps, self.n_envs)  # replaces SB3's buffer
        self._attach()

    def collect_rollouts(
        self,
        env: VecEnv,
        callback: BaseCallback,
        rollout_buffer: RolloutBuffer,
        n_rollout_steps: int,
        use_masking: bool | None = None,
    ) -> bool:
        """Fill the rollout buffer. An algorithm with masks uses them unless `use_masking` is False."""
        if not has_stock_buffer(self):
            if self._masked and use_masking is None:  # MaskableRecurrentPPO: SB3 has no `collect_rollouts` for it
                raise ConfigError(f"{type(self).__name__} needs its own rollout buffer; do not replace rollout_buffer")
            masked = {} if use_masking is None else {"use_masking": use_masking}
            return super().collect_rollouts(env, callback, rollout_buffer, n_rollout_steps, **masked)
        with self.collector.clock.phase("buffer"):
            return collect(self, env, callback, n_rollout_steps, self._masked and use_masking is not False)

    def train(self) -> None:
        """Update on the filled rollout, and log the update under SB3's keys.

        Raises:
            DivergedError: too many rounds in a row had no finite update; see `guard.py`.
            ConfigError: an own `loss` or `reuse` is set, but the rollout is in a buffer that only SB3's update reads.
        """
        if not isinstance(self.rollout_buffer, RolloutView):  # the user's own, or a stock buffer that the user filled
            if has_own_loss(self) or self.reuse is not None:
                raise ConfigError(
                    f"reuse or an own loss with a rollout in a {type(self.rollout_buffer).__name__}: SB3's own "
                    "update runs for such a buffer, and ignores reuse and own losses; remove rollout_buffer_class"
                )
            return super().train()
        if not len(self.rollout_buffer.storage.rows):
            warnings.warn("a rollout without a transition: in each of its steps every env only began an episode or did "
                          "not decide. Its update is skipped; use a larger n_steps", stacklevel=2)  # fmt: skip
            return None
        envs_go_on = nullcontext() if self.collector.continuous is None else going_on(self)
        with self.collector.clock.phase("buffer"), envs_go_on:
            self.policy.set_training_mode(True)
            self._update_learning_rate(self.policy.optimizer)
            _log(self, self.update())

    def update(self, rollout: RolloutStorage | None = None, work: PPOWork | None = None) -> Statistics:
        """All epochs over the filled `rollout`, by default the model's own; fewer if a target is exceeded."""
        if rollout is None:
            rollout = self.rollout_buffer.storage if self.reuse is None else self.reuse.merged(self)
            if self.target_tv is not None:
                return update_within(self, rollout, self.target_tv)
        engine: Any = self.engine_now()
        work, own_loss, parts = work or self.work(), has_own_loss(self), engine.settings.gradient_accumulation
        if engine.kind == "kernels":
            return engine.update(rollout, work)  # type: ignore[no-any-return]
        compiled = None if engine.compiled is None else engine.compiled.loss_of(self, work)
        clock, view, step = engine.clock, engine.new_view(), PPOStep(engine, work)
        clock.enter("other")
        with faster_adam(engine.policy.optimizer, not engine.exact):
            for batch in step.minibatches(rollout):
                for part, share in micro_batches(batch, parts) if parts > 1 else ((batch, 1.0),):
                    clock.enter("train_fwd")
                    if compiled is None:
                        evaluated = view.evaluate(part, entropy_gradient=own_loss or work.ent_coef != 0.0)
                        terms = self.loss(part, evaluated)
                        terms = with_loss(
                            check_terms(self, terms, NOT_TERMS) if own_loss else terms, part, evaluated, work
                        )
                    else:
                        terms = compiled(part)
                    clock.enter("train_bwd")
                    step.backward(terms["loss"], share)
                    step.note(terms, share)
                if step.diverged():
                    break
                clock.enter("optim")
                step.apply(step.noted[-1]["loss"])
        clock.enter("log")
        return engine.count_steps(step.of_rollout(rollout))  # type: ignore[no-any-return]

    def loss(self, batch: RolloutBatch, evaluated: Evaluated) -> dict[str, Tensor]:
        """The terms of PPO's loss (Schulman et al. 2017), each a scalar tensor () without its weight.

        Training minimises their weighted sum. The weights are `ent_coef` for `entropy_loss`, `vf_coef` for `value_loss`
        and 1 for all other terms. Each term is logged as `train/NAME`. Override this method to add a term:

            return super().loss(batch, evaluated) | {"reference_kl": 0.1 * kl}

        With an override, compiled kernels and torch.compile are not used, because they compute only PPO's terms.

        Args:
            batch: B rows of the rollout. The advantages are normalised if `normalize_advantage` is set.
            evaluated: what the policy computes for these rows with its present parameters.
        """
        work = self.work()
        return ppo_terms(batch, evaluated, work.clip_range, work.clip_range_vf)

    def work(self) -> PPOWork:
        """The settings of the next update. Clip ranges follow their schedules."""
        model: Any = self
        now = self._current_progress_remaining
        clip_range_vf = None if model.clip_range_vf is None else model.clip_range_vf(now)
        return PPOWork(
            model.n_epochs, model.batch_size, model.clip_range(now), clip_range_vf, self.ent_coef, self.vf_coef,
            model.normalize_advantage and self.reuse is None, self.max_grad_norm, model.target_kl,
        )  # fmt: skip

    def memory(self) -> Any:
        """A `Memory` of the LSTM states before the next step; None for a policy without an LSTM."""

    def remembered(self) -> dict[str, Any]:
        """Further arguments of `_storage`, for subclasses that need them."""
        return {}


class PPO(_PPO, stable_baselines3.PPO):
    """Drop-in for `stable_baselines3.PPO`; `engine="kernels"` computes an MLP policy in compiled kernels."""

    _masked = False


class MaskablePPO(_PPO, sb3_contrib.MaskablePPO):
    """Drop-in for `sb3_contrib.MaskablePPO`; `engine="kernels"` computes an MLP policy in compiled kernels.

    In a state without a legal action any action is drawn, as in sb3-contrib. `collector.empty_masks` counts the states.
    """

    _masked = True


def ppo_terms(batch: RolloutBatch, evaluated: Evaluated, clip_range: Any, clip_range_vf: Any) -> Terms:
    """The terms of PPO's loss under SB3's names, each a scalar without its weight.

    The policy's term is the clipped surrogate. The value's term is the squared error to the returns;
    `clip_range_vf` limits how much a value can change. The entropy's term is minus the mean entropy. If the entropy has
    no closed form, it is estimated from the actions taken.
    """
    advantages, values, old_values = batch.advantages, evaluated.values, batch.old_values
    ratio = torch.exp(evaluated.log_probs - batch.old_log_probs)
    clipped = advantages * torch.clamp(ratio, 1 - clip_range, 1 + clip_range)
    if clip_range_vf is not None:
        values = old_values + torch.clamp(values - old_values, -clip_range_vf, clip_range_vf)
    if batch.sequences is None:
        value_loss = functional.mse_loss(batch.returns, values)
    else:  # the value loss as in sb3-contrib's recurrent PPO
        value_loss = torch.mean((batch.returns - values) ** 2)
    return {
        "policy_gradient_loss": -torch.min(advantages * ratio, clipped).mean(),
        "entropy_loss": -torch.mean(-evaluated.log_probs if evaluated.entropy is None else evaluated.entropy),
        "value_loss": value_loss,
    }


def with_loss(terms: Terms, batch: RolloutBatch, evaluated: Evaluated, numbers: Any) -> Terms:
    """The terms, their weighted sum as `loss`, and SB3's `clip_fraction` and `approx_kl`.

    `approx_kl` estimates KL(old ‖ new) and is never negative, http://joschu.net/blog/kl-approx.html

    Args:
        numbers: a `PPOWork` or `Coefficients` with the weights `ent_coef` and `vf_coef`. Other terms have weight 1.
    """
    weights = {"entropy_loss": numbers.ent_coef, "value_loss": numbers.vf_coef}
    parts = [weights[name] * term if name in weights else term for name, term in terms.items()]
    with torch.no_grad():
        log_ratio = evaluated.log_probs - batch.old_log_probs
        ratio = torch.exp(log_ratio)
        clip_fraction = torch.mean((torch.abs(ratio - 1) > numbers.clip_range).float())
        approx_kl = torch.mean((ratio - 1) - log_ratio)
    return {"loss": reduce(operator.add, parts), **terms, "clip_fraction": clip_fraction, "approx_kl": approx_kl}


def has_own_loss(model: _PPO) -> bool:
    """Whether a subclass overrides `loss`, or `loss` was set on the instance."""
    return type(model).loss is not _PPO.loss or "loss" in vars(model)


def has_stock_buffer(model: OnPolicyAlgorithm) -> bool:
    """False if the user gave a rollout buffer. Then SB3's own loops collect and update."""
    buffer = model.rollout_buffer
    return isinstance(buffer, RolloutView) or (type(buffer) in STOCK_ROLLOUTS and not model.rollout_buffer_kwargs)


def storage_of(model: _PPO, num_steps: int, num_envs: int) -> RolloutStorage:
    """The model's storage for T × N transitions. It is a new storage if steps, envs, gamma or lambda have changed."""
    current: RolloutStorage | None = getattr(model.rollout_buffer, "storage", None)
    wanted = (num_steps, num_envs, model.gamma, model.gae_lambda)
    if current is not None and current.settings == wanted:
        return current
    storage: RolloutStorage = model._storage(
        num_steps,
        num_envs,
        model.observation_space,
        model.action_space,
        device=model.device,
        gamma=model.gamma,
        gae_lambda=model.gae_lambda,
        mask_width=sum(model.dims) if model._masked else None,
        **model.remembered(),
    )
    model.rollout_buffer = as_stock(storage)
    return storage


def collect(model: _PPO, env: VecEnv, callback: BaseCallback, n_rollout_steps: int, use_masking: bool) -> bool:
    """Fill the model's storage with `n_rollout_steps` vector steps. Returns False if a callback asked to stop."""
    clock, policy = model.collector.clock, model.policy
    if model._last_obs is None or model._last_episode_starts is None:
        raise RuntimeError("there is no observation to start from: call learn(), which resets the env first")
    continuous = model.collector.schedule == "continuous"
    rollout = storage_of(model, n_rollout_steps * (LONGEST if continuous else 1), env.num_envs)
    if model.engine.settings.compile_mode is not None and (failure := model.prepare(env)):
        warnings.warn(f"{failure}; training continues without torch.compile", stacklevel=4)
    source = model.collector.source_of(env)
    if use_masking and not source.masked:
        raise NoMasksError(
            f"{type(env).__name__} has no action masks: give the env an action_masks() method, wrap it in "
            "sb3_contrib's ActionMasker, or call learn(use_masking=False)"
        )
    if isinstance(source, SlotAdapter):
        source.begin_episodes(np.asarray(model._last_episode_starts, np.bool_))
    policy.set_training_mode(False)
    rollout.reset()
    if model.use_sde:
        policy.reset_noise(env.num_envs)
    callback.update_locals(  # variables of SB3's loop that are the same in all steps
        {"self": model, "env": env, "callback": callback, "rollout_buffer": model.rollout_buffer,
         "use_masking": use_masking, "n_rollout_steps": n_rollout_steps, "action_masks": None, "n_steps": 0}
    )  # fmt: skip
    with clock.phase("log"):
        callback.on_rollout_start()  # checkpoints are taken here, before the rollout's random numbers are drawn
    engine: Any = model.engine_now()
    groups = None if model.collector.schedule == "lockstep" else groups_of(model, source)
    engine.begin(None if groups else rollout)
    if source.fill is not None:
        complete = source.fill(model, engine, rollout, use_masking, callback)
    elif groups is None:
        complete = _in_lockstep(model, engine, source, rollout, use_masking, callback)
    else:
        grouped = continued(model, groups, use_masking) if continuous else GroupedRollout(model, groups, use_masking)
        complete = grouped.collect(callback)
        rollout = model.rollout_buffer.storage
    if not complete:
        return False
    clock.enter("buffer")
    last_values = engine.values(model._last_obs, model.memory())
    rollout.compute_returns_and_advantages(last_values, model._last_episode_starts, source.slots.rests)
    clock.enter("log")
    callback.update_locals({"values": torch.from_numpy(last_values)[:, None]})
    callback.on_rollout_end()
    return True


def _in_lockstep(
    model: Any, engine: Any, source: SlotSource, rollout: RolloutStorage, use_masking: bool, callback: BaseCallback
) -> bool:
    """T times: act for all envs, step them and store the results. Returns False if the callback asked to stop."""
    collector, clock, policy = model.collector, model.collector.clock, model.policy
    guarded, normalizer = engine.guard is not None, model._vec_normalize_env
    continuous, memory = isinstance(model.action_space, spaces.Box), model.memory()
    views = rollout.step_views(use_masking) if collector.lends else [None] * (rollout.num_steps + 1)
    last = model._last_obs if views[0] is None else each_array(written, views[0].observations, model._last_obs)
    for step, (into, following) in enumerate(pairwise(views)):
        clock.enter("env_step")  # reading masks counts as the env's time
        masks = None
        if use_masking:
            masks = collector.read_masks(source, model.dims, model.num_timesteps, into and into.masks)
        clock.enter("action")
        if model.use_sde and model.sde_sample_freq > 0 and step % model.sde_sample_freq == 0:
            policy.reset_noise(source.num_envs)
        try:
            actions, stored, after = engine.act(last, masks, memory, into)
        except EnvError:  # the outputs are not finite; if an observation is the cause, `check_step` names it
            if guarded:
                check_step(last, np.zeros(1, np.float32), (), model.num_timesteps)
            raise
        clipped = actions
        if continuous:
            clipped = clip_actions(model, actions)
            if guarded:
                check_actions(clipped, policy, stored.observations, model.num_timesteps + source.num_envs)
        last, rewards, dones, infos = collector.step(source, clipped, following and following.observations)
        finished, resets = source.slots.finished, source.slots.resets
        model.num_timesteps += source.num_envs if resets is None else int(np.count_nonzero(~resets))
        cut = [episode for episode in finished if episode.truncated or episode.lost]
        if guarded and (cut or normalizer is not None):  # `rollout.finite` does not check these observations
            check_step(last, rewards, [episode for episode in cut if not episode.lost], model.num_timesteps, normalizer)
        clock.enter("log")
        callback.update_locals(
            {"n_steps": step, "action_masks": masks, "obs_tensor": stored.observations, "actions": actions,
             "values": stored.values, "log_probs": stored.log_probs, "clipped_actions": clipped, "new_obs": last,
             "rewards": rewards, "dones": dones, "infos": infos}
        )  # fmt: skip
        if not callback.on_step():
            return False
        clock.enter("buffer")
        if finished:
            note_episodes(model, infos, dones)
        if cut:
            model.bootstrap_truncated(cut, rewards, stored.values, step, after)
        rollout.add(stored, rewards, model._last_episode_starts)
        if resets is not None:
            rollout.leave_out(step, resets)
            if memory is not None:  # envs that were only reset keep their LSTM states
                after, dones = memory.where(resets, after, dones)
        model._last_obs, model._last_episode_starts = last, dones
        memory = None if memory is None else model.remember(after)
    if guarded and normalizer is None and not rollout.finite(last):
        check_rollout(rollout, last, model.num_timesteps)
    return True


def _log(model: Any, done: Statistics) -> None:
    """Log an update under SB3's names, and all further terms of the loss. The guard counts skipped updates."""
    terms, record = done.terms, model.logger.record
    if done.stopped and model.verbose >= 1:
        last_kl = terms["approx_kl"][-1]
        model.logger.info(f"Early stopping at step {done.epochs - 1} due to reaching max kl: {last_kl:.2f}")
    model._n_updates += done.epochs
    means = {name: float(np.mean(values.astype(np.float64))) for name, values in terms.items()}  # in float64, as SB3's
    for name in sorted({*terms} - NOT_TERMS):
        record(f"train/{name}", means[name])
    record("train/approx_kl", np.mean(terms["approx_kl"]))
    record("train/clip_fraction", means["clip_fraction"])
    record("train/loss", float(terms["loss"][-1]))
    record("train/explained_variance", float(terms["explained_variance"][0]))
    if hasattr(model.policy, "log_std"):
        record("train/std", torch.exp(model.policy.log_std).mean().item())
    record("train/n_updates", model._n_updates, exclude="tensorboard")
    work = model.work()
    record("train/clip_range", work.clip_range)
    if work.clip_range_vf is not None:
        record("train/clip_range_vf", work.clip_range_vf)
    if model.engine.skipped_steps:
        record("train/skipped_steps", model.engine.skipped_steps)
    guard = model.engine.guard
    if guard is not None and (done.skipped or guard.in_a_row or guard.at_limit == "rollback"):
        why = lambda: why_rollout(model.policy, model.rollout_buffer.storage, done.blamed)  # noqa: E731
        guard.note(model, done.norms, why, expected=done.expected_skips)
