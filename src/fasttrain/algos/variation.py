"""`algo.target_tv`: how far one update of PPO may move the policy, by total variation (Queeney et al. 2021, GePPO).

After each epoch the total variation between the policies before and after is measured over all transitions that the
update learns from: the mean of ρ |r - 1| ÷ 2. r is an action's probability now divided by its probability before the
update, and ρ is the transition's weight in `algo.reuse` (1 without). The update ends once it is above `algo.target_tv`.
The learning rate then falls by 3 % for the following updates. It rises by 3 % after an update that stayed below half
of the target, up to the rate that `algo.learning_rate` gives.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from fasttrain.algos.engine import Statistics
from fasttrain.algos.reuse import rate
from fasttrain.buffers.rollout import RolloutStorage

FACTOR = 1.03  # of the learning rate, per update


def update_within(model: Any, rollout: RolloutStorage, target: float) -> Statistics:
    """All epochs over the rollout; fewer if the total variation is above `target`. Sets the model's next rate scale."""
    for group in model.policy.optimizer.param_groups:
        group["lr"] *= model.learning_rate_scale
    done = list[Statistics]()
    variation = 0.0
    while len(done) < model.n_epochs and variation <= target and not any(each.stopped for each in done):
        done.append(model.update(rollout, model.work()._replace(n_epochs=1)))
        variation = total_variation(model, rollout)
    if variation > target:
        model.learning_rate_scale /= FACTOR
    elif variation < target / 2:
        model.learning_rate_scale = min(1.0, model.learning_rate_scale * FACTOR)
    model.logger.record("train/total_variation", variation)
    model.logger.record("train/learning_rate", model.policy.optimizer.param_groups[0]["lr"])
    return _joined(done)


def total_variation(model: Any, rollout: RolloutStorage) -> float:
    """The total variation between the present policy and the one before the update, over the rollout's transitions."""
    kept = np.ones(rollout.rewards.shape, np.bool_) if rollout.left_out is None else ~rollout.left_out
    _, log_probs = rate(model, rollout, slice(None), kept)
    before = rollout.log_probs[kept]
    weights = 1.0 if model.reuse is None else model.reuse.weights[kept]
    with np.errstate(over="ignore"):
        return float(np.mean(weights * np.abs(np.expm1(log_probs.cpu().numpy() - before))) / 2)


def _joined(done: list[Statistics]) -> Statistics:
    """The statistics of several epochs as those of one update."""
    last = done[-1]
    terms = {name: np.concatenate([each.terms[name] for each in done]) for name in last.terms}
    return replace(
        last,
        terms={**terms, "approx_kl": last.terms["approx_kl"], "explained_variance": last.terms["explained_variance"]},
        norms=np.concatenate([each.norms for each in done]),
        steps=sum(each.steps for each in done),
        epochs=sum(each.epochs for each in done),
        blamed=next((each.blamed for each in done if each.blamed), ""),
    )
