"""Several policies in one game: each decides in its own rows of one rollout, and learns from these rows alone.

The members are models of PPO or MaskablePPO, each with a network, an optimizer, an engine and settings of its own.
`Joint` collects one rollout of T × N rows for all members.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from stable_baselines3.common.policies import BasePolicy
from torch import Tensor, nn

from fasttrain.algos.devices import EngineSettings
from fasttrain.algos.engine import Engine, PolicyStep, TorchEngine, find_kernels, to_device
from fasttrain.algos.owners import Owners, in_order
from fasttrain.algos.policy_view import action_dims
from fasttrain.algos.ppo import PPO, MaskablePPO, storage_of
from fasttrain.batch import BoolArray, Float32Array, with_prefix, without_prefix
from fasttrain.buffers.recurrent import Memory
from fasttrain.buffers.rollout import RolloutRow, RolloutStorage, advantages_of
from fasttrain.errors import ConfigError, EnvError, naming

JOINT, DECISIONS, STEPS = "joint", "decisions", "steps"  # kinds of returns
ENOUGH_ROLLOUTS, ENOUGH_EPISODES = 10, 10  # after so many of either a policy without decisions is an error


class JointPolicy(BasePolicy):
    """The members' policies as one policy. Its state dict has the weights of all members."""

    def __init__(self, observation_space: Any, action_space: Any, members: Mapping[str, Any], owners: Owners) -> None:
        super().__init__(observation_space, action_space)
        if taken := [name for name in members if hasattr(nn.ModuleDict(), name)]:
            raise ConfigError(f"policies: torch takes no network of the name {taken[0]}; use another name")
        self.members, self.owners = nn.ModuleDict(members), owners
        sizes = [each.lstm_actor.hidden_size for each in members.values() if hasattr(each, "lstm_actor")]
        self.units = [slice(end - size, end) for size, end in zip(sizes, np.cumsum(sizes).tolist(), strict=True)]

    def predict(
        self, observation: Any, state: Any = None, starts: Any = None, deterministic: bool = False,
        action_masks: Any = None,
    ) -> tuple[Any, Any]:  # fmt: skip
        """As SB3's `predict`, for one observation or several. Each observation goes to the policy that decides."""
        seen, policies, chosen = np.atleast_2d(observation), list[Any](self.members.values()), []
        parts, state = self.owners.rows(seen), self._begun(state, starts, len(seen))
        for number, own in parts:
            view = self.owners.views[number]
            masks = {} if action_masks is None else {"action_masks": np.atleast_2d(action_masks)[own, view.masks]}
            units = (slice(None), own, self.units[number] if self.units else 0)
            its = None if state is None else tuple(part[units] for part in state)
            found, its = policies[number].predict(view.seen(seen[own]), its, deterministic=deterministic, **masks)
            for part, now in zip(state or (), its or (), strict=True):
                part[units] = now
            chosen.append(view.placed(found, self.action_space).numpy())
        actions = np.concatenate(chosen)[in_order(parts)]
        return (actions if np.ndim(observation) > 1 else actions[0]), state

    def _begun(self, state: Any, starts: Any, count: int) -> Any:
        """The LSTM states h and c (L, count, units) of all policies, side by side, before they act."""
        if self.units and state is None:
            first: Any = next(iter(self.members.children()))
            lstm, total = first.lstm_actor, self.units[-1].stop
            widths = (total, total * isinstance(lstm, nn.LSTM))
            return tuple(np.zeros((lstm.num_layers, count, width), np.float32) for width in widths)
        kept = np.ones(count) if starts is None else 1 - np.asarray(starts)
        return state and tuple(np.float32(part * kept[:, None]) for part in state)

    def _predict(self, observation: Any, deterministic: bool = False) -> Tensor:
        return torch.as_tensor(self.predict(observation.cpu().numpy(), deterministic=deterministic)[0])


class JointEngine(Engine):
    """Acts by the engine of the policy that decides in each row.

    Args:
        members: models by name, whose engines act. None (for an opponent): makes its own engines.
    """

    kind: ClassVar[str] = "torch"

    def __init__(self, policy: Any, settings: EngineSettings, previous: Any = None, members: Any = None) -> None:
        super().__init__(policy, settings, previous)
        self.models = members or {}
        self.decisions: dict[str, int] = getattr(previous, "decisions", dict.fromkeys(self.models, 0))
        self.told: set[str] = getattr(previous, "told", set())  # policies whose `reward_key` has been in an info
        self.engines: list[Any] = [each.engine for each in self.models.values()]
        for own in () if members else policy.members.children():
            eligible: Any = find_kernels()[0] if settings.kind == "kernels" else None
            kernels = eligible is not None and not eligible.policy_reason(own)
            self.engines.append(eligible.KernelEngine(own, settings) if kernels else TorchEngine(own, EngineSettings()))

    def begin(self, rollout: RolloutStorage | None = None) -> None:
        for engine in self.engines:
            engine.begin()  # no rollout, because the number of a policy's rows is known only at each step

    def act(self, observations: Any, action_masks: Any, memory: Any = None, into: Any = None) -> PolicyStep:
        parts, stored, changed = self.policy.owners.rows(observations), list[RolloutRow](), list[tuple[int, Any, Any]]()
        for number, rows in parts:
            view = self.policy.owners.views[number]
            masks = None if action_masks is None else action_masks[rows, view.masks]
            with naming(f"policies.{self.policy.owners.names[number]}"):
                step = self.engines[number].act(view.seen(observations[rows]), masks, self.own(memory, number, rows))
            if len(parts) == 1 and view.is_whole and memory is None:
                return step  # type: ignore[no-any-return]
            changed.append((number, rows, step.lstm_states))
            stored.append(step.stored._replace(actions=view.placed(step.stored.actions, self.policy.action_space)))
        order: Any = in_order(parts)
        seen, stored_masks = to_device(observations, action_masks, self.device, self.pinned)
        actions, values, log_probs = (torch.cat(column)[order] for column in list(zip(*stored, strict=True))[1:4])
        own = RolloutRow(seen, actions, values, log_probs, stored_masks, None if memory is None else memory.states)
        return PolicyStep(actions.cpu().numpy(), own, self.after(memory, changed))

    def own(self, memory: Any, number: int, rows: Any) -> Any:
        """The `Memory` of policy `number` for these rows; None if the policies are not recurrent."""

    def after(self, memory: Any, changed: list[tuple[int, Any, Any]]) -> Any:
        """The LSTM states after a step. `changed`: (policy number, rows, their new states)."""

    def values(self, observations: Any, memory: Any = None) -> Float32Array:
        values = np.empty(len(observations), np.float32)
        for number, rows in self.policy.owners.rows(observations):
            seen = self.policy.owners.views[number].seen(observations[rows])
            values[rows] = self.engines[number].values(seen, self.own(memory, number, rows))
        return values

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        state, arrays = super().state()
        state |= {"decisions": dict(self.decisions), "told": sorted(self.told), "members": {}}
        for name, model in self.models.items():
            own, copies = model.engine.state()
            state["members"][name] = {**own, "n_updates": model._n_updates}
            arrays |= with_prefix(f"member/{name}", copies)
        return state, arrays

    def load(self, state: Mapping[str, Any], arrays: Mapping[str, Any], model: Any) -> None:
        super().load(state, {}, model)
        self.decisions.update(state["decisions"])
        self.told.update(state.get("told", model.reward_keys))
        for name, member in self.models.items():
            member.engine.load(state["members"][name], without_prefix(arrays, f"member/{name}"), member)
            member._n_updates = int(state["members"][name]["n_updates"])


SHARED = ("_values", "_log_probs", "_advantages", "_returns", "rewards", "episode_starts")
VIEWED = ("_observations", "_actions", "_masks")


class JointStorage(RolloutStorage):
    """One rollout of all policies of a `model`. The policies' storages share its tensors, and each leaves out other
    policies' rows. A policy that sees only a part gets copies of this part when the rollout is full."""

    def __init__(self, *args: Any, model: Any, **further: Any) -> None:
        super().__init__(*args, **further)
        # Truncated episodes: step, env, policy at the last observation (None: the step's policy), value there.
        self.finals: list[tuple[int, int, int | None, np.float32]] = []
        self.model = model
        self.own_rewards = {name: np.zeros(self.settings[:2], np.float32) for name in model.reward_keys}
        for member, view in zip(model.members.values(), model.policy.owners.views, strict=True):
            names = (*SHARED, *VIEWED) if view.is_whole else SHARED
            vars(storage_of(member, *self.settings[:2])).update({name: getattr(self, name) for name in names})

    def reset(self) -> None:
        super().reset()
        self.finals = []

    def compute_returns_and_advantages(
        self, last_values: Float32Array, last_dones: BoolArray, rests: BoolArray | None = None
    ) -> None:
        """Fill `advantages` and `returns`. Each row gets the numbers of the policy that decided in it.

        DECISIONS and STEPS leave out a transition if the rollout or a truncated episode ends at another policy's
        decision, because a policy's value network has not learned the states in which other policies decide. JOINT
        leaves it out only if a truncated episode ends where no policy decides.
        """
        model, values, owners = self.model, self.values, self.model.policy.owners(self.observations)
        absent = np.zeros_like(owners, np.bool_) if self.left_out is None else self.left_out
        model.policy.owners.check(owners[~absent])
        following, advantages = model.policy.owners(model._last_obs), np.zeros_like(values)
        self.left_out = np.ones_like(absent)
        for number, (name, member) in enumerate(model.members.items()):
            own: Any = member.rollout_buffer.storage
            rewards, unknown = self.own_rewards.get(name, self.rewards).copy(), np.zeros_like(absent)
            gamma, kind = own.gamma, model.returns.get(name, JOINT)
            left_out, away = absent | (owners != number), following != number
            if kind == JOINT:
                left_out, away = absent.copy(), np.zeros_like(away)
            model.engine.decisions[name] += int(np.count_nonzero(~absent & (owners == number)))
            for step, env, policy, value in self.finals:
                owner = owners[step, env] if policy is None else policy
                if number == owner or (kind == JOINT and owner >= 0):
                    # None: a fault lost the step. With STEPS `by_env_steps` discounts it later, so no `gamma` here.
                    rewards[step, env] += np.float32(1.0 if kind == STEPS and policy is None else gamma) * value
                else:
                    unknown[step, env] = True
            if kind == STEPS:
                rewards, gamma = by_env_steps(rewards, left_out, gamma)
            given = rewards, values, self.episode_starts, last_values.reshape(-1), last_dones, gamma, own.gae_lambda
            with np.errstate(over="ignore", invalid="ignore"):  # `nan_guard` handles values that are not finite
                found = advantages_of(*given, left_out, away if rests is None else away | rests, unknown)
            left_out |= owners != number
            advantages = np.where(left_out, advantages, found)
            self.left_out &= left_out
            own.left_out, own.pos, own.full = left_out, self.pos, True
            view = model.policy.owners.views[number]
            if not view.is_whole:
                seen = self._observations[""] if view.columns is None else self._observations[""][..., view.columns]
                own._observations[""].copy_(seen)
                own._actions.copy_(self._actions[..., view.actions or slice(None)])
                if self._masks is not None:
                    own._masks.copy_(self._masks[..., view.masks])
        self._advantages.copy_(torch.from_numpy(advantages))
        self._returns.copy_(torch.from_numpy(advantages + values))


def by_env_steps(rewards: Float32Array, left_out: BoolArray, gamma: float) -> tuple[Float32Array, Float32Array]:
    """Rewards and discounts (T, N) that make `advantages_of` discount each env step between two decisions."""
    since, gap = np.zeros(rewards.shape), np.ones(rewards.shape)  # env steps since a decision; until the next
    for step in range(1, len(rewards)):
        since[step] = np.where(left_out[step], since[step - 1] + 1, 0)
        gap[-1 - step] = np.where(left_out[-step], gap[-step] + 1, 1)
    return rewards * (gamma**since).astype(np.float32), (gamma**gap).astype(np.float32)


class _NotesRewards:
    """A callback that stores the rewards of policies with a `reward_key`. An info without the key has reward 0."""

    def __init__(self, callback: Any, model: Any) -> None:
        self._callback, self._model = callback, model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._callback, name)

    def update_locals(self, given: dict[str, Any]) -> None:
        for name, key in self._model.reward_keys.items() if "infos" in given else ():
            told = [info.get(key, 0.0) for info in given["infos"]]
            self._model.engine.told.update([name] if any(key in info for info in given["infos"]) else [])
            own = self._model.rollout_buffer.storage.own_rewards[name][given["n_steps"]]
            try:
                own[:] = told
            except (TypeError, ValueError):
                own[:] = np.nan
            if not np.isfinite(own).all():
                raise EnvError(f"policies.{name}.reward_key={key}: the infos have {told!r:.100}; return numbers")
        self._callback.update_locals(given)


class _NamedLogger:
    """A logger whose keys begin with the name of a policy."""

    def __init__(self, logger: Any, name: str) -> None:
        self._logger, self._name, self.info = logger, name, logger.info

    def record(self, key: str, value: Any, exclude: Any = None) -> None:
        self._logger.record(f"{self._name}/{key}", value, exclude)


class Joint:
    """The code that `JointPPO` and `JointMaskablePPO` share.

    Args:
        make: builds the members by name for an env. It draws their weights from the present random state.
        owners: says which policy decides at an observation.
        reward_keys: policy name → the info entry that replaces the env's reward for this policy.
        returns: policy name → kind of its returns. JOINT, the default: a transition ends at the next decision of any
            policy, with that policy's value, as if all were one policy. DECISIONS: it ends at the next decision of the
            same policy. STEPS: as DECISIONS, but `gamma` discounts each env step between the two decisions.
        further: arguments of the stock class.
    """

    _storage: ClassVar[type[RolloutStorage]] = JointStorage
    _engine_class: ClassVar[type[JointEngine]] = JointEngine
    policy: Any
    rollout_buffer: Any

    def __init__(
        self: Any, *args: Any, make: Callable[[Any], dict[str, Any]], owners: Owners,
        returns: Mapping[str, str] | None = None, reward_keys: Mapping[str, str] | None = None, **further: Any,
    ) -> None:  # fmt: skip
        self.make, self.owners, self.returns, self.rollouts = make, owners, returns or {}, 0
        self.reward_keys = reward_keys or {}
        self.update_s = dict.fromkeys(owners.names, 0.0)  # seconds of updates in this process, by policy
        super().__init__(JointPolicy, *args, **further)  # type: ignore[call-arg]

    def _setup_model(self: Any) -> None:
        self._setup_lr_schedule()
        self.set_random_seed(self.seed)
        self.members, self.rollout_buffer = self.make(self.env), None
        self.dims = action_dims(self.action_space) if self._masked else []
        policies = {name: member.policy for name, member in self.members.items()}
        self.policy = JointPolicy(self.observation_space, self.action_space, policies, self.owners)
        storage_of(self, self.n_steps, self.n_envs)
        self._attach()

    def remembered(self: Any) -> dict[str, Any]:
        return {"model": self}

    def unsupported_reason(self: Any) -> str | None:
        """Why kernels can compute none of the policies; None if they can compute at least one."""
        reasons = [(name, member.unsupported_reason()) for name, member in self.members.items()]
        return "; ".join(f"{name}: {reason}" for name, reason in reasons) if all(each for _, each in reasons) else None

    def _new_engine(self: Any, settings: EngineSettings, previous: Engine | None) -> Engine:
        for member in self.members.values():
            member.use_engine(settings)
        return self._engine_class(self.policy, settings, previous, self.members)  # type: ignore[no-any-return]

    def engine_now(self: Any) -> Engine:
        engine, guard = self.engine, self.engine.guard
        engine.engines = [member.engine_now() for member in self.members.values()]
        for name, each in zip(self.members, engine.engines, strict=True):
            each.guard = None if guard is None else each.guard
            if each.guard is not None:
                each.guard.at_limit = guard.at_limit
                each.guard.say = lambda text, name=name: guard.say(text.replace("]", f"] policies.{name}:", 1))
        return engine  # type: ignore[no-any-return]

    def bootstrap_truncated(
        self: Any, finished: Any, rewards: Float32Array, values: Any, step: int, lstm_states: Any = None
    ) -> None:
        """Store for each truncated episode the policy that decides at the last observation, and its value there. If a
        fault ended an episode (`lost`), the last step is left out, and the observation before it counts as the last."""
        storage = self.rollout_buffer.storage
        for episode in finished:
            env, last = episode.env_index, episode.final_observation
            if episode.lost:
                storage.leave_out(step, [env])
                rewards[env] = 0.0
                storage.finals.append((step, env, None, values.reshape(-1)[env]))
            elif episode.truncated and last is not None:
                memory = None if lstm_states is None else Memory.within(lstm_states, [env])
                storage.finals.append((step, env, int(self.owners(last)), self.engine.values(last[None], memory)[0]))

    def collect_rollouts(self: Any, env: Any, callback: Any, *further: Any, **more: Any) -> bool:
        callback = _NotesRewards(callback, self) if self.reward_keys else callback
        return super().collect_rollouts(env, callback, *further, **more)  # type: ignore[misc,no-any-return]

    def train(self: Any) -> None:
        """Update each policy that decided in this rollout, with its own settings, on its own rows."""
        self.rollouts += 1
        idle = [name for name, count in self.engine.decisions.items() if not count]
        if idle and (self.rollouts >= ENOUGH_ROLLOUTS or len(self.ep_info_buffer) >= ENOUGH_EPISODES):
            raise ConfigError(f"policies.{idle[0]} has decided nothing in {self.num_timesteps:,} env steps; change "
                              "its setting decides, or remove it")  # fmt: skip
        untold = sorted({*self.reward_keys} - self.engine.told)
        if untold and len(self.ep_info_buffer) >= ENOUGH_EPISODES:
            name = untold[0]
            raise ConfigError(f"policies.{name}.reward_key={self.reward_keys[name]}: no info has had such an entry in "
                              f"{self.num_timesteps:,} env steps; name an entry that `step` returns")  # fmt: skip
        self.engine_now()
        for name, member in self.members.items():
            member._logger, member.num_timesteps = _NamedLogger(self.logger, name), self.num_timesteps
            member._current_progress_remaining = self._current_progress_remaining
            begun = time.perf_counter()
            if len(member.rollout_buffer.storage.rows):
                with naming(f"policies.{name}"):
                    member.train()
            self.update_s[name] += time.perf_counter() - begun
        for counter in ("gradient_updates", "skipped_steps"):
            setattr(self.engine, counter, sum(getattr(each, counter) for each in self.engine.engines))
        self._n_updates = sum(member._n_updates for member in self.members.values())

    def figures(self: Any) -> dict[str, dict[str, Any]]:
        """For summary.json: decisions, gradient updates, seconds of updating and the engine of each policy."""
        return {
            name: {"decisions": self.engine.decisions[name], "updates": member.engine.gradient_updates,
                   "update_s": round(self.update_s[name], 3), "engine": member.engine.kind}
            for name, member in self.members.items()
        }  # fmt: skip

    def _excluded_save_params(self: Any) -> list[str]:
        return [*super()._excluded_save_params(), "make", "members", "owners"]  # type: ignore[misc]

    def _get_torch_save_params(self: Any) -> tuple[list[str], list[str]]:
        return ["policy", *(f"policy.members.{name}.optimizer" for name in self.members)], []


class JointPPO(Joint, PPO):
    """Several PPO models in one game."""


class JointMaskablePPO(Joint, MaskablePPO):
    """Several MaskablePPO models in one game."""
