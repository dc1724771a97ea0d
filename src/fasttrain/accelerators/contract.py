"""What an accelerator promises: which methods, fields and storage it reproduces, and whether somebody changed them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fasttrain.algos.engine import Engine
from fasttrain.kernel_cache import KernelCall

LIBRARIES = ("fasttrain", "stable_baselines3", "sb3_contrib", "torch")  # whose methods an accelerator stands in for


class Contract(NamedTuple):
    """What the kernels compute for one kind of policy. A method that a class lacks is passed over."""

    engine: type[Engine]  # acts and learns by them
    calls: Callable[[], list[KernelCall]]  # all of them, to be compiled before training
    algorithm: tuple[str, ...]  # its methods
    policy: tuple[str, ...]  # its methods, and those of its modules
    storage: tuple[str, ...]  # its methods
    stored: type  # what the storage is
    work: Mapping[Any, tuple[str, ...]]  # all fields of what an update is asked for


def changed(thing: Any, names: tuple[str, ...]) -> str:
    """The first of these methods that is not a library's own, in a sentence."""
    kind, own = type(thing), vars(thing)
    for name in names:
        method = getattr(kind, name, None)
        on_instance = callable(own.get(name)) and getattr(own[name], "__func__", None) is not method
        if on_instance or (method is not None and _is_foreign(method)):
            of = kind if on_instance else next(each for each in kind.__mro__ if name in vars(each))
            stock = [each for each in kind.__mro__ if not _is_foreign(each) and (on_instance or each is not of)]
            whose = (*stock, of)[0].__name__.lstrip("_")
            how = "set on the instance" if on_instance else "overridden"
            return f"{of.__name__}.{name} is {how}: compiled kernels compute {whose}'s own {name}"
    return ""


def _is_foreign(thing: Any) -> bool:
    """Whether a class or a method is written elsewhere than in `LIBRARIES`, or wrapped there."""
    code = getattr(thing, "fget", thing)
    homes = [getattr(code, "__module__", None), getattr(code, "__globals__", {}).get("__name__")]
    written = [home.partition(".")[0] for home in homes if home]
    return not written or any(home not in LIBRARIES for home in written)


def storage_of(algorithm: Any) -> Any:
    """What the algorithm learns from."""
    if hasattr(algorithm, "replay_buffer"):
        return algorithm.replay_buffer
    return getattr(algorithm.rollout_buffer, "storage", algorithm.rollout_buffer)
