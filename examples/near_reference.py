"""A loss term of your own: PPO that stays near a policy which was trained before.

fasttrain +profile=speed env.id=CartPole-v1 algo=ppo algo.entry_point=near_reference:NearReference

The environment variable REFERENCE names the zip of the other model. Compiled kernels compute PPO's own loss only, so
this class trains on PyTorch under every profile, and the plan says so. The term is logged as `train/reference_kl`.
"""

import functools
import os
from typing import Any

import stable_baselines3
import torch
from torch.distributions import Categorical, kl_divergence

import fasttrain


@functools.cache
def reference(file: str) -> Any:
    return stable_baselines3.PPO.load(file, device="cpu").policy


class NearReference(fasttrain.PPO):
    """Adds 0.1 times the KL divergence from the reference to PPO's loss."""

    def loss(self, batch: Any, evaluated: Any) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            wanted = reference(os.environ["REFERENCE"]).get_distribution(batch.observations).distribution
        kl = kl_divergence(wanted, Categorical(logits=evaluated.logits)).mean()
        return super().loss(batch, evaluated) | {"reference_kl": 0.1 * kl}
