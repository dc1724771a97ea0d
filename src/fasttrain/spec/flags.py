"""The speed flags, and what a rule that resolves one may look at. Rules: `plan`, `stepping`, `computing`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from fasttrain.spec.config import Config
from fasttrain.spec.setting import flags_of

NOT_APPLICABLE = "not applicable"
FLAGS = flags_of(Config)
# Where a flag's value is nobody's own choice, so that the game's own and the algorithm's own come first.
SHIPPED = ("default", *(f"profile {name}" for name in ("baseline", "exact", "balance", "speed", "debug")))
BY_NAME = {flag.name: flag for flag in FLAGS}


class Machine(NamedTuple):
    """What the plan needs to know of the machine."""

    cores: int  # physical cores this process may use
    windows: bool
    cuda: bool
    bf16_units: str = ""  # their name; empty: a CPU without


class EnvFacts(NamedTuple):
    """What the plan needs to know of the env. `step_s` is None where nothing had to be measured."""

    native: bool
    step_s: float | None
    cpu_share: float = 1.0  # of the step's time that it computes; the rest it waits, for an engine or a socket
    images: bool = False  # the policy will be a convolutional one
    tried: tuple[float, ...] | None = None  # seconds of a step of all envs: in one process, in workers


class Context(NamedTuple):
    """What a rule of the plan may look at."""

    config: Config
    sources: Mapping[str, str]
    env: EnvFacts
    machine: Machine
    effective: dict[str, Any]  # flags resolved so far, in the order of FLAGS


Resolved = tuple[Any, str]
