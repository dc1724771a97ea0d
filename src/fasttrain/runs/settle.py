"""The plan's last word on how networks are computed: what only the built model and a compiler can tell."""

from __future__ import annotations

import torch
from stable_baselines3.common.base_class import BaseAlgorithm

from fasttrain.algos import dqn, ppo
from fasttrain.algos.dqn import DQN
from fasttrain.algos.ppo import PPO, MaskablePPO
from fasttrain.engines.guard import Guard
from fasttrain.engines.heads import StockHead, head_of
from fasttrain.engines.torch import Acceleration
from fasttrain.spec.computing import envs_per_forward
from fasttrain.spec.config import Config
from fasttrain.spec.flags import NOT_APPLICABLE
from fasttrain.spec.plan import Plan, Row

ADAM = "Adam by torch's fused kernel"


def acceleration_of(config: Config, fused_adam: bool) -> Acceleration:
    """What the effective flags ask of the eager path."""
    return Acceleration(
        fused_adam=fused_adam,
        amp_dtype=getattr(torch, config.amp_dtype) if config.use_amp == "on" else None,
        compile_mode=config.compile_mode if config.use_compile == "on" else None,
        gradient_accumulation=config.gradient_accumulation,  # DQN has neither this flag nor the next
        inference_batch_size=config.inference_batch_size,
        pin_memory=config.pin_memory == "on",
    )


def settle_acceleration(plan: Plan, model: BaseAlgorithm) -> Plan:
    """Put the flags of the eager path to work, compile what is to be compiled, and say in the plan what came of it."""
    if not isinstance(model, (PPO, MaskablePPO, DQN)):
        return plan
    if not isinstance(model, DQN):
        plan = _with_chunks_for_eager(plan)
    row = _row(plan, "fused_update")
    without_kernels = row.requested != "off" and row.effective == "off"
    if without_kernels and model.device.type == "cpu" and ADAM not in row.reason:  # a resumed plan says it already
        plan = plan.replacing("fused_update", "off", f"{row.reason}; {ADAM}")
    model.accelerate(acceleration_of(plan.config, fused_adam=without_kernels))
    model._fast.guard = Guard(plan.config.guard) if plan.config.nan_guard else None
    if plan.config.use_compile != "on" or model.env is None:
        return plan
    failure = dqn.warm_up(model, model.env) if isinstance(model, DQN) else ppo.warm_up(model, model.env)
    if failure:
        return plan.replacing("use_compile", "off", failure)
    accelerator = model._fast.accelerator_of(model.policy)
    told = [_row(plan, "use_compile").reason, f"compiled in {accelerator.warmup_s:.1f} s before training"]
    if not isinstance(model, DQN) and isinstance(head_of(model.policy, model.action_space), StockHead):
        told.append("acting stays eager: this policy acts by its own methods")
    plan = plan.replacing("use_compile", "on", "; ".join(filter(None, told)))
    if accelerator.graph_failure:
        plan = plan.replacing("compile_mode", plan.config.compile_mode, accelerator.graph_failure)
    return plan


def warmup_s(model: BaseAlgorithm) -> float:
    """What compiling the policy took before training; 0 where nothing was compiled."""
    return model._fast.warmup_s if isinstance(model, (PPO, MaskablePPO, DQN)) else 0.0


def _with_chunks_for_eager(plan: Plan) -> Plan:
    """`inference_batch_size` was not needed for compiled kernels; without them, after all, it is."""
    row, config = _row(plan, "inference_batch_size"), plan.config
    dropped = row.requested is not None and row.effective is None and config.fused_update == "off"
    largest = envs_per_forward(config.num_envs, config.num_workers, config.pipeline)
    if not dropped or row.requested >= largest or row.effective == NOT_APPLICABLE:
        return plan
    return plan.replacing("inference_batch_size", row.requested, "")


def _row(plan: Plan, flag: str) -> Row:
    return next(row for row in plan.rows if row.flag == flag)
