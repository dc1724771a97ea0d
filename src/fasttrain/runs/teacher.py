"""`algo.teacher`: a term in PPO's loss keeps the policy close to that of another run (the teacher).

The term is KL(teacher ‖ learner) of each minibatch's states, over the legal actions, times `algo.teacher_coef` (Schmitt
et al. 2018, https://arxiv.org/abs/1803.03835). The model's `loss` is replaced, as by a user's subclass. So PyTorch
computes the update; compiled kernels still compute actions.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from gymnasium import spaces
from stable_baselines3.common.base_class import BaseAlgorithm
from torch import Tensor

from fasttrain.algos.policy_view import ILLEGAL_LOGIT, Evaluated, action_dims, networks_of
from fasttrain.buffers.rollout import RolloutBatch
from fasttrain.errors import ConfigError, naming
from fasttrain.runs.evaluate import load_run
from fasttrain.runs.models import read_model_file
from fasttrain.runs.spaces import check_same_spaces
from fasttrain.runs.warm_start import MODEL, differences
from fasttrain.spec.checks import parse_schedule
from fasttrain.spec.config import Config
from fasttrain.spec.policies import one_of, own_config

NORMALIZED = (
    "the two policies would see observations normalized by different statistics; train both without env.normalize=[obs]"
)


def follow_teacher(config: Config, model: BaseAlgorithm) -> None:
    """Add the teacher's term to the model's loss, if `algo.teacher` names a run or the zip of a model.

    Raises:
        ConfigError: there is no such model, or its policy has other observations or actions.
    """
    for name, member in getattr(model, "members", {}).items():
        with naming(f"policies.{name}"):
            follow_teacher(own_config(config, name), member)
    source = None if config.policies else getattr(config.algo, "teacher", None)
    if source is None:
        return
    try:
        if "obs" in config.env.normalize:
            raise ConfigError(NORMALIZED)
        policy = _policy_in(Path(source), model) if source.endswith(".zip") else _policy_of(Path(source), model)
    except ConfigError as error:
        raise ConfigError(f"algo.teacher={source}: {str(error).removeprefix(f'run={source}: ')}") from error
    policy.set_training_mode(False)
    view, usual = networks_of(policy, model.action_space), model.loss  # type: ignore[attr-defined]
    if view is None:
        raise ConfigError(f"algo.teacher={source}: its policy's distribution ({policy.action_dist}) is not supported")
    begin, end = parse_schedule(config.algo.teacher_coef, "algo.teacher_coef")

    def loss(batch: RolloutBatch, evaluated: Evaluated) -> dict[str, Tensor]:
        coef = end + (begin - end) * model._current_progress_remaining
        with torch.no_grad():
            wanted = view.outputs(batch.observations)[0]
        terms: dict[str, Tensor] = usual(batch, evaluated)
        return terms | {"teacher_kl": coef * divergence(model, policy, wanted, evaluated, batch)}

    model.loss = loss  # type: ignore[attr-defined]


def _policy_of(folder: Path, model: BaseAlgorithm) -> Any:
    """The policy of a finished run."""
    finished = load_run(folder)
    if finished.config.policies:
        raise ConfigError(one_of(folder / MODEL, finished.config.policies))
    if "obs" in finished.config.env.normalize:
        raise ConfigError(NORMALIZED)
    check_same_spaces(finished.model, model, "this run's")
    return finished.model.policy.to(model.device)


def _policy_in(file: Path, model: BaseAlgorithm) -> Any:
    """The policy in a zip, with the layers of `model`, because the zip does not describe layers."""
    if not file.is_file():
        raise ConfigError("there is no such file")
    policy: Any = copy.deepcopy(model.policy)
    if left := differences(policy.state_dict(), stored := read_model_file(file)[1]):
        raise ConfigError(f"its network is not that of this run ({left[0]}); name the folder of its run instead")
    policy.load_state_dict(stored)
    return policy


def divergence(model: Any, teacher: Any, wanted: Tensor, evaluated: Evaluated, batch: RolloutBatch) -> Tensor:
    """Mean KL(teacher ‖ learner) of a minibatch, a scalar. `wanted` (B, A): the teacher's logits (Box: means)."""
    found = evaluated.logits
    if found is None:
        raise ConfigError("algo.teacher: the policy overrides how it acts, so fasttrain cannot read its distribution")
    if isinstance(model.action_space, spaces.Box):
        pairs = ((wanted, teacher.log_std.detach()), (found, model.policy.log_std))
        there, here = (torch.distributions.Normal(means, log_std.exp().expand_as(means)) for means, log_std in pairs)
        return torch.distributions.kl_divergence(there, here).sum(dim=1).mean()
    if batch.action_masks is not None:
        wanted, found = (torch.where(batch.action_masks, each, ILLEGAL_LOGIT) for each in (wanted, found))
    total = found.new_zeros(len(found))
    dims = action_dims(model.action_space)
    for theirs, own in zip(torch.split(wanted, dims, 1), torch.split(found, dims, 1), strict=True):
        likely = torch.log_softmax(theirs.float(), dim=1)
        total = total + (likely.exp() * (likely - torch.log_softmax(own.float(), dim=1))).sum(dim=1)
    return total.mean()
