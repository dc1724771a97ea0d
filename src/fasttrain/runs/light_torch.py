"""torch without its compiler, where a run does not use it."""

from __future__ import annotations

import sys

from torch.optim import Optimizer

WRAPPED = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")
DISABLED = "__dynamo_disable"  # where torch keeps the form of a method that its compiler would leave alone


def leave_compiler_out() -> None:
    """Let optimizers be built and saved without `torch._dynamo`: 800 modules, 1.2 s of every start on 2 cores.

    Those methods import it only to be left alone by it. Here each is told that it has been left alone already. Another
    version of torch may keep that elsewhere: then the start takes the second longer, and nothing else changes.
    """
    if "torch._dynamo" in sys.modules:
        return
    for name in WRAPPED:
        method = getattr(getattr(Optimizer, name, None), "__wrapped__", None)
        if method is not None and not hasattr(method, DISABLED):
            setattr(method, DISABLED, method)
