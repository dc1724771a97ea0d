"""A features extractor of your own, and its arguments:

fasttrain +profile=speed env.id=CartPole-v1 algo=ppo algo.policy_kwargs.features_extractor_class=residual:Residual \
    algo.policy_kwargs.features_extractor_kwargs.width=32

Compiled kernels serve SB3's own networks only; with this one the run takes the PyTorch path, and the plan says so.
"""

import torch
from gymnasium import spaces
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from torch import nn


class Residual(BaseFeaturesExtractor):
    """One residual block over a flat observation."""

    def __init__(self, observation_space: spaces.Box, width: int = 64):
        super().__init__(observation_space, features_dim=width)
        self.first = nn.Linear(observation_space.shape[0], width)
        self.block = nn.Sequential(nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        first = self.first(observations)
        return first + self.block(first)
