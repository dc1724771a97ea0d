"""The greedy acting path of a policy as one torch module of plain tensors, and its difference from SB3's own methods.

Inputs, with a batch dimension B of any size: the env's observations (a Dict gives one input per key; images keep the
env's layout; `env.normalize` is applied inside) and action masks, if the policy was trained with them. Outputs:
`actions` as `predict(deterministic=True)` gives them; `logits` before masking, `means` for Box actions, or `q_values`
for DQN; `values` for the PPO family. A recurrent policy has further inputs: `episode_starts` (B,) bool; the states
`pi_h` and `pi_c` (B, L, H) of the actor, and `vf_h` and `vf_c` if the critic has its own LSTM (a GRU has no c). Its
outputs `next_pi_h` and so on are the inputs of the next step. `best_choices` lists a model's best actions.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from sb3_contrib.common.recurrent.type_aliases import RNNStates
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.vec_env import VecNormalize
from torch import Tensor, nn

from fasttrain.algos.joint import JointPolicy
from fasttrain.algos.owners import View
from fasttrain.algos.policy_view import action_dims
from fasttrain.algos.recurrent import step_outputs
from fasttrain.vec.base import unblock_masks

Arrays = dict[str, NDArray[Any]]
MASKED_OUT = -1e8  # sb3-contrib's logit of an illegal action
FAR = 10.0  # random observations of an unbounded space are between -FAR and FAR


def reads_masks(policy: object) -> bool:
    """Whether the policy's distribution takes action masks."""
    found = getattr(policy, "get_distribution", None)
    return found is not None and "action_masks" in inspect.signature(found).parameters


class Input(NamedTuple):
    """One input of an exported model file."""

    name: str  # observations, or observations.KEY
    key: str | None  # key of a Dict observation; None if observations are no Dict
    space: spaces.Space[Any]  # the env's space
    channels_last: bool  # True: an image whose channels SB3 moves to the front


class ActingPath(nn.Module):
    """Observations (B, …) and masks (B, A) bool → actions, scores and, for the PPO family, values (B,)."""

    def __init__(self, model: BaseAlgorithm, shown: spaces.Space[Any], statistics: VecNormalize | None) -> None:
        """`shown`: the env's observation space; `statistics`: those of `env.normalize`, or None."""
        super().__init__()
        self.is_q_net = hasattr(model.policy, "q_net")
        self.net: Any = model.policy.q_net if self.is_q_net else model.policy
        self.space, self.action_space = model.observation_space, model.action_space
        self.masked = reads_masks(model.policy)  # the caller sets it to True for a DQN that was trained with masks
        # `dims`: sizes of categorical sub-actions; empty for Box, and for the independent bits of MultiBinary in PPO.
        is_bits = isinstance(self.action_space, spaces.MultiBinary) and not (self.masked or self.is_q_net)
        self.dims = [] if is_bits or isinstance(self.action_space, spaces.Box) else action_dims(self.action_space)
        self.inputs = _inputs(self.space, shown)
        score = {True: "q_values", False: "means" if isinstance(self.action_space, spaces.Box) else "logits"}
        self.output_names = ["actions", score[self.is_q_net], *([] if self.is_q_net else ["values"])]
        if isinstance(self.action_space, spaces.Box):
            self.register_buffer("low", torch.as_tensor(self.action_space.low))
            self.register_buffer("high", torch.as_tensor(self.action_space.high))
        for number, part in enumerate(self.inputs):
            rms = _running(statistics, part.key)
            if rms is not None and statistics is not None:
                self.clip_obs = float(statistics.clip_obs)
                self.register_buffer(f"mean_{number}", torch.as_tensor(rms.mean))
                self.register_buffer(f"std_{number}", torch.as_tensor(np.sqrt(rms.var + statistics.epsilon)))

    @property
    def input_names(self) -> list[str]:
        return [*(part.name for part in self.inputs), *(["action_masks"] if self.masked else [])]

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Inputs in the order of `self.input_names`, outputs in the order of `self.output_names`."""
        observations = self._observations(inputs)
        if self.is_q_net:
            q_values = self.net(observations)
            return self._actions(q_values, inputs[-1] if self.masked else None), q_values
        features = self.net.extract_features(observations)
        pi_features, vf_features = (features, features) if isinstance(features, Tensor) else features
        scores = self.net.action_net(self.net.mlp_extractor.forward_actor(pi_features))
        values = self.net.value_net(self.net.mlp_extractor.forward_critic(vf_features))
        return self._actions(scores, inputs[-1] if self.masked else None), scores, values.flatten()

    def further_inputs(self, size: int, random: np.random.Generator) -> Arrays:
        """Random inputs besides observations and masks."""
        return {}

    def predict_states(self, inputs: Arrays) -> dict[str, Any]:
        """The arguments of SB3's `predict` that give it the recurrent states."""
        return {}

    def expected(self, policy: Any, tensors: object, masks: dict[str, Any], inputs: Arrays) -> tuple[Any, Arrays]:
        """The results of SB3's own methods: the distribution, and all outputs except actions and scores."""
        values = policy.predict_values(tensors).numpy().flatten()
        return policy.get_distribution(tensors, **masks), {"values": values}

    def _observations(self, tensors: tuple[Tensor, ...]) -> Any:
        ready: dict[str | None, Tensor] = {}
        for number, part in enumerate(self.inputs):
            value = tensors[number]
            mean = getattr(self, f"mean_{number}", None)
            if mean is not None:  # normalizes in float64, like VecNormalize
                value = (value.double() - mean) / getattr(self, f"std_{number}")
                value = value.clamp(-self.clip_obs, self.clip_obs).float()
            if part.channels_last:
                value = value.permute(0, 3, 1, 2)
            ready[part.key] = value
        return ready.get(None, ready)

    def _actions(self, scores: Tensor, masks: Tensor | None) -> Tensor:
        if isinstance(self.action_space, spaces.Box):
            low: Any = self.low
            return torch.clamp(scores.reshape(-1, *low.shape), low, self.high)  # type: ignore[arg-type]
        if not self.dims:
            return (scores > 0).long().reshape(-1, *self.action_space.shape)  # type: ignore[misc]
        if masks is not None:
            scores = torch.where(masks, scores, MASKED_OUT)
        if isinstance(self.action_space, spaces.Discrete):
            return scores.argmax(dim=1)
        best = [part.argmax(dim=1) for part in torch.split(scores, self.dims, dim=1)]
        return torch.stack(best, dim=1).reshape(-1, *self.action_space.shape)  # type: ignore[misc]


def _inputs(space: spaces.Space[Any], shown: spaces.Space[Any]) -> list[Input]:
    if isinstance(space, spaces.Dict) and isinstance(shown, spaces.Dict):
        pairs = ((key, part, shown[key]) for key, part in space.items())
        return [Input(f"observations.{key}", key, seen, seen.shape != part.shape) for key, part, seen in pairs]
    return [Input("observations", None, shown, shown.shape != space.shape)]


def _running(statistics: VecNormalize | None, key: str | None) -> Any:
    """Mean and variance of one input; None if it is not normalized."""
    if statistics is None or not statistics.norm_obs:
        return None
    if key is None:
        return statistics.obs_rms
    return statistics.obs_rms[key] if key in (statistics.norm_obs_keys or ()) else None


def random_inputs(acting: ActingPath, size: int, seed: int) -> Arrays:
    """`size` random observations and masks. At least one choice of every sub-action is legal."""
    random = np.random.default_rng(seed)
    arrays = {part.name: _random_observations(part.space, size, random) for part in acting.inputs}
    if acting.masked:
        masks = random.random((size, sum(acting.dims))) < 0.5
        start = 0
        for width in acting.dims:
            masks[np.arange(size), start + random.integers(width, size=size)] = True
            start += width
        arrays["action_masks"] = masks
    return arrays | acting.further_inputs(size, random)


def _random_observations(space: spaces.Space[Any], size: int, random: np.random.Generator) -> NDArray[Any]:
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        low, high = np.clip(space.low, -FAR, FAR), np.clip(space.high, -FAR, FAR)
        return random.uniform(low, high, (size, *space.shape)).astype(space.dtype)
    space.seed(int(random.integers(1 << 31)))
    return np.array([space.sample() for _ in range(size)], dtype=space.dtype)


def largest_difference(
    acting: ActingPath, model: BaseAlgorithm, statistics: VecNormalize | None, inputs: Arrays, outputs: Arrays
) -> float:
    """The largest |Δ| / max(1, |value|) between `outputs` and the results of SB3's own methods for `inputs`. Logits are
    compared as masked log-probabilities. Where actions differ, SB3's scores of both actions are compared.
    """
    observations: Any = {part.key: inputs[part.name] for part in acting.inputs}
    observations = observations.get(None, observations)
    if statistics is not None:
        observations = statistics.normalize_obs(observations)
    masks = {"action_masks": inputs["action_masks"]} if acting.masked else {}
    policy: Any = model.policy
    predict: Any = model.predict
    actions = np.asarray(predict(observations, deterministic=True, **masks, **acting.predict_states(inputs))[0])
    further: Arrays = {}
    with torch.no_grad():
        tensors = policy.obs_to_tensor(observations)[0]
        if acting.is_q_net:
            scores = acting.net(tensors)
        else:
            distribution, further = acting.expected(policy, tensors, masks, inputs)
            scores = _log_probabilities(distribution)
    expected = scores.numpy()
    differences = [_distance(outputs[name], value) for name, value in further.items()]
    differences.append(_distance(_comparable(acting, outputs, inputs), expected))
    return max(*differences, _action_distance(acting, outputs["actions"], actions, expected))


def _log_probabilities(distribution: Any) -> Tensor:
    """Means (Box), logits of bits, or log-probabilities (B, A) of a distribution of SB3 or sb3-contrib."""
    inner = getattr(distribution, "distributions", None) or distribution.distribution
    if isinstance(inner, list):
        return torch.cat([part.logits for part in inner], dim=1)
    return inner.mean if isinstance(inner, torch.distributions.Normal) else inner.logits


def _comparable(acting: ActingPath, outputs: Arrays, inputs: Arrays) -> NDArray[Any]:
    scores = outputs[acting.output_names[1]]
    if acting.is_q_net or not acting.dims:
        return scores
    tensor = torch.from_numpy(scores)
    if acting.masked:
        tensor = torch.where(torch.from_numpy(inputs["action_masks"]), tensor, MASKED_OUT)
    return torch.cat([part.log_softmax(dim=1) for part in torch.split(tensor, acting.dims, dim=1)], dim=1).numpy()


def _distance(ours: NDArray[Any], expected: NDArray[Any]) -> float:
    if ours.shape != expected.shape or not np.isfinite(ours).all():
        return float("inf")
    return float((np.abs(ours - expected) / np.maximum(1.0, np.abs(expected))).max())


def _action_distance(acting: ActingPath, ours: NDArray[Any], expected: NDArray[Any], scores: NDArray[Any]) -> float:
    if ours.shape != expected.shape:
        return float("inf")
    if isinstance(acting.action_space, spaces.Box):
        return _distance(ours, expected)
    ours, expected = (array.reshape(len(scores), -1).astype(np.int64) for array in (ours, expected))
    if not acting.dims:
        return float(np.abs(scores[ours != expected]).max(initial=0.0))
    starts = np.cumsum([0, *acting.dims[:-1]])
    rows = np.arange(len(scores))[:, None]
    gap = np.abs(scores[rows, starts + ours] - scores[rows, starts + expected])
    return float((gap / np.maximum(1.0, np.abs(scores[rows, starts + expected]))).max(initial=0.0))


class Choice(NamedTuple):
    """An action and its rating."""

    action: Any  # int for one sub-action, else (K,) int64
    rating: float  # a probability, or a Q-value (the mean over several sub-actions)
    kind: str  # "probability" or "Q-value"

    @property
    def text(self) -> str:
        """The rating as a text: `61 %`, or a Q-value with + or -."""
        if self.kind == "Q-value":
            return f"{self.rating:+.3f}"
        percent = 100 * self.rating
        return f"{percent:.0f} %" if percent >= 1 else f"{percent:.1g} %" if percent >= 0.01 else "under 0.01 %"


def best_choices(
    model: BaseAlgorithm, observations: object, action_masks: NDArray[np.bool_] | None, count: int = 3
) -> list[Choice]:
    """The `count` best legal actions for row 0 of `observations`. Empty for Box actions and recurrent policies."""
    policy: Any = model.policy
    view = View()
    if isinstance(policy, JointPolicy):
        number = policy.owners.rows(observations)[0][0]
        view, policy = policy.owners.views[number], [*policy.members.values()][number]
        observations = view.seen(observations)
        action_masks = None if action_masks is None else action_masks[:, view.masks]
    policy.set_training_mode(False)
    with torch.no_grad():
        tensors = policy.obs_to_tensor(observations)[0]
        if hasattr(policy, "q_net"):
            kind, scores = "Q-value", list(torch.split(policy.q_net(tensors), action_dims(model.action_space), dim=1))
        elif hasattr(policy, "quantile_net"):
            kind, scores = "Q-value", [policy.quantile_net(tensors).mean(dim=1)]
        else:
            kind, scores = "probability", _choice_scores(policy, tensors, action_masks)
    if not scores:
        return []
    if action_masks is not None:
        sizes = [part.shape[1] for part in scores]
        legal = torch.split(torch.from_numpy(unblock_masks(action_masks, sizes)), sizes, dim=1)
        scores = [part.masked_fill(~mask, -torch.inf) for part, mask in zip(scores, legal, strict=True)]
    choices = []
    for places, total in _best_combinations([part[0].tolist() for part in scores], count):
        rating = total / len(scores) if kind == "Q-value" else float(np.exp(total))
        action: Any = places[0] if len(places) == 1 else np.array(places)
        if not view.is_whole:
            action = view.placed(np.array([places]), model.action_space)[0].numpy()
        choices.append(Choice(action, rating, kind))
    return choices


def _choice_scores(policy: Any, tensors: object, action_masks: NDArray[np.bool_] | None) -> list[Tensor]:
    """Log-probabilities (1, A) of every sub-action; empty for policies with memory or without categorical choices."""
    if hasattr(policy, "lstm_actor") or not hasattr(policy, "get_distribution"):
        return []
    extra = {"action_masks": action_masks} if reads_masks(policy) else {}
    distribution = policy.get_distribution(tensors, **extra)
    inner = getattr(distribution, "distributions", None) or distribution.distribution
    parts = inner if isinstance(inner, list) else [inner]
    if not all(isinstance(part, torch.distributions.Categorical) for part in parts):
        return []
    return [part.logits for part in parts]


def _best_combinations(scores: Sequence[Sequence[float]], count: int) -> list[tuple[tuple[int, ...], float]]:
    """The `count` tuples of one choice per list with the highest sums of scores; a score of -inf is never chosen."""
    best: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    for part in scores:
        order = sorted((choice for choice, score in enumerate(part) if score > -np.inf), key=lambda it: -part[it])
        longer = [((*path, choice), total + part[choice]) for (path, total), choice in product(best, order[:count])]
        best = sorted(longer, key=lambda it: -it[1])[:count]
    return best


# --- recurrent policies


class RecurrentPath(ActingPath):
    """Observations, masks, episode starts and states → actions, scores, values and the next states."""

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
        named = dict(zip(self.input_names, inputs, strict=True))
        continues = 1.0 - named["episode_starts"].to(torch.float32)[:, None]
        after: dict[str, Tensor] = {}

        def run(which: str, features: Tensor) -> Tensor:
            states = [named[f"{which}_{part}"] for part in self.parts]
            stepped: list[tuple[Tensor, ...]] = []
            for layer in range(self.lstms[which].num_layers):
                before = (state[:, layer] * continues for state in states)
                stepped.append(_step_layer(self.lstms[which], layer, features, *before))
                features = stepped[-1][0]
            for part, layers in zip(self.parts, zip(*stepped, strict=True), strict=True):
                after[f"{which}_{part}"] = torch.stack(layers, dim=1)
            return features

        latent, values = step_outputs(self.net, self._observations(inputs), run)
        scores = self.net.action_net(latent)
        actions = self._actions(scores, named.get("action_masks"))
        return actions, scores, values.flatten(), *(after[name] for name in self.state_names)

    def further_inputs(self, size: int, random: np.random.Generator) -> Arrays:
        arrays: Arrays = {"episode_starts": random.random(size) < 0.3}
        for name in self.state_names:
            lstm = self.lstms[name[:2]]
            states = random.uniform(-1.0, 1.0, (size, lstm.num_layers, lstm.hidden_size))
            arrays[name] = states.astype(np.float32)
        return arrays

    def predict_states(self, inputs: Arrays) -> dict[str, Any]:
        return {"state": self._sb3_states(inputs, "pi"), "episode_start": inputs["episode_starts"]}

    def expected(self, policy: Any, tensors: object, masks: dict[str, Any], inputs: Arrays) -> tuple[Any, Arrays]:
        starts = torch.from_numpy(inputs["episode_starts"]).float()
        pi = tuple(map(torch.from_numpy, self._sb3_states(inputs, "pi")))
        vf = tuple(map(torch.from_numpy, self._sb3_states(inputs, "vf" if "vf" in self.lstms else "pi")))
        distribution, _ = policy.get_distribution(tensors, pi, starts, **masks)
        _, values, _, after = policy.forward(tensors, RNNStates(pi, vf), starts, deterministic=True, **masks)
        further = {"values": values.numpy().flatten()}
        for which in self.lstms:
            for part, states in zip(self.parts, getattr(after, which), strict=False):
                further[f"next_{which}_{part}"] = states.transpose(0, 1).numpy()
        return distribution, further

    def _sb3_states(self, inputs: Arrays, which: str) -> tuple[NDArray[Any], NDArray[Any]]:
        """The states in SB3's layout, (L, B, H) each."""
        states = [np.ascontiguousarray(inputs[f"{which}_{part}"].swapaxes(0, 1)) for part in self.parts]
        return states[0], states[-1]  # with a GRU both are h, because a GRU ignores c


def _step_layer(cell: torch.nn.RNNBase, layer: int, inputs: Tensor, h: Tensor, *c: Tensor) -> tuple[Tensor, ...]:
    """One step of one layer; arrays are (B, H). The ONNX exporter refuses `nn.LSTM` with a variable batch size."""
    weights = dict(cell.named_parameters())
    of_inputs = nn.functional.linear(inputs, weights[f"weight_ih_l{layer}"], weights.get(f"bias_ih_l{layer}"))
    of_h = nn.functional.linear(h, weights[f"weight_hh_l{layer}"], weights.get(f"bias_hh_l{layer}"))
    if isinstance(cell, nn.GRU):
        (reset, keep, new), (h_reset, h_keep, h_new) = of_inputs.chunk(3, dim=1), of_h.chunk(3, dim=1)
        new, keep = torch.tanh(new + torch.sigmoid(reset + h_reset) * h_new), torch.sigmoid(keep + h_keep)
        return (new + keep * (h - new),)
    write, forget, new, show = (of_inputs + of_h).chunk(4, dim=1)
    after = torch.sigmoid(forget) * c[0] + torch.sigmoid(write) * torch.tanh(new)
    return torch.sigmoid(show) * torch.tanh(after), after
