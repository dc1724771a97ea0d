"""From overrides to the typed configuration through Hydra, and whatever goes wrong there as one sentence.

Hydra, OmegaConf and PyYAML say what they cannot do, seldom which argument or which file it was for: that is found here.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, NoReturn

from fasttrain.errors import ConfigError
from fasttrain.runs.folders import flat
from fasttrain.spec import plugins
from fasttrain.spec.algorithms import ALGORITHMS, AlgorithmSpec
from fasttrain.spec.backends import engines, lacking, name_of_env
from fasttrain.spec.config import Config
from fasttrain.spec.games import DEFAULT, attached, game_of
from fasttrain.spec.precedence import config_dir_options, given_twice, key_of, normalise, split_options
from fasttrain.spec.reading import all_keys, foreign_key, from_mapping
from fasttrain.spec.removed import former_key, instead_of
from fasttrain.spec.setting import defaults_of, did_you_mean

MOST_YAML = 100_000  # values in a file of the user's


def conf_dir() -> Path:
    """The folder of YAML files: inside the wheel, or at the top of the checkout (an editable install).

    Raises:
        ConfigError: neither exists; the installation is broken.
    """
    here = Path(__file__).resolve().parents[1]
    for candidate in (here / "conf", here.parents[1] / "conf"):
        if (candidate / "config.yaml").is_file():
            return candidate
    raise ConfigError(f"no conf/config.yaml beside {here}: reinstall fasttrain")


def register() -> None:
    """Tell Hydra its `${pid:}` and `${env_name:}`, what can be set, and of each algorithm the keys below `algo.`."""
    from omegaconf import OmegaConf

    def env_name(*, _root_: Mapping[str, Mapping[str, object]]) -> str:
        env = _root_["env"]
        game = game_of(env.get("game"))  # type: ignore[arg-type]
        return name_of_env(game.id or env.get("id"), game.env or env.get("entry_point"), env.get("kwargs"))

    OmegaConf.register_new_resolver("pid", os.getpid, replace=True)
    OmegaConf.register_new_resolver("env_name", env_name, replace=True)
    _store()
    _search()


@functools.cache  # Hydra's store lasts as long as the process; filling it costs 20 ms, and a command composes twice
def _store() -> None:
    from hydra.core.config_store import ConfigStore

    settings = defaults_of(Config)
    networks = settings.pop("algo")
    ConfigStore.instance().store(name="settings", node=settings)
    for spec in ALGORITHMS.values():
        ConfigStore.instance().store(name=spec.name, node=_algo_node(spec, networks), group="algo")


@functools.cache
def _search() -> None:
    """Let Hydra find the files of other packages too, after ours."""
    from hydra.core.config_search_path import ConfigSearchPath
    from hydra.core.plugins import Plugins
    from hydra.plugins.search_path_plugin import SearchPathPlugin

    class Beside(SearchPathPlugin):
        def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
            for one in (each for each in engines() if each.conf is not None):
                search_path.append(one.name, f"file://{one.conf}")

    Plugins.instance().register(Beside)


def _algo_node(spec: AlgorithmSpec, networks: dict[str, Any]) -> dict[str, Any]:
    """What an algorithm's YAML file would say: the stock class's own values; null where it differs by tier."""
    own = {name for values in spec.tiers.values() for name in values}
    return {
        **networks,
        "name": spec.name,
        **{name: None if name in own else usual for name, (_, usual) in spec.keys().items()},
    }


class _Options(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        typed = re.search(r"unrecognized arguments: --?([\w.-]+)", message)
        if typed and (key := typed[1].replace("-", "_")) in all_keys():
            plus = "+" * (key in ("profile", "tuned"))
            raise ConfigError(f"--{typed[1]}: settings are typed without dashes, {plus}{key}=VALUE")
        raise ConfigError(f"{message}; fasttrain --help lists what there is")


def check_options(arguments: Sequence[str]) -> None:
    """Hydra's own options, before its parser prints its usage and ends the process.

    Raises:
        ConfigError: one is unknown, lacks its value, or names a folder that is not there.
    """
    from hydra._internal.utils import get_args_parser

    from fasttrain.saving.files import yaml_values

    parser = get_args_parser()
    parser.__class__ = _Options
    parser.prog = "fasttrain"
    found = parser.parse_args(list(arguments))
    if found.config_dir is not None and not os.path.isdir(found.config_dir):
        raise ConfigError(f"--config-dir={found.config_dir}: no such folder")
    places = [conf_dir(), Path(found.config_dir or conf_dir())]
    for path in sorted([*places[1].glob("*.yaml"), *places[1].glob("*/*.yaml")] if found.config_dir else ()):
        with suppress(OSError):
            if b"&" in (text := path.read_bytes()) and yaml_values(text) > MOST_YAML:
                raise ConfigError(f"{path}: its anchors (&) and aliases (*) come to more than {MOST_YAML:,} values")
    if found.config_name and not any((place / f"{found.config_name}.yaml").is_file() for place in places):
        raise ConfigError(f"--config-name={found.config_name}: no such YAML file in --config-dir")
    for option in ("config_path", "experimental_rerun"):
        if getattr(found, option) is not None:
            raise ConfigError(f"--{option.replace('_', '-')} means nothing here; your own files: --config-dir DIR")


def with_games(overrides: Sequence[str], options: Sequence[str] = ()) -> list[str]:
    """The overrides, and where the files of the games are that they choose, or that the user's own may build upon.

    Raises:
        ConfigError: the game is not installed, or its package cannot be imported.
    """
    from hydra.core.config_store import ConfigStore

    names = {name for text in overrides if key_of(text) == "env" for name in re.findall(r"[\w.-]+", text)} - {"env"}
    paths = [text.partition("=")[2].strip("[]") for text in overrides if key_of(text) == "hydra.searchpath"]
    own = re.findall(r"file://([^']+)", "".join([*paths, *search_path([*options, *overrides])]))
    for name, game in attached(names or {DEFAULT}, bool(own)).items():
        if game.conf is None and not any(Path(folder, "env", f"{name}.yaml").is_file() for folder in own):
            ConfigStore.instance().store(name, {"game": name}, group="env")
        elif game.conf not in (None, *(each.conf for each in engines())):
            paths.append(f"'file://{game.conf}'")
    asked = [f"hydra.searchpath=[{','.join(dict.fromkeys(paths))}]"] * bool(paths)
    return [text for text in overrides if key_of(text) != "hydra.searchpath"] + asked


def composed_before(overrides: Sequence[str], whole: bool = True) -> Any:
    """What Hydra will make of these overrides before it runs; `whole`: its own part included.

    Raises:
        ConfigError: nothing.
    """
    from hydra import compose, initialize_config_dir

    register()
    try:
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            return compose("config", overrides=with_games(overrides), return_hydra_config=whole)
    except Exception as error:
        raise clear_error(error, overrides) from error


def configured(arguments: Sequence[str]) -> Config:
    """The typed configuration of a command line, outside of any command.

    Raises:
        ConfigError: it gives none.
    """
    overrides = normalise(arguments, {})
    return typed_config(composed_before(overrides, whole=False), overrides)


def compose_typed(arguments: Sequence[str]) -> Config:
    """The typed configuration of other arguments, with the same search path: what a cell of a study will see.

    Raises:
        ConfigError: they give none.
    """
    from hydra import compose

    wanted = normalise(split_options(arguments)[1], os.environ)
    try:
        composed = compose("config", overrides=with_games(wanted, arguments))
    except Exception as error:
        raise clear_error(error, [*config_dir_options(arguments), *wanted]) from error
    return typed_config(composed, wanted)


def typed_config(composed: object, overrides: Sequence[str]) -> Config:
    """The typed configuration of what Hydra composed of these overrides.

    Raises:
        ConfigError: a reference in it leads nowhere, or the values are none.
    """
    from omegaconf import OmegaConf

    if named := next((text for text in overrides if key_of(text) == "algo.name"), None):
        raise ConfigError(f"{named}: choose the algorithm by algo=…")
    try:
        plain = OmegaConf.to_container(composed, resolve=True)
    except Exception as error:
        raise clear_error(error, overrides) from error
    former = former_key(plain)  # type: ignore[arg-type]
    if former and former not in map(key_of, overrides) and (file := _broken_file(overrides, former)):
        raise ConfigError(file)
    return from_mapping(plain, {key_of(text) for text in overrides})  # type: ignore[arg-type]


PRESETS = ("profile", "tuned")  # groups whose files set what else has a default


def keys_of_files(job: Any) -> dict[str, list[str]]:
    """By `profile NAME` and `tuned NAME` the dotted keys that it sets, read from wherever Hydra found it."""
    found: dict[str, list[str]] = {}
    for group in PRESETS:
        typed = [text.partition("=")[2] for text in job.overrides.task if key_of(text) == group]  # several: in brackets
        names = [name.strip() for text in typed for name in text.strip("[]").split(",")]
        names = names or [name for name in [job.runtime.choices.get(group)] if name]
        for name in names:
            found |= _keys_of(group, name, job.runtime.config_sources)
    return found


def _keys_of(group: str, name: str, sources: Sequence[Any]) -> dict[str, list[str]]:
    """Of a file and, before it, of those that it builds upon."""
    from omegaconf import OmegaConf

    for source in sources:
        path = Path(source.path) / group / f"{name}.yaml"
        if source.schema == "file" and path.is_file():
            found: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
            below = [_place_of(one, group) for one in found.pop("defaults", []) if one != "_self_"]
            first = {of: keys for at in below if at[0] in PRESETS for of, keys in _keys_of(*at, sources).items()}
            return {**first, f"{group} {name}": list(flat(found) if found else ())}
    return {f"{group} {name}": []}


def _place_of(entry: object, group: str) -> tuple[str, str]:
    """Group and name of an entry in a file's list of defaults: `speed`, `/profile/speed`, `{/profile: speed}`."""
    option, name = next(iter(entry.items())) if isinstance(entry, dict) else ("", str(entry))
    words = f"{option.split(' ')[-1]}/{name.split(' ')[-1]}".partition("@")[0].strip("/").split("/")
    absolute = option.split(" ")[-1].startswith("/") or (not option and name.startswith("/"))
    return "/".join([*([] if absolute else [group]), *words[:-1]]), words[-1]


# --- errors


def clear_error(error: Exception, overrides: Sequence[str]) -> ConfigError:
    """What Hydra, OmegaConf or PyYAML raised while composing, as one sentence with the argument or the file in it."""
    if isinstance(error, ConfigError):
        return error
    if told := _known(error, overrides) or _broken_file(overrides):
        return ConfigError(told)
    text = (str(error).strip() or type(error).__name__).split("\n")[0]
    if isinstance(error, OSError):
        return ConfigError(f"cannot write the output folder: {text}")
    keys = "|".join(re.escape(key) for override in overrides if (key := key_of(override)))
    if keys and re.search(rf"(?<![\w.])(?:{keys})(?![\w.])", text):
        return ConfigError(text)
    return ConfigError(": ".join([*_culprit(overrides), text]))


def _known(error: Exception, overrides: Sequence[str]) -> str:
    """Where the text says enough; empty for others."""
    from hydra.errors import OverrideParseException

    text = str(error)
    if isinstance(error, OverrideParseException):
        return _unreadable(str(error.override))
    if twice := re.search(r"Multiple values for (\w+)\.", text):
        return given_twice(twice[1], overrides)
    if "Interpolation key 'env.name' not found" in text:
        return f"${{env.name}}: {instead_of('env.name')}; ${{env_name:}} is the name of the env"
    if "Interpolation key 'algo.name' not found" in text:
        chosen = next((one for one in overrides if key_of(one) == "algo"), "algo")
        return f"{chosen}: its file names no algorithm; write name: ppo in it, or one of {', '.join(ALGORITHMS)}"
    if of_group := re.search(r"Error merging override (\S+=\[.*)", text):
        return f"{of_group[1]}: expected a mapping"
    if key := re.search(r"Could not override '([^']+)'", text):
        below = re.search(rf"full_key: ({re.escape(key[1])}\.\S+)", str(error.__cause__))  # of a mapping that was typed
        return _unknown_key((below or key)[1], overrides)
    if several := re.search(r"(?:Ambiguous value for argument|Sweep parameters) '(.+?)'(?: requires|$)", text, re.M):
        return f"{several[1]}: several values need a sweep: add -m"
    if option := re.search(r"Could not find '([^']+)/([^'/]*)'", text):
        group, name = option[1], option[2]
        games = plugins.names(plugins.GAMES) if group == "env" else ()
        choices = sorted({*re.findall(r"^\t(\S+)$", text, flags=re.MULTILINE), *games})
        if not name:
            return f"{group}= is empty; choose from {', '.join(choices)}"
        if told := lacking(f"{group}={name}") or lacking(group):
            return told
        return f"{group}={name}: no such {group}, choose from {', '.join(choices)}{did_you_mean(name, choices)}"
    return ""


def _unreadable(override: str) -> str:
    key, equals, _ = override.partition("=")
    if not equals:
        return f"cannot read '{override}': write key=value"
    if not re.fullmatch(r"[\w.$/@:+~-]+", key, re.ASCII) or "~" in key[1:]:
        return f"cannot read the key '{key.lstrip('+')}': it has letters a to z, digits, _ and -"
    return f"cannot read '{override}': put the text in quotes, \"{key.lstrip('+')}='…'\""


def _unknown_key(key: str, overrides: Sequence[str]) -> str:
    """What to say of a key that the composed configuration lacks: misspelt, or another algorithm's."""
    chosen = [name for text in overrides if key_of(text) == "algo" for name in text.partition("=")[2].split(",")]
    for algo in (*chosen, "maskable_ppo", "dqn"):  # the one chosen; maskable_ppo is the default
        if why := foreign_key(key, algo):
            return why
    if why := instead_of(key) or lacking(key.partition(".")[0]):
        return why
    return f"unknown key '{key}'{did_you_mean(key, all_keys())}"


def _broken_file(overrides: Sequence[str], former: str = "") -> str:
    """The first of the user's own files that cannot be read, or has that key, those first that an argument names."""
    given = search_path(overrides) or [text for text in overrides if key_of(text) == "hydra.searchpath"]
    folder = re.search(r"file://([^']+)", "".join(given))
    if folder is None:
        return ""
    values = {text.partition("=")[2] for text in overrides}
    for path in sorted(Path(folder[1]).rglob("*.yaml"), key=lambda path: (path.stem not in values, path)):
        if problem := _problem_of(path, former):
            return f"{path}{problem}"
    return ""


def _problem_of(path: Path, former: str) -> str:
    """`, line 3: …` of a file that holds no mapping, or has a key `former`; empty of another."""
    import yaml
    from omegaconf import DictConfig, OmegaConf

    try:
        content = path.read_bytes()
        content.decode("utf-8")
        if isinstance(values := OmegaConf.load(path), DictConfig):
            has = former and former in (*flat(own := OmegaConf.to_container(values)), *flat({path.parent.name: own}))
            return f": {instead_of(former)}" if has else ""
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        return f", line {line}: no text in UTF-8; save it as such"
    except yaml.MarkedYAMLError as error:
        line = 0 if error.problem_mark is None else error.problem_mark.line + 1
        return f", line {line}: no YAML: {error.problem}"
    except Exception as error:  # whatever a YAML can be built to raise
        return f": cannot be read: {(str(error).strip() or type(error).__name__).splitlines()[0]}"
    return ": holds no keys; write key: value, one a line"


def _culprit(overrides: Sequence[str]) -> list[str]:
    """The override without which the others compose; none where there is no such."""
    kept = unswept(split_options(overrides)[1])
    kept += search_path(overrides)
    if _composes(kept):
        return []
    others = ([*kept[:index], *kept[index + 1 :]] for index in range(len(kept)))
    return [override for override, rest in zip(kept, others, strict=True) if _composes(rest)][:1]


def _composes(overrides: Sequence[str]) -> bool:
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import OmegaConf

    inside = GlobalHydra.instance().is_initialized()
    try:
        with nullcontext() if inside else initialize_config_dir(str(conf_dir()), version_base="1.3"):
            OmegaConf.to_container(compose("config", overrides=with_games(overrides)), resolve=True)
    except Exception:  # of any kind: it is asked whether there is one
        return False
    return True


def unswept(overrides: Sequence[str]) -> list[str]:
    """Without what is swept over, which cannot be composed; what cannot be read is left to Hydra to say."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser, kept = OverridesParser.create(), []
    for text in overrides:
        try:
            swept = parser.parse_override(text).is_sweep_override()
        except HydraException:
            swept = False
        kept += [] if swept else [text]
    return kept


def search_path(arguments: Sequence[str]) -> list[str]:
    """What `--config-dir` is for a composition of one's own."""
    folder = [text.partition("=")[2] or text for text in config_dir_options(arguments)][-1:]
    return [f"hydra.searchpath=['file://{Path(folder[0]).absolute()}']"] if folder else []
