"""The greedy acting path of a recurrent policy as one torch module: what it remembers goes in and comes out.

Beside the inputs and outputs of `acting.py`, each with the batch first: `episode_starts` (B,) bool, True where an
episode begins, whatever was remembered; the actor's LSTM's states `pi_h` and `pi_c` (B, L, H), and those of a critic's
own as `vf_h` and `vf_c`; out come `next_pi_h` and so on, which are the next step's inputs. A GRU has `pi_h` and
`vf_h` alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from sb3_contrib.common.recurrent.type_aliases import RNNStates
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.vec_env import VecNormalize
from torch import Tensor, nn

from fasttrain.algos.recurrent import step_outputs
from fasttrain.deploy.acting import ActingPath, Arrays


class RememberingPath(ActingPath):
    """Observations, masks, episode starts and states → actions, scores, values and the states after."""

    def __init__(self, model: BaseAlgorithm, shown: spaces.Space[Any], statistics: VecNormalize | None) -> None:
        super().__init__(model, shown, statistics)
        self.lstms: dict[str, Any] = {"pi": self.net.lstm_actor}
        if self.net.lstm_critic is not None:
            self.lstms["vf"] = self.net.lstm_critic
        self.parts = "hc" if isinstance(self.lstms["pi"], nn.LSTM) else "h"
        self.state_names = [f"{which}_{part}" for which in self.lstms for part in self.parts]
        self.output_names += [f"next_{name}" for name in self.state_names]

    @property
    def input_names(self) -> list[str]:
        return [*super().input_names, "episode_starts", *self.state_names]

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip(self.input_names, inputs, strict=True))
        kept = 1.0 - given["episode_starts"].to(torch.float32)[:, None]
        after: dict[str, Tensor] = {}

        def run(which: str, features: Tensor) -> Tensor:
            states = [given[f"{which}_{part}"] for part in self.parts]
            found: list[tuple[Tensor, ...]] = []
            for layer in range(self.lstms[which].num_layers):
                before = (state[:, layer] * kept for state in states)
                found.append(_stepped(self.lstms[which], layer, features, *before))
                features = found[-1][0]
            for part, layers in zip(self.parts, zip(*found, strict=True), strict=True):
                after[f"{which}_{part}"] = torch.stack(layers, dim=1)
            return features

        latent, values = step_outputs(self.net, self._observations(inputs), run)
        scores = self.net.action_net(latent)
        actions = self._actions(scores, given.get("action_masks"))
        return actions, scores, values.flatten(), *(after[name] for name in self.state_names)

    def further_inputs(self, size: int, random: np.random.Generator) -> Arrays:
        arrays: Arrays = {"episode_starts": random.random(size) < 0.3}
        for name in self.state_names:
            lstm = self.lstms[name[:2]]
            states = random.uniform(-1.0, 1.0, (size, lstm.num_layers, lstm.hidden_size))
            arrays[name] = states.astype(np.float32)
        return arrays

    def remembered(self, inputs: Arrays) -> dict[str, Any]:
        return {"state": self._sb3_states(inputs, "pi"), "episode_start": inputs["episode_starts"]}

    def judged(self, policy: Any, tensors: object, masks: dict[str, Any], inputs: Arrays) -> tuple[Any, Arrays]:
        starts = torch.from_numpy(inputs["episode_starts"]).float()
        pi = tuple(map(torch.from_numpy, self._sb3_states(inputs, "pi")))
        vf = tuple(map(torch.from_numpy, self._sb3_states(inputs, "vf" if "vf" in self.lstms else "pi")))
        distribution, _ = policy.get_distribution(tensors, pi, starts, **masks)
        _, values, _, after = policy.forward(tensors, RNNStates(pi, vf), starts, deterministic=True, **masks)
        found = {"values": values.numpy().flatten()}
        for which in self.lstms:
            for part, states in zip(self.parts, getattr(after, which), strict=False):
                found[f"next_{which}_{part}"] = states.transpose(0, 1).numpy()
        return distribution, found

    def _sb3_states(self, inputs: Arrays, which: str) -> tuple[NDArray[Any], NDArray[Any]]:
        """As SB3 has them: (L, B, H) each."""
        found = [np.ascontiguousarray(inputs[f"{which}_{part}"].swapaxes(0, 1)) for part in self.parts]
        return found[0], found[-1]  # a GRU, which has no c, gives back any


def _stepped(cell: torch.nn.RNNBase, layer: int, inputs: Tensor, h: Tensor, *c: Tensor) -> tuple[Tensor, ...]:
    """One step of one layer, (B, H) each: the exporter to ONNX refuses `nn.LSTM` with a batch of any size."""
    weights = dict(cell.named_parameters())
    of_inputs = nn.functional.linear(inputs, weights[f"weight_ih_l{layer}"], weights.get(f"bias_ih_l{layer}"))
    of_h = nn.functional.linear(h, weights[f"weight_hh_l{layer}"], weights.get(f"bias_hh_l{layer}"))
    if isinstance(cell, nn.GRU):
        (reset, kept, new), (h_reset, h_kept, h_new) = of_inputs.chunk(3, dim=1), of_h.chunk(3, dim=1)
        new, kept = torch.tanh(new + torch.sigmoid(reset + h_reset) * h_new), torch.sigmoid(kept + h_kept)
        return (new + kept * (h - new),)
    write, forget, new, show = (of_inputs + of_h).chunk(4, dim=1)
    after = torch.sigmoid(forget) * c[0] + torch.sigmoid(write) * torch.tanh(new)
    return torch.sigmoid(show) * torch.tanh(after), after
