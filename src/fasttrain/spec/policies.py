"""The setting `policies`: several policies in one game, with the decisions and the own settings of each policy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_type_hints

from fasttrain.errors import ConfigError
from fasttrain.spec.config import Config
from fasttrain.spec.setting import build, convert, declared, did_you_mean

OTHERS = "others"  # as a value of `decides`: every decision that no other policy takes
ALGORITHMS = ("ppo", "maskable_ppo", "recurrent_ppo", "maskable_recurrent_ppo")
JOINT = "joint"  # as a value of `returns`: a transition ends at the next decision of any policy
PHASE = "phase"  # as a value of `goal_every`: a new goal whenever the game's phase changes
# Keys of a policy besides the keys below `algo.`
OWN = {"decides": Any, "returns": Literal["joint", "decisions", "steps"], "init_from": str, "batch_size": int,
       "goal_every": int | Literal["phase"], "goals": int, "reward_key": str,
       "observation": tuple[int | str, ...]}  # fmt: skip
# Keys of `algo.` about the rollout that all policies share.
SHARED = (
    "name",
    "reuse",
    "target_tv",
    "rollout_size",
    "n_steps",
    "use_sde",
    "sde_sample_freq",
    "entry_point",
    "kwargs",
)
ROWS = "fasttrain_integrations.pettingzoo:Rows"  # this env itself appends a one-hot of the agent
SEAT = "fasttrain_integrations.pettingzoo:Seat"
WRAPPER = "fasttrain.envs.wrappers:InfoOneHot"
TAKEN = ("model", "best_model", "last_good")  # names of files in a run's folder; no policy may have such a name


def phases_of(config: Config) -> Mapping[str, int | None]:
    """Phase → its column of the observation; None: it has no column. If empty, info["policy"] has the phase."""
    return {**config.env.spec.phases, **config.env.phases}


class Goals(NamedTuple):
    """The arguments of `envs.goals.Goals`."""

    number: int
    every: int
    borders: tuple[int, ...]


def goals_of(config: Config) -> Goals | None:
    """The goals that one policy, the manager, sets for the other policy; None if no policy sets goals."""
    for own in config.policies.values():
        if (every := own.get("goal_every")) is not None:
            borders = (each for each in phases_of(config).values() if each is not None and every == PHASE)
            return Goals(int(own["goals"]), 0 if every == PHASE else int(every), tuple(borders))
    return None


def returns_of(config: Config, name: str) -> str:
    """The kind of the policy's returns: joint, decisions or steps."""
    apart = goals_of(config) or any("reward_key" in own for own in config.policies.values())
    return str(config.policies[name].get("returns", "decisions" if apart else JOINT))


def decides_of(config: Config, name: str) -> tuple[str, ...]:
    """The phases in which the policy decides."""
    decides = config.policies[name].get("decides", ())
    phases = decides if isinstance(decides, (list, tuple)) else [decides]
    if not all(isinstance(phase, (str, int)) for phase in phases):
        raise ConfigError(f"policies.{name}.decides={decides}: expected a phase, or a list of phases")
    return tuple(dict.fromkeys(map(str, phases)))


def columns_of(config: Config, width: int) -> list[list[int] | None]:
    """Per policy: observation columns (from the end), one of which is 1 if it decides; None: it decides otherwise."""
    phases = phases_of(config)
    if goals := goals_of(config):  # the last columns: the goal's one-hot, or 0 if the policy that sets goals decides
        return [None if "goal_every" in own else [*range(-goals.number, 0)] for own in config.policies.values()]
    if not phases:  # WRAPPER or ROWS appends a column for each phase
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


def seen_of(config: Config, name: str, width: int) -> list[int] | None:
    """The columns that the policy sees of an observation with `width` columns; None: all columns."""
    own, goals = config.policies[name], goals_of(config)
    shown = width - goals.number if goals else width
    if "observation" not in own and not (goals and "goal_every" in own):
        return None
    columns = list[int]()
    for part in own.get("observation", [f"0:{shown}"]):
        first, colon, end = str(part).partition(":")
        if not (first.isdigit() and ((end.isdigit() and int(first) < int(end)) or not colon)):
            raise ConfigError(f"policies.{name}.observation: {part!r} is neither a column nor a range such as 0:8")
        columns += range(int(first), int(end) if colon else int(first) + 1)
    if not columns:
        raise ConfigError(f"policies.{name}.observation: it names no column; leave it out, and all columns are seen")
    if wrong := [column for column in columns if column >= shown]:
        raise ConfigError(f"policies.{name}.observation: there is no column {wrong[0]}; there are 0 to {shown - 1}")
    return columns if "goal_every" in own else [*columns, *range(shown, width)]


def member_file(stem: str, name: str) -> str:
    """The file name of one of several policies, in the folder of `stem`.zip."""
    return f"{name}.zip" if stem == "model" else f"{stem}_{name}.zip"


def one_of(file: Path, names: Iterable[str]) -> str:
    """A part of a message: `file` has several policies, so the user must name one of the files with one policy."""
    files = " or ".join(str(file.with_name(member_file(file.stem, name))) for name in names)
    return f"it has several policies; name one of them: {files}"


def with_told(config: Config) -> Config:
    """The configuration with what the policies need from envs: info entries with rewards, and, if no column marks
    the phase, a wrapper that appends info["policy"] to the observation."""
    keys = [str(own["reward_key"]) for own in config.policies.values() if "reward_key" in own]
    config = replace(config, env=replace(config.env, info_keys=tuple(dict.fromkeys((*config.env.info_keys, *keys)))))
    values = [phase for name in config.policies for phase in decides_of(config, name)]
    if values and config.env.entry_point == ROWS and not phases_of(config):
        if config.env.kwargs.get("roles", values) != values:
            raise ConfigError(f"env.kwargs.roles={config.env.kwargs['roles']}: the policies' decides name the roles "
                              f"({', '.join(values)}); remove it")  # fmt: skip
        return replace(config, env=replace(config.env, kwargs={**config.env.kwargs, "roles": values}))
    wrapper = {"wrapper": WRAPPER, "key": "policy", "values": values}
    if not values or phases_of(config) or wrapper in config.env.wrappers:
        return config
    return replace(config, env=replace(config.env, wrappers=(*config.env.wrappers, wrapper)))


def own_config(config: Config, name: str) -> Config:
    """The configuration of one policy. Raises ConfigError if a key of this policy is unknown, or a value is wrong."""
    where, own = f"policies.{name}", dict(config.policies[name])
    nested = convert(own.pop("algo", {}), dict[str, Any], f"{where}.algo")
    if twice := sorted(f"algo.{key}" for key in nested if f"algo.{key}" in own):
        raise ConfigError(f"{where}: {twice[0]} is set twice, by its own key and inside algo; remove one")
    own |= {f"algo.{key}": value for key, value in nested.items()}
    hints = OWN | {f"algo.{key}": hint for key, hint in get_type_hints(type(config.algo)).items()}
    for key in own:
        if key.removeprefix("algo.") in SHARED:
            raise ConfigError(f"{where}.{key}: all policies share one rollout; set {key} beside policies")
        if key not in hints:
            raise ConfigError(f"unknown key '{where}.{key}'{did_you_mean(key, hints)}")
    algo = {one.name: getattr(config.algo, one.name) for one in fields(config.algo)}
    algo |= {key.removeprefix("algo."): value for key, value in own.items() if key.startswith("algo.")}
    values = {key: convert(value, OWN[key], f"{where}.{key}") for key, value in own.items() if key in OWN}
    further: dict[str, Any] = {key: values[key] for key in ("init_from", "batch_size") if key in own}
    for one in fields(config):
        if one.name in further:
            declared(one).check(f"{where}.{one.name}", further[one.name])
    if "init_from" not in own:
        further |= {"init_from": None, "init_from_strict": False, "init_from_also": ()}
    return replace(config, policies={}, algo=build(type(config.algo), algo, f"{where}.algo."), **further)


def check_policies(config: Config) -> None:
    """Raises ConfigError if the policies cannot play this game together, or claim the same decisions."""
    shown, algo = ", ".join(config.policies), config.algo
    if len(config.policies) == 1:
        raise ConfigError(f"policies has only one policy ({shown}); name a second one, or set algo.… without policies")
    if algo.name not in ALGORITHMS or getattr(algo, "use_sde", False):
        raise ConfigError(f"policies need one of {', '.join(ALGORITHMS)}, without algo.use_sde; here algo={algo.name}")
    if getattr(algo, "memory_inputs", ()):
        raise ConfigError("policies read columns of the observation, and algo.memory_inputs appends others; "
                          "remove one")  # fmt: skip
    if getattr(algo, "reuse", 1) > 1:
        raise ConfigError("policies learn from the newest rollout alone; use algo.reuse=1")
    if getattr(algo, "target_tv", None) is not None:
        raise ConfigError("policies with algo.target_tv: it is for one policy; remove it, or use algo.target_kl")
    if config.engine == "stock":
        raise ConfigError("policies with engine=stock: SB3 has no such training; use engine=fast, or +profile=speed")
    if "obs" in config.env.normalize:
        raise ConfigError("policies read columns of the observation, which env.normalize=[obs] changes; remove one")
    if config.env.entry_point == SEAT and not goals_of(config) and not phases_of(config):
        raise ConfigError("policies with env.backend=pettingzoo: set env.kwargs.sharing=true, so that each agent "
                          "has a row and can have a policy")  # fmt: skip
    _check_goals(config)
    claimed, gammas, files = dict[str, str](), set[float](), {f"{stem}.zip" for stem in TAKEN}
    for name, own in config.policies.items():
        gammas.add(own_config(config, name).algo.gamma)
        its = {member_file(stem, name).casefold() for stem in TAKEN}
        if not name.isidentifier() or its & files:
            why = f"its file {min(its & files)} is another one's" if its & files else "use letters"
            raise ConfigError(f"policies: {name!r} cannot name a policy: {why}; use another name")
        files |= its
        if "reward_key" in own and config.env.entry_point == ROWS:
            raise ConfigError(f"policies.{name}.reward_key: a PettingZoo game with a row for every agent has no infos; "
                              "remove it")  # fmt: skip
        for phase in () if goals_of(config) else _phases_of(config, name):
            if claimed.get(phase, name) != name:
                raise ConfigError(f"policies.{name} and policies.{claimed[phase]} both decide in {phase}; let one do "
                                  "so")  # fmt: skip
            claimed[phase] = name
    rewards = {own.get("reward_key") for own in config.policies.values()}
    if max(len(gammas), len(rewards)) > 1 and JOINT in [returns_of(config, name) for name in config.policies]:
        raise ConfigError(
            "policies with different algo.gamma or reward_key have no joint returns; set returns=decisions for each"
        )


def _check_goals(config: Config) -> None:
    """Raises ConfigError if the goals of a policy are set wrongly."""
    for name, own in config.policies.items():
        where, (worker, *others) = f"policies.{name}", [its for other, its in config.policies.items() if other != name]
        given = {"goal_every", "goals"} & {*own}
        if not given:
            continue
        own_config(config, name)  # checks the types of goals and goal_every
        if len(given) == 1 or int(own["goals"]) < 2 or (own["goal_every"] != PHASE and int(own["goal_every"]) < 1):
            raise ConfigError(f"{where}: a policy that sets goals needs goals >= 2, and goal_every >= 1 or {PHASE}")
        if others or {"decides", "goal_every", "goals"} & {*worker} or "decides" in own:
            raise ConfigError(f"{where}.goal_every: this policy sets the goals of one other policy, which decides "
                              "alone; remove any third policy, the key decides, and a second goal_every")  # fmt: skip
        if own["goal_every"] == PHASE and not phases_of(config):
            raise ConfigError(f"{where}.goal_every={PHASE}: this game has no phases; name their columns by env.phases")


def _phases_of(config: Config, name: str) -> list[str]:
    """The phases of one policy. OTHERS stands for each phase that has no column."""
    where, phases, decides = f"policies.{name}", phases_of(config), decides_of(config, name)
    if not decides:
        raise ConfigError(f"{where} needs decides: the phase in which it decides, as in {{decides: bid}}")
    for phase in decides:
        if not phases and phase == OTHERS:
            raise ConfigError(f'{where}.decides={OTHERS}: set env.phases, or name a value of info["policy"] instead')
        if phases and phase not in (*phases, OTHERS):
            hint = did_you_mean(phase, phases) or f"; there are {', '.join((*phases, OTHERS))}"
            raise ConfigError(f"{where}.decides={phase}: this game has no such phase{hint}")
    return [OTHERS if phases and phases.get(phase) is None else phase for phase in decides]
