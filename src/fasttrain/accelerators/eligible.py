"""Decides whether compiled kernels reproduce an algorithm as it is now, and gives the reason if not.

`REPRODUCED` lists everything that the kernels compute. If anything is overridden, added or unknown, the algorithm's own
methods are used, on PyTorch. The reason is one sentence, which is shown in the plan.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.distributions import SquashedDiagGaussianDistribution
from stable_baselines3.common.policies import ContinuousCritic
from stable_baselines3.common.torch_layers import CombinedExtractor, FlattenExtractor, MlpExtractor
from stable_baselines3.dqn.policies import QNetwork
from stable_baselines3.sac.policies import Actor
from torch import nn

from fasttrain.accelerators import kernels, kernels_q, kernels_recurrent, kernels_sac
from fasttrain.accelerators.contract import Contract, first_change, storage_of
from fasttrain.accelerators.kernels import KernelEngine
from fasttrain.accelerators.kernels_q import KernelQEngine
from fasttrain.accelerators.kernels_recurrent import SequenceKernelEngine
from fasttrain.accelerators.kernels_sac import KernelSACEngine
from fasttrain.accelerators.layout import KINDS, heads_of, linears_of
from fasttrain.algos.dqn import QWork
from fasttrain.algos.engine import Engine
from fasttrain.algos.guard import optimizers_of
from fasttrain.algos.policy_view import CategoricalView, GaussianView, is_unchanged, networks_of
from fasttrain.algos.q_networks import BranchingQNetwork, DuelingQNetwork
from fasttrain.algos.sac import SACWork
from fasttrain.algos.step import PPOWork
from fasttrain.buffers.replay_storage import ReplayStorage
from fasttrain.buffers.rollout import RolloutStorage
from fasttrain_kernels.dense import ACTIVATIONS
from fasttrain_kernels.simd import PAD

_PPO = Contract(
    engine=KernelEngine,
    calls=kernels.kernel_calls,
    algorithm=("train", "update", "collect_rollouts", "work", "loss", "memory", "remember", "remembered"),
    policy=("__call__", "forward", "evaluate_actions", "predict_values", "extract_features",
            "_get_action_dist_from_latent", "_process_sequence", "forward_actor", "forward_critic"),
    storage=("add", "put", "compute_returns_and_advantages", "minibatches", "draw_order", "rows",
             "observations", "masks", "scalars", "begins", "past"),
    stored=RolloutStorage,
    work={PPOWork: ("n_epochs", "batch_size", "clip_range", "clip_range_vf", "ent_coef", "vf_coef",
                    "normalize_advantage", "max_grad_norm", "target_kl")},
)  # fmt: skip
_DQN = Contract(
    engine=KernelQEngine,
    calls=kernels_q.kernel_calls,
    algorithm=("train", "collect_rollouts", "work", "evaluate", "loss", "replay", "predict", "_sample_action"),
    policy=("__call__", "forward", "_predict", "extract_features", "set_training_mode"),
    storage=("add", "put", "sample", "_get_samples", "gather", "draw", "draw_weighted", "windows", "masks_of",
             "flat_views", "update_priorities"),
    stored=ReplayStorage,
    work={QWork: ("gradient_steps", "batch_size", "double_q", "loss", "gamma", "max_grad_norm")},
)  # fmt: skip
_RECURRENT = _PPO._replace(engine=SequenceKernelEngine, calls=kernels_recurrent.kernel_calls)
_SAC = Contract(  # a user may override the storage's methods: the engine only takes their batches
    engine=KernelSACEngine,
    calls=kernels_sac.kernel_calls,
    algorithm=("train", "collect_rollouts", "work", "evaluate", "critic_loss", "actor_loss", "replay", "predict",
               "_sample_action", "_move_targets"),
    policy=("__call__", "forward", "predict", "_predict", "action_log_prob", "get_action_dist_params",
            "extract_features", "set_training_mode"),
    storage=(),
    stored=ReplayStorage,
    work={SACWork: ("gradient_steps", "batch_size", "gamma", "tau", "target_update_interval", "target_entropy",
                    "ent_coef", "ent_coef_optimizer")},
)  # fmt: skip
REPRODUCED = {"actor-critic": _PPO, "recurrent": _RECURRENT, "Q-network": _DQN, "soft actor-critic": _SAC}
VIEWS = (CategoricalView, GaussianView)  # views of policies whose distributions the kernels compute
ADAM = ("lr", "betas", "eps", "foreach", "fused")  # supported options of Adam; foreach and fused change only rounding

# Units of the largest LSTM that kernels compute. An update of two LSTMs by kernels / by torch, on one thread, takes µs
# per row: with 248 inputs and minibatches of 1,024 rows 9.4 / 31 for 128 units, 29 / 53 for 256, 107 / 146 for 512;
# with 2 inputs and 2,048 rows in which no episode ends 7.1 / 11 for 128, 22 / 32 for 256, 83 / 75 for 512.
PAYS_UP_TO = 256


def unsupported_reason(algorithm: Any) -> str | None:
    """Why compiled kernels cannot reproduce this algorithm now; None if they can. The check takes 0.1 ms."""
    contract, storage = REPRODUCED[_kind_of(algorithm.policy)], storage_of(algorithm)
    unknown = [f"{kind.__name__}.{name}" for kind, known in contract.work.items()
               for name in kind._fields if name not in known]  # fmt: skip
    if unknown:
        return f"{unknown[0]} is a field that compiled kernels do not know"
    if not isinstance(storage, contract.stored):
        return f"the buffer is a {type(storage).__name__}, with which SB3's own loops run"
    if change := first_change(algorithm, contract.algorithm) or first_change(storage, contract.storage):
        return change
    if contract is _DQN and algorithm._vec_normalize_env is not None:
        return "VecNormalize: batches are normalised one by one, which kernels do not do"
    return policy_reason(algorithm.policy)


def policy_reason(policy: Any) -> str | None:
    """Like `unsupported_reason`, but only for a policy and its optimizer."""
    return next(filter(None, (rule(policy) for rule in _RULES[_kind_of(policy)])), None)


def kernels_of(algorithm: Any) -> type[Engine]:
    """The class of the engine that computes this kind of algorithm in compiled kernels."""
    return REPRODUCED[_kind_of(algorithm.policy)].engine


class Watch:
    """Stores the result of `unsupported_reason`. At each update `holds` checks in 10 µs if this result is outdated.

    `holds` detects hooks, methods set on instances, frozen or removed parameters, other options of an optimizer, added
    modules, and a new policy, optimizer, buffer or normalizer. Other changes, for example of a class or of an
    activation's argument, take effect at the next `learn` of DQN and SAC. PPO has a `Watch` only in a run without
    callbacks of the user (`Collector.lends`), in which nothing makes such changes.
    """

    def __init__(self, algorithm: Any) -> None:
        self.reason, self._parts = unsupported_reason(algorithm), _parts_of(algorithm)
        modules = [*algorithm.policy.modules()]
        self._owned = [vars(each) for each in (*self._parts[:3], *modules)]
        self._owned += [each._modules for each in modules]
        self._hooks = [getattr(each, name) for each in modules for name in _HOOKS]
        self._hooks += [_EVERYWHERE[f"_global{name}"] for name in _HOOKS]
        self._optimizers = optimizers = optimizers_of(algorithm.policy)
        self._owned += [*map(vars, optimizers)]
        self._hooks += [getattr(each, name) for each in optimizers for name in _STEP_HOOKS]
        self._learned = [each for _, own in _learned(algorithm.policy) for each in own]
        self._was = self._state()

    def holds(self, algorithm: Any) -> bool:
        """Whether all watched objects are unchanged, so that `self.reason` is still right."""
        return all(map(operator.is_, self._parts, _parts_of(algorithm))) and self._state() == self._was

    def _state(self) -> tuple[Any, ...]:
        hooked = any(each._backward_hooks or each._post_accumulate_grad_hooks for each in self._learned)
        options = [(len(group["params"]), [group.get(name) for name in each.defaults if name not in ADAM])
                   for each in self._optimizers for group in each.param_groups]  # fmt: skip
        frozen = [each.requires_grad for each in self._learned]
        return [*map(len, self._owned)], any(self._hooks), hooked, frozen, options


def _parts_of(algorithm: Any) -> tuple[Any, ...]:
    policy = algorithm.policy
    return algorithm, policy, storage_of(algorithm), algorithm._vec_normalize_env, *optimizers_of(policy)


# --- rules for a policy: each returns why kernels cannot compute it, or an empty text


def _kind_of(policy: Any) -> str:
    if hasattr(policy, "critic_target"):
        return "soft actor-critic"
    return "Q-network" if hasattr(policy, "q_net") else "recurrent" if hasattr(policy, "lstm_actor") else "actor-critic"


def _learned(policy: Any) -> list[tuple[torch.optim.Optimizer, list[nn.Parameter]]]:
    """Pairs of an optimizer and the parameters that it must update."""
    if hasattr(policy, "critic_target"):
        return [(each.optimizer, [*each.parameters()]) for each in (policy.actor, policy.critic)]
    return [(policy.optimizer, [*getattr(policy, "q_net", policy).parameters()])]


def _wrong_device(policy: Any) -> str:
    other = any(each.device.type != "cpu" or each.dtype != torch.float32 for each in policy.parameters())
    return "the policy's tensors are not all float32 on the CPU" if other else ""


def _changed_policy(policy: Any) -> str:
    return first_change(policy, REPRODUCED[_kind_of(policy)].policy)


def _bad_actor_critic(policy: Any) -> str:
    stock = hasattr(policy, "lstm_actor") or is_unchanged(policy)
    if not stock or type(networks_of(policy, policy.action_space)) not in VIEWS:
        return "the policy is not SB3's own, or its actions are neither discrete nor a Box with one axis"
    layers = type(policy.mlp_extractor)
    return "" if layers is MlpExtractor else f"the hidden layers are a {layers.__name__}, a class of the user"


def _bad_lstm(policy: Any) -> str:
    lstms = [lstm for lstm in (policy.lstm_actor, policy.lstm_critic) if lstm is not None]
    actor, units = lstms[0], lstms[0].hidden_size
    if isinstance(actor, nn.GRU):
        return "a GRU is computed on PyTorch: compiled kernels compute only LSTMs"
    if other := [type(lstm).__name__ for lstm in lstms if type(lstm) is not nn.LSTM]:
        return f"the LSTM is a {other[0]}, a class of the user"
    if units % PAD or units > PAYS_UP_TO:
        pays = f"compiled kernels take multiples of {PAD}" if units % PAD else f"torch is faster above {PAYS_UP_TO}"
        return f"an LSTM of {units} units: {pays}"
    if any(not lstm.bias or lstm.proj_size or lstm.bidirectional or lstm.batch_first for lstm in lstms):
        return "the LSTM has other arguments than SB3's"
    if actor.num_layers > 1:
        return f"{actor.num_layers} layers of LSTMs: compiled kernels compute one"
    return "" if policy.lstm_critic is not None or policy.shared_lstm else "the value net has no LSTM"


def _bad_q_network(policy: Any) -> str:
    space, net, target = policy.action_space, policy.q_net, policy.q_net_target
    if not isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)) or space.dtype != np.int64:
        return f"actions are {space} of {space.dtype}, neither Discrete nor MultiDiscrete of int64"
    known = type(net) in (QNetwork, BranchingQNetwork, DuelingQNetwork) and type(target) is type(net)
    return "" if known else f"the Q-network is a {type(net).__name__}, not a plain, branching or dueling one"


def _bad_soft_actor_critic(policy: Any) -> str:
    """Check the classes of the networks and of their features extractors."""
    actor, critics = policy.actor, (policy.critic, policy.critic_target)
    distribution: Any = type(actor.action_dist)
    if type(actor) is not Actor or any(type(each) is not ContinuousCritic for each in critics):
        return f"the networks are a {type(actor).__name__} and a {type(policy.critic).__name__}, not SAC's own"
    if distribution is not SquashedDiagGaussianDistribution:
        return "gSDE is computed on PyTorch" if actor.use_sde else "actions are not drawn from a squashed Gaussian"
    for extractor in (actor.features_extractor, *(each.features_extractor for each in critics)):
        if type(extractor) not in (FlattenExtractor, CombinedExtractor) or [*extractor.parameters()]:
            return f"features come from a {type(extractor).__name__}; compiled kernels need flat observations"
    return ""


def _bad_sac_layers(policy: Any) -> str:
    """The networks of SAC must be linear layers with one kind of activation between them, and nothing else."""
    actor, nets = policy.actor, [*policy.critic.q_networks, *policy.critic_target.q_networks]
    chains = [[*actor.latent_pi, actor.mu], [*actor.latent_pi, actor.log_std], *map(list, nets)]
    linear = {layer for chain in chains for layer in chain[0::2]}
    if any(len(chain) == 1 for chain in chains):
        return "a network without a hidden layer"
    kinds = {type(each) for chain in chains for each in chain[1::2]}
    alike = len({tuple(each.shape for each in net.parameters()) for net in nets}) == 1
    reason = _bad_mlp(policy, linear, kinds, all(len(chain) % 2 for chain in chains))
    return reason or ("" if alike else "the critics have different layers")


def _bad_mlp(policy: Any, linear: Iterable[Any], kinds: set[Any], alternate: bool, others: Iterable[Any] = ()) -> str:
    """Check the linear layers and the kinds of activations. `alternate`: whether layers and activations alternate, as
    they must. The policy must have no parameters except those of the layers and `others`."""
    plain = all(type(layer) is nn.Linear and layer.bias is not None for layer in linear)
    if not (plain and alternate) or len(kinds) > 1:
        return "not an MLP of linear layers with one kind of activation"
    if foreign := kinds - set(KINDS):  # from GELU's and SiLU's output their derivative does not follow
        known = ", ".join(kind.__name__ for kind in KINDS)
        return f"compiled kernels do not compute {foreign.pop().__name__}; they compute {known}"
    if changed := [each for each in policy.modules() if not _has_defaults(each)]:
        return f"compiled kernels compute {type(changed[0]).__name__} with its default argument, not {changed[0]}"
    if unknown := [kind for kind in kinds if KINDS[kind] not in ACTIVATIONS]:
        return f"compiled kernels do not compute the activation {KINDS[unknown[0]]} ({unknown[0].__name__})"
    placed = {*map(id, others), *(id(each) for layer in linear for each in (layer.weight, layer.bias))}
    extra = [name for name, each in policy.named_parameters() if id(each) not in placed]
    return f"the parameter {extra[0]} is in none of the layers that compiled kernels know" if extra else ""


def _has_defaults(module: nn.Module) -> bool:
    if isinstance(module, nn.ELU):
        return module.alpha == 1.0
    return not isinstance(module, nn.LeakyReLU) or module.negative_slope == 0.01


def _bad_features(policy: Any) -> str:
    """Observations must be a float32 Box or a Dict of vectors. The features must be the flat observations."""
    space, keyed = policy.observation_space, isinstance(policy.observation_space, spaces.Dict)
    if isinstance(space, spaces.Discrete):
        return f"observations are {space}; kernels need a Box, such as a one-hot"
    owners = [policy.q_net, policy.q_net_target] if hasattr(policy, "q_net") else [policy]
    names = ("features_extractor", "pi_features_extractor", "vf_features_extractor")
    extractors: Any = {getattr(owner, name, None) for owner in owners for name in names} - {None}
    for extractor in extractors:
        if type(extractor) is not (CombinedExtractor if keyed else FlattenExtractor):
            return f"features come from a {type(extractor).__name__}, not from a flat Box or a Dict of these"
        parts: Any = getattr(extractor, "extractors", {})
        if keyed and list(parts) != list(space.spaces):
            return "the features extractor does not read the observations' keys"
        for key, part in space.items() if keyed else ():
            if not isinstance(part, spaces.MultiBinary | spaces.Box):
                return f"the observations' key {key!r} is {part}; kernels need a Box, such as a one-hot"
            if type(parts[key]) is not nn.Flatten:
                return f"the observations' key {key!r} is an image"
    served = keyed or (isinstance(space, spaces.Box) and space.dtype == np.float32)
    return "" if served else f"observations are {space.dtype}; compiled kernels need a float32 Box"


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_EVERYWHERE = vars(nn.modules.module)  # globals of torch, among them the hooks that every module calls


def _has_hooks(policy: Any) -> str:
    """No module may have a hook, or a method set on the instance."""
    if any(_EVERYWHERE[f"_global{name}"] for name in _HOOKS):
        return "every module of torch has a hook"
    path = REPRODUCED[_kind_of(policy)].policy
    for name, module in policy.named_modules():
        own = vars(module)
        if any(own[hooks] for hooks in _HOOKS) or (name and any(each in own for each in path)):
            return f"{name or 'the policy'} has a hook or a method set by the user, which kernels would not call"
    return ""


def _bad_layers(policy: Any) -> str:
    """The networks must be linear layers with one kind of activation between them, and nothing else."""
    q_nets = (policy.q_net, policy.q_net_target) if hasattr(policy, "q_net") else ()
    lstms = [getattr(policy, f"lstm_{name}", None) for name in ("actor", "critic")]
    if q_nets:
        nets = [(linears_of(net), [*net.q_net][1::2], heads_of(net)) for net in q_nets]
    else:
        both = zip(policy.mlp_extractor.children(), (policy.action_net, policy.value_net), strict=True)
        nets = [(net[0::2], net[1::2], [head]) for net, head in both]
    kinds = {type(each) for _, activations, _ in nets for each in activations}
    linear: list[Any] = [layer for hidden, _, heads in nets for layer in (*hidden, *heads)]
    alternate = all(len(hidden) == len(activations) and (hidden or lstms[0]) for hidden, activations, _ in nets)
    alike = len({tuple(each.shape for each in net.parameters()) for net in q_nets}) < 2
    others = [each for lstm in filter(None, lstms) for each in lstm._flat_weights]
    others += [each for each in [getattr(policy, "log_std", None)] if each is not None and each.dim() == 1]
    return _bad_mlp(policy, linear, kinds, alternate and alike, others)


def _bad_optimizer(policy: Any) -> str:
    for optimizer, learned in _learned(policy):
        group, *more = optimizer.param_groups
        if type(optimizer) is not torch.optim.Adam or more:
            return f"the optimizer is {type(optimizer).__name__}: kernels compute a plain Adam with one parameter group"
        if options := [name for name in optimizer.defaults if group.get(name) and name not in ADAM]:
            return f"compiled kernels do not know Adam's option {options[0]}"
        if "step" in vars(optimizer) or any(getattr(optimizer, name) for name in _STEP_HOOKS):
            return "the optimizer's steps have a hook, which compiled kernels would not call"
        if {*map(id, group["params"])} != {*map(id, learned)}:
            return "the optimizer's parameters are not those of the policy"
    return _frozen(policy)


def _frozen(policy: Any) -> str:
    """Which parameter lacks requires_grad or has a hook; empty if none."""
    names = {id(each): name for name, each in policy.named_parameters()}
    for each in (each for _, own in _learned(policy) for each in own):
        if not each.requires_grad or each._backward_hooks or each._post_accumulate_grad_hooks:
            return f"the parameter {names[id(each)]} {'has a hook' if each.requires_grad else 'is frozen'}"
    return ""


Rule = Callable[[Any], str]
_NETS: tuple[Rule, ...] = (_bad_features, _has_hooks, _bad_layers, _bad_optimizer)
_RULES: dict[str, tuple[Rule, ...]] = {
    "actor-critic": (_wrong_device, _changed_policy, _bad_actor_critic, *_NETS),
    "recurrent": (_bad_lstm, _wrong_device, _changed_policy, _bad_actor_critic, *_NETS),
    "Q-network": (_wrong_device, _changed_policy, _bad_q_network, *_NETS),
    "soft actor-critic": (
        _wrong_device,
        _changed_policy,
        _bad_soft_actor_critic,
        _has_hooks,
        _bad_sac_layers,
        _bad_optimizer,
    ),
}
