"""Builds an env from its name: a registered Gymnasium id, `module:Id-v0`, or a class or function `module:Name`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from inspect import iscoroutinefunction, signature
from types import ModuleType
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from fasttrain.envs import masks, wrappers
from fasttrain.envs.goals import Goals, MaskedGoals
from fasttrain.envs.names import arguments, callable_at
from fasttrain.envs.tasks import TaskOptions
from fasttrain.envs.user_code import attribute_of, blame, import_user_module
from fasttrain.errors import EnvSpecError
from fasttrain.spec import plugins
from fasttrain.spec.backends import option_of
from fasttrain.spec.games import maker_of
from fasttrain.spec.setting import Named, did_you_mean, named

Env = gymnasium.Env[Any, Any]

_MAKE_OPTIONS = ("max_episode_steps", "disable_env_checker")  # arguments of `gymnasium.make`, not of the env


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvSpec:
    """Which env to build, and how. Plain values only, so that it can be pickled."""

    id: str | None = None  # "CartPole-v1", "my_game.envs:MyGame-v0"
    entry_point: str | None = None  # "my_game.envs:MyGame"
    maker: str | None = None  # the entry point to register under `id`, for games of `fasttrain.games`
    kwargs: Mapping[str, Any] = field(default_factory=dict)  # for the constructor
    wrappers: tuple[Named, ...] = ()  # "module:Name", the innermost wrapper first
    info_keys: tuple[str, ...] = ()  # info entries to keep on every step with `lean_info`
    lean_info: bool = False
    needs_masks: bool = False  # the algorithm needs masks
    use_masks: bool = True  # False: observations and infos are not changed, even if they contain masks
    masks: str | None = None  # name of the mask's method or entry, if it is not action_masks
    max_episode_steps: int | None = None  # truncate after this number of steps of the innermost env
    stagger: int = 0  # truncate an episode that begins with a seed after a random number of steps, at most this
    action_repeat: int = 1  # steps of the env per decision of the policy
    two_sided: bool = False  # self-play: the trainer acts for both sides
    tasks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # tasks of a curriculum: reset options by name
    memory_inputs: tuple[str, ...] = ()  # what to add to observations: "action", "reward"
    goals: tuple[int, int, tuple[int, ...]] | None = None  # arguments of `Goals`

    def __post_init__(self) -> None:
        if (self.id is None) == (self.entry_point is None):
            raise EnvSpecError(
                f"name the env by one of env.id (got {self.id!r}) and env.entry_point (got {self.entry_point!r}), "
                "e.g. env.id=CartPole-v1 or env.entry_point=my_game.envs:MyGame"
            )

    @property
    def option(self) -> str:
        return option_of(self.id, self.entry_point, self.kwargs)


class EnvFactory:
    """Builds the env of a spec, also in other processes: it can be pickled and remembers the working directory."""

    def __init__(self, spec: EnvSpec) -> None:
        self.spec = spec
        self.folder = os.getcwd()

    def __call__(self) -> Env:
        return make_env(self.spec, self.folder)

    def around(self, core: Env) -> Env:
        """Put the wrappers around a `core_env` that already exists."""
        return wrapped_core(core, self.spec)

    def __repr__(self) -> str:
        return f"EnvFactory({self.spec.option})"


def make_env(spec: EnvSpec, folder: str | None = None) -> Env:
    """Build the env and wrap it as the spec says.

    The order, from inside: the user's env, `OldGym`, `TimeLimit`, the user's wrappers, `Stagger`, `DictActions`,
    `ActionMasks` if the env has masks, `ActionRepeat`, `Goals`, `MemoryInputs`, `LeanInfo`, `TwoSided`.

    Args:
        folder: where to look for modules besides the installed packages; None: the working directory.

    Raises:
        EnvSpecError: the env cannot be built, or lacks masks but `needs_masks` is set. The message says what to do.
    """
    return wrapped_core(core_env(spec, folder), spec)


def import_env(spec: EnvSpec, folder: str) -> None:
    """Import the module that builds the env. Raises EnvSpecError: the import fails, or the module lacks the name."""
    if spec.entry_point is not None:
        callable_at(spec.entry_point, spec.option, folder)
        return
    module, _, name = (spec.id or "").rpartition(":")
    if module:
        import_user_module(module, folder, spec.option)
    _creator_of(gymnasium.registry.get(name), folder, spec)


def core_env(spec: EnvSpec, folder: str | None = None) -> Env:
    """The user's env inside the user's wrappers. To save builds, `wrapped_core` can wrap the same env several times.

    Raises EnvSpecError: the env cannot be built.
    """
    folder = folder if folder is not None else os.getcwd()
    env = _from_id(spec, folder) if spec.id is not None else _from_entry_point(spec, folder)
    with _closed_on_error(env):
        _check_spaces(env, spec)
        return _with_users_wrappers(env, spec, folder)


def wrapped_core(env: Env, spec: EnvSpec) -> Env:
    """Put the wrappers of fasttrain around a `core_env`.

    Raises EnvSpecError: the env has no masks although `needs_masks` is set.
    """
    with _closed_on_error(env):
        env = wrappers.Stagger(env, spec.stagger) if spec.stagger else env
        if spec.tasks:
            env = TaskOptions(env, spec.tasks)
        if isinstance(env.action_space, spaces.Dict):
            try:
                env = wrappers.DictActions(env, env.action_space)
            except EnvSpecError as error:
                raise EnvSpecError(f"{spec.option}: {error}") from None
        elif isinstance(space := env.action_space, (spaces.Discrete, spaces.MultiDiscrete)) and space.dtype != np.int64:
            # SB3 passes int64 actions, which an int32 space does not contain.
            env = gymnasium.wrappers.TransformAction(env, lambda action: np.asarray(action, space.dtype)[()], space)
        env = _with_masks(env, spec)
        masked = isinstance(env, masks.ActionMasks)
        if spec.action_repeat > 1:
            env = wrappers.ActionRepeat(env, spec.action_repeat, masked)
        if spec.goals:
            env = (MaskedGoals if masked else Goals)(env, *spec.goals)
        env = wrappers.MemoryInputs(env, spec.memory_inputs) if spec.memory_inputs else env
        env = wrappers.LeanInfo(env, spec.info_keys) if spec.lean_info else env
        return wrappers.TwoSided(env) if spec.two_sided else env


@contextlib.contextmanager
def _closed_on_error(env: Env) -> Iterator[None]:
    try:
        yield
    except BaseException:
        with contextlib.suppress(Exception):  # the first error is raised again, not that of close()
            env.close()
        raise


def _from_id(spec: EnvSpec, folder: str) -> Env:
    module_name, _, name = (spec.id or "").rpartition(":")
    if name.startswith("ALE/") and not module_name:  # importing ale_py registers these ids
        module_name = "ale_py"
    if not module_name and name not in gymnasium.registry and (maker := spec.maker or maker_of(name)):
        gymnasium.register(name, maker)
    before = set(gymnasium.registry)
    module = import_user_module(module_name, folder, spec.option) if module_name else None
    registered = gymnasium.registry.get(name)
    creator = _creator_of(registered, folder, spec)
    if registered is not None and creator is not None:
        if isinstance(creator, type) and not issubclass(creator, gymnasium.Env):
            raise EnvSpecError(_not_an_env(spec, creator))
        env_kwargs = {key: value for key, value in spec.kwargs.items() if key not in _MAKE_OPTIONS}
        _check_kwargs(creator, {**registered.kwargs, **env_kwargs}, spec)
    kwargs = arguments(spec.kwargs, "env.kwargs.", folder)
    if spec.max_episode_steps is not None:
        kwargs["max_episode_steps"] = spec.max_episode_steps
    kwargs.setdefault("disable_env_checker", True)  # the checker warns in every process; the checkup tests more
    try:
        return _with_whole_reset(gymnasium.make(name, **kwargs))
    except (gymnasium.error.UnregisteredEnv, gymnasium.error.DeprecatedEnv) as error:
        if (old := _of_old_gym(spec, name, folder)) is not None:
            return _time_limited(_adapted(old, spec), spec)
        raise EnvSpecError(_unknown_id(spec, name, module, before, error)) from error
    except (Exception, SystemExit) as error:
        raise EnvSpecError(f"{spec.option} could not be built{_with_kwargs(spec)}: {blame(error)}") from error


def _with_kwargs(spec: EnvSpec) -> str:
    kwargs = ", ".join(f"env.kwargs.{key}={value!r:.60}" for key, value in spec.kwargs.items())
    return f" with {kwargs}" if kwargs else ""


def _of_old_gym(spec: EnvSpec, name: str, folder: str) -> Any:
    """The env that is registered with the old gym package; None if there is no such env, or if gym is not installed.

    Raises EnvSpecError: gym cannot build the env.
    """
    try:
        old_gym = import_module("gym")
        old_gym.spec(name)
    except Exception:  # the package is not maintained and may raise anything
        return None
    try:
        # The env checker of gym 0.26 uses names that NumPy 2 does not have.
        unchecked = {"disable_env_checker": True} if "disable_env_checker" in signature(old_gym.make).parameters else {}
        return old_gym.make(name, **unchecked, **arguments(spec.kwargs, "env.kwargs.", folder))
    except Exception as error:
        raise EnvSpecError(f"{spec.option} could not be built by the old gym: {blame(error)}") from error


def _adapted(env: Any, spec: EnvSpec) -> Env:
    """Turn what the user's class or function built into a `gymnasium.Env`. Adapts envs of the old gym interface.

    Raises EnvSpecError if `env` is not one env for one agent.
    """
    if isinstance(env, gymnasium.Env):
        return _with_whole_reset(env)
    if not all(callable(attribute_of(env, name)) for name in ("step", "reset")):
        raise EnvSpecError(_not_an_env(spec, type(env)))
    if attribute_of(env, "possible_agents") is not None:
        module = (spec.entry_point or type(env).__module__).partition(":")[0]
        raise EnvSpecError(f"{spec.option} is a game for several agents: use env.backend=pettingzoo env.id={module}")
    if isinstance(attribute_of(env, "num_envs"), int):
        raise EnvSpecError(
            f"{spec.option} built {type(env).__qualname__}, a vector of many envs; name a class that builds one env"
        )
    try:
        return wrappers.OldGym(env)
    except (EnvSpecError, AttributeError) as error:
        raise EnvSpecError(f"{spec.option} seems to have the old gym interface: {error}") from error


def _with_whole_reset(env: Env) -> Env:
    """`env`; if the `reset` of its innermost env lacks `seed` or `options`, with a `PlainReset` around that env."""
    inner = outer = env
    while isinstance(inner, gymnasium.Wrapper):
        outer, inner = inner, inner.env
    try:
        if len(wrappers.reset_takes(inner)) == 2:
            return env
    except (TypeError, ValueError):  # compiled code without a signature
        return env
    if not isinstance(outer, gymnasium.Wrapper):
        return wrappers.PlainReset(inner)
    outer.env = wrappers.PlainReset(inner)
    return env


def _time_limited(env: Env, spec: EnvSpec) -> Env:
    return env if spec.max_episode_steps is None else gymnasium.wrappers.TimeLimit(env, spec.max_episode_steps)


def _from_entry_point(spec: EnvSpec, folder: str) -> Env:
    creator = callable_at(spec.entry_point or "", spec.option, folder)
    _check_kwargs(creator, spec.kwargs, spec)
    kwargs = arguments(spec.kwargs, "env.kwargs.", folder)  # copied: envs in one process must not share a list
    try:
        env = creator(**kwargs)
    except EnvSpecError:  # raised by a class of fasttrain with a complete message
        raise
    except (Exception, SystemExit) as error:
        raise EnvSpecError(f"{spec.option} could not be built{_with_kwargs(spec)}: {blame(error)}") from error
    return _time_limited(_adapted(env, spec), spec)


def _with_users_wrappers(env: Env, spec: EnvSpec, folder: str) -> Env:
    for entry in spec.wrappers:
        name, kwargs = named(entry, "wrapper", "env.wrappers")
        option = f"env.wrappers entry {name}"
        wrapper = callable_at(name, option, folder, gymnasium.Env)
        kwargs = arguments(kwargs, f"{option}, ", folder)
        try:
            wrapped = wrapper(env, **kwargs)
        except (Exception, SystemExit) as error:
            raise EnvSpecError(f"{option} could not wrap {env}: {blame(error)}") from error
        if not isinstance(wrapped, gymnasium.Env):
            raise EnvSpecError(
                f"{option} must return a gymnasium.Env, it returned {wrapped!r:.80}; derive it from gymnasium.Wrapper"
            )
        env = wrapped
    return env


def _with_masks(env: Env, spec: EnvSpec) -> Env:
    if not spec.use_masks and not spec.needs_masks:
        return env
    if not isinstance(env.action_space, masks.MASKABLE_SPACES) and not spec.needs_masks:
        return env
    convention = masks.find_mask_convention(env, spec.masks)
    if convention is not None:
        heads = env.action_heads if isinstance(env, wrappers.DictActions) else None
        return masks.ActionMasks(env, convention, heads, spec.masks)
    if error := masks.hidden_mask_error(env):
        raise EnvSpecError(f"{spec.option}: {error}")
    if spec.masks is not None:
        raise EnvSpecError(
            f"env.masks={spec.masks}: {spec.option} has no such method, nor info or Dict observation of that name"
            f"{did_you_mean(spec.masks, masks.sounds_like_masks(env))}"
        )
    if spec.needs_masks:
        known = masks.sounds_like_masks(env)
        name = f"name its own by env.masks={known[0]}" if known else "name a method that it has by env.masks=METHOD"
        raise EnvSpecError(
            f"{spec.option} offers no action masks (looked for {masks.LOOKED_FOR}): {name}, give it a method "
            "action_masks() that returns one bool per action, put sb3_contrib's ActionMasker into env.wrappers, or use "
            "algo=ppo"
        )
    return env


def _creator_of(registered: object, folder: str, spec: EnvSpec) -> Callable[..., Any] | None:
    """The class or function that the registry would call; None: there is none, and `gymnasium.make` raises an error."""
    entry_point = getattr(registered, "entry_point", None)
    if isinstance(entry_point, str):
        module_name, _, attribute = entry_point.partition(":")
        entry_point = getattr(import_user_module(module_name, folder, spec.option), attribute, None)
    return entry_point if callable(entry_point) else None


def _check_kwargs(creator: Callable[..., Any], kwargs: Mapping[str, Any], spec: EnvSpec) -> None:
    try:
        parameters = signature(creator).parameters.values()
    except (TypeError, ValueError):  # some compiled constructors have no signature
        return
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    accepted = [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in named]
    tail = f"; {getattr(creator, '__qualname__', creator)} accepts: {', '.join(accepted) or 'no arguments'}"
    names = [p.name for p in named]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    for key in kwargs:
        if key not in names and not takes_any:
            raise EnvSpecError(f"{spec.option}: unknown env.kwargs.{key}{did_you_mean(key, names)}{tail}")
    missing = [p.name for p in named if p.default is p.empty and p.name not in kwargs]
    if missing:
        raise EnvSpecError(f"{spec.option}: missing {', '.join(f'env.kwargs.{name}' for name in missing)}{tail}")


def _check_spaces(env: Env, spec: EnvSpec) -> None:
    for name in ("observation_space", "action_space"):
        space = attribute_of(env, name)
        if not isinstance(space, gymnasium.spaces.Space):
            what = "nothing" if space is None else f"{type(space).__module__}.{type(space).__qualname__}"
            raise EnvSpecError(f"{spec.option}: {name} must be a gymnasium.spaces.Space, found {what}")
    for layer in masks.layers(env):
        if found := [name for name in ("reset", "step") if iscoroutinefunction(attribute_of(layer, name))]:
            raise EnvSpecError(
                f"{spec.option}: {found[0]}() is `async def`, which nothing awaits; make it a plain `def`"
            )


def _unknown_id(spec: EnvSpec, name: str, module: ModuleType | None, before: set[str], error: Exception) -> str:
    message = f"{spec.option} is not registered with Gymnasium"
    hint = plugins.hint(name, gymnasium.registry)
    if module is not None and hasattr(module, name):
        return f"{message}; module {module.__name__!r} has {name!r} itself: use env.entry_point={spec.id}"
    added = sorted(set(gymnasium.registry) - before)
    if added:
        return f"{message}; importing {module.__name__ if module else ''!r} registered: {', '.join(added)}"
    if isinstance(error, gymnasium.error.VersionNotFound | gymnasium.error.DeprecatedEnv):
        return f"{message}: {error}"
    if module is not None:
        return f"{message}; importing {module.__name__!r} registered nothing new{hint}"
    return message + (hint or f"; if a package registers it, name that too: env.id=package:{name}")


def _not_an_env(spec: EnvSpec, cls: type) -> str:
    message = f"{spec.option} is not a gymnasium.Env but {cls.__module__}.{cls.__qualname__}"
    roots = {base.__module__.partition(".")[0] for base in cls.__mro__}
    if "gym" in roots or (hasattr(cls, "step") and hasattr(cls, "reset")):
        return (
            f"{message}. If it follows the old gym interface (step returns 4 values, reset only the observation): "
            "name it by env.entry_point=module:Class, where it is adapted; or derive from gymnasium.Env, return "
            "(observation, reward, terminated, truncated, info) from step and (observation, info) from reset(seed=, "
            "options=)"
        )
    return f"{message}; name a gymnasium.Env class or a function that returns one"
