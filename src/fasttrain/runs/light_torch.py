"""torch without its compiler, where a run does not use it."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

WRAPPED = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")
DISABLED = "__dynamo_disable"  # where torch keeps the form of a method that its compiler would leave alone
STEPPING = (Adam, AdamW, RMSprop, SGD)


def leave_compiler_out() -> None:
    """Let optimizers be built, saved and stepped without `torch._dynamo`: 800 modules, 1.2 s of every start on 2 cores.

    Those methods import it only to be left alone by it. Here each is told that it has been left alone already, and
    `step` sets gradients on or off without a word to the compiler. Another version of torch may do that elsewhere: then
    the start, or the first update, takes the second longer, and nothing else changes.
    """
    if "torch._dynamo" in sys.modules:
        return
    for name in WRAPPED:
        method = getattr(getattr(Optimizer, name, None), "__wrapped__", None)
        if method is not None and not hasattr(method, DISABLED):
            setattr(method, DISABLED, method)
    for optimizer in STEPPING:
        step: Any = optimizer.step
        if step.__code__.co_name == "_use_grad":
            optimizer.step = _without_compiler(step.__wrapped__)  # type: ignore[method-assign]


def _without_compiler(step: Any) -> Any:
    """As torch's `_use_grad_for_differentiable`, less the compiler's graph breaks."""

    @functools.wraps(step)
    def plain(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return step(self, *args, **kwargs)

    return plain
