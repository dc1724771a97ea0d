"""`Contract`: the methods, settings and storage that kernels reproduce; and a check for methods that a user changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fasttrain.algos.engine import Engine
from fasttrain_kernels.kernel_cache import KernelCall

LIBRARIES = ("fasttrain", "stable_baselines3", "sb3_contrib", "torch")  # methods of other packages count as changed


class Contract(NamedTuple):
    """What the kernels reproduce for one kind of policy. A class may lack some of the listed methods."""

    engine: type[Engine]  # the engine that acts and learns with the kernels
    calls: Callable[[], list[KernelCall]]  # all calls of kernels, so that they can be compiled before training
    algorithm: tuple[str, ...]  # methods of the algorithm that the kernels compute
    policy: tuple[str, ...]  # methods of the policy and of its modules that the kernels compute
    storage: tuple[str, ...]  # methods of the storage that the kernels rely on
    stored: type  # the class that the storage must have
    work: Mapping[Any, tuple[str, ...]]  # class of an update's settings → its fields that the kernels know


def first_change(thing: Any, names: tuple[str, ...]) -> str:
    """A sentence about the first method in `names` that a user has changed; empty if no method was changed."""
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
    """Whether a class or a method, or a decorator around it, is not from `LIBRARIES`."""
    code = getattr(thing, "fget", thing)
    homes = [getattr(code, "__module__", None), getattr(code, "__globals__", {}).get("__name__")]
    written = [home.partition(".")[0] for home in homes if home]
    return not written or any(home not in LIBRARIES for home in written)


def storage_of(algorithm: Any) -> Any:
    """The storage that the algorithm learns from."""
    if hasattr(algorithm, "replay_buffer"):
        return algorithm.replay_buffer
    return getattr(algorithm.rollout_buffer, "storage", algorithm.rollout_buffer)
