"""The setting `policies`: several policies in one game, the decisions that each takes, and its own settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_type_hints

from fasttrain.errors import ConfigError
from fasttrain.spec.config import Config
from fasttrain.spec.setting import convert, did_you_mean

OTHERS = "others"  # as a value of `decides`: every decision that no other policy takes
ALGORITHMS = ("ppo", "maskable_ppo")
OWN = {"decides": Any, "returns": str, "init_from": str, "batch_size": int}  # keys of a policy besides those of `algo.`
# Keys of `algo.` about the rollout that all policies share.
SHARED = ("name", "rollout_size", "n_steps", "use_sde", "sde_sample_freq", "entry_point", "kwargs")
RETURNS = ("joint", "decisions", "steps")  # the first is the default
WRAPPER = "fasttrain.envs.wrappers:InfoOneHot"
TAKEN = ("model", "best_model", "last_good")  # names of files in a run's folder, which no policy may have


def phases_of(config: Config) -> Mapping[str, int | None]:
    """Phase → column of the observation, from the game or env.phases; None: the rest. Empty: info["policy"] is used."""
    return {**config.env.spec.phases, **config.env.phases}


def decides_of(config: Config, name: str) -> tuple[str, ...]:
    """The phases in which the policy decides."""
    decides = config.policies[name].get("decides", ())
    return (decides,) if isinstance(decides, str) else tuple(map(str, decides))


def columns_of(config: Config, width: int) -> list[list[int] | None]:
    """For each policy the columns of an observation of that width, counted from the end; None: all other decisions."""
    phases = phases_of(config)
    if not phases:  # columns appended by `with_one_hot`
        names = [phase for name in config.policies for phase in decides_of(config, name)]
        phases = {phase: width - len(names) + place for place, phase in enumerate(names)}
    found = list[list[int] | None]()
    for name in config.policies:
        columns = [phases.get(phase) for phase in decides_of(config, name)]
        if wrong := [column for column in columns if column is not None and not 0 <= column < width]:
            raise ConfigError(f"policies.{name}: its phase is column {wrong[0]}; the observation has columns 0 to "
                              f"{width - 1}")  # fmt: skip
        found.append(None if None in columns else [column - width for column in columns if column is not None])
    return found


def member_file(stem: str, name: str) -> str:
    """The file of one of several policies beside model.zip or best_model.zip."""
    return f"{name}.zip" if stem == "model" else f"{stem}_{name}.zip"


def with_one_hot(config: Config) -> Config:
    """The configuration with a wrapper that appends info["policy"] to the observation, if no column marks the phase."""
    values = [phase for name in config.policies for phase in decides_of(config, name)]
    wrapper = {"wrapper": WRAPPER, "key": "policy", "values": values}
    if not values or phases_of(config) or wrapper in config.env.wrappers:
        return config
    return replace(config, env=replace(config.env, wrappers=(*config.env.wrappers, wrapper)))


def own_config(config: Config, name: str) -> Config:
    """The configuration of one of the policies. Raises ConfigError: a key of it is unknown, or its value wrong."""
    where, own = f"policies.{name}", dict(config.policies[name])
    if isinstance(nested := own.pop("algo", {}), Mapping):
        own |= {f"algo.{key}": value for key, value in nested.items()}
    hints = OWN | {f"algo.{key}": hint for key, hint in get_type_hints(type(config.algo)).items()}
    for key in own:
        if key.removeprefix("algo.") in SHARED:
            raise ConfigError(f"{where}.{key}: all policies share one rollout; set {key} beside policies")
        if key not in hints:
            raise ConfigError(f"unknown key '{where}.{key}'{did_you_mean(key, hints)}")
    values = {key: convert(value, hints[key], f"{where}.{key}") for key, value in own.items()}
    algo = {key.removeprefix("algo."): value for key, value in values.items() if key.startswith("algo.")}
    further: dict[str, Any] = {key: values[key] for key in ("init_from", "batch_size") if key in own}
    if "init_from" not in own:
        further |= {"init_from": None, "init_from_strict": False, "init_from_also": ()}
    return replace(config, policies={}, algo=replace(config.algo, **algo), **further)


def check_policies(config: Config) -> None:
    """Raises ConfigError: the policies cannot play this game together, or claim the same decisions."""
    if not config.policies:
        return
    shown, algo = ", ".join(config.policies), config.algo
    if len(config.policies) == 1:
        raise ConfigError(f"policies has one policy alone ({shown}); name a second one, or set algo.… without policies")
    if algo.name not in ALGORITHMS or getattr(algo, "use_sde", False):
        raise ConfigError(f"policies train by {' or '.join(ALGORITHMS)} without algo.use_sde; here algo={algo.name}")
    if config.engine == "stock":
        raise ConfigError("policies with engine=stock: SB3 has no such training; use engine=fast, or +profile=speed")
    if "obs" in config.env.normalize:
        raise ConfigError("policies read columns of the observation, which env.normalize=[obs] changes; remove one")
    claimed, gammas = dict[str, str](), set[float]()
    for name in config.policies:
        gammas.add(own_config(config, name).algo.gamma)
        if not name.isidentifier() or name in TAKEN:
            raise ConfigError(f"policies: {name!r} cannot name a policy: use letters, and not {', '.join(TAKEN)}")
        for phase in _phases_of(config, name):
            if phase in claimed:
                raise ConfigError(f"policies.{name} and policies.{claimed[phase]} both decide in {phase}; let one do "
                                  "so")  # fmt: skip
            claimed[phase] = name
    kinds = {own.get("returns", RETURNS[0]) for own in config.policies.values()}
    if RETURNS[0] in kinds and len(gammas) > 1:
        raise ConfigError("policies with different algo.gamma have no joint returns; give each returns: decisions")


def _phases_of(config: Config, name: str) -> list[str]:
    """The phases of one policy. All names that mean `others` count as one."""
    where, phases, decides = f"policies.{name}", phases_of(config), decides_of(config, name)
    if not decides:
        raise ConfigError(f"{where} needs decides: the phase in which it decides, as in {{decides: bid}}")
    if (returns := config.policies[name].get("returns", RETURNS[0])) not in RETURNS:
        raise ConfigError(f"{where}.returns={returns}: expected one of {', '.join(RETURNS)}")
    for phase in decides:
        if not phases and phase == OTHERS:
            raise ConfigError(f'{where}.decides={OTHERS}: name the value of info["policy"], or columns by env.phases')
        if phases and phase not in (*phases, OTHERS):
            hint = did_you_mean(phase, phases) or f"; there are {', '.join((*phases, OTHERS))}"
            raise ConfigError(f"{where}.decides={phase}: this game has no such phase{hint}")
    return [OTHERS if phases and phases.get(phase) is None else phase for phase in decides]
