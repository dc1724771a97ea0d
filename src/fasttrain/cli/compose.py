"""Composes the configuration by Hydra, and turns every error on the way into one message.

Errors of Hydra, OmegaConf and PyYAML rarely name the argument or file that caused them. This module finds out.
"""

from __future__ import annotations

import argparse
import copy
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.utils import get_args_parser
from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.utils import configure_log
from hydra.errors import HydraException, OverrideParseException
from hydra.initialize import initialize_config_dir
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from fasttrain.cli.commands import read_options
from fasttrain.cli.settings import completions
from fasttrain.errors import ConfigError
from fasttrain.saving.files import yaml_values
from fasttrain.spec import plugins
from fasttrain.spec.algorithms import ALGORITHMS
from fasttrain.spec.backends import name_of_env
from fasttrain.spec.config import Config
from fasttrain.spec.games import DEFAULT, game_of, games_by_name
from fasttrain.spec.precedence import (
    File,
    UserInput,
    effective_values,
    key_of,
    read,
    split_options,
    typed_twice_message,
    with_its_file,
)
from fasttrain.spec.reading import from_mapping, key_message
from fasttrain.spec.removed import flat, removal_message
from fasttrain.spec.setting import defaults_of

if TYPE_CHECKING:
    from hydra._internal.config_repository import IConfigRepository
    from hydra._internal.hydra import Hydra
    from hydra.core.default_element import ResultDefault
    from hydra.plugins.config_source import ConfigResult

MOST_YAML = 100_000  # most values in one file
PRESETS = ("profile", "tuned")  # groups whose files set other settings
MAIN = "config"  # the main file


def conf_dir() -> Path:
    """The folder of fasttrain's YAML files. Raises ConfigError: the installation is broken."""
    here = Path(__file__).resolve().parents[1]
    for candidate in (here / "conf", here.parents[1] / "conf"):
        if (candidate / "config.yaml").is_file():
            return candidate
    raise ConfigError(f"no conf/config.yaml beside {here}: reinstall fasttrain")


def _env_name(*, _root_: Mapping[str, Mapping[str, object]]) -> str:
    env = _root_["env"]
    game = game_of(env.get("game"))  # type: ignore[arg-type]
    return name_of_env(game.id or env.get("id"), game.env or env.get("entry_point"), env.get("kwargs"))


def register() -> None:
    """Register the resolvers `${pid:}` and `${env_name:}` and the schemas of all settings with Hydra."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # OmegaConf 2.4 has another name for it, under which 2.3 has another function
        OmegaConf.register_new_resolver("pid", os.getpid, replace=True)
        OmegaConf.register_new_resolver("env_name", _env_name, replace=True)
    if "settings.yaml" in ConfigStore.instance().repo:
        return
    settings = defaults_of(Config)
    networks = settings.pop("algo")
    ConfigStore.instance().store(name="settings", node=settings)
    for spec in ALGORITHMS.values():  # defaults of SB3's classes; null where the setting `tier` decides
        own = {name for values in spec.tiers.values() for name in values}
        usual = {name: None if name in own else usual for name, (_, usual) in spec.keys().items()}
        ConfigStore.instance().store(name=spec.name, node={**networks, "name": spec.name, **usual}, group="algo")


class Files(ConfigRepository):
    """Hydra's repository of files. The errors name the file that cannot be read."""

    def load_config(self, config_path: str) -> ConfigResult | None:
        source = self._find_object_source(config_path, ObjectType.CONFIG)
        file = Path(source.path if source else "", f"{config_path}.yaml")
        try:
            if file.is_file() and b"&" in (text := file.read_bytes()) and yaml_values(text) > MOST_YAML:
                raise ConfigError(f"{file}: its anchors (&) and aliases (*) make more than {MOST_YAML:,} values")
            result = super().load_config(config_path)
        except (HydraException, ConfigError):
            raise
        except Exception as error:  # because a YAML file may cause any exception
            raise ConfigError(f"{file}{_problem(error, file)}") from error
        if result is not None and not isinstance(result.config, DictConfig):
            raise ConfigError(f"{file}: has no keys; write key: value, one per line")
        return result


def _problem(error: Exception, file: Path) -> str:
    if isinstance(error, UnicodeDecodeError):
        before = file.read_bytes().decode("utf-8", "replace").partition("\ufffd")[0]
        return f", line {before.count(chr(10)) + 1}: not in UTF-8; save it in this encoding"
    if isinstance(error, yaml.MarkedYAMLError):
        line = 0 if error.problem_mark is None else error.problem_mark.line + 1
        return f", line {line}: no valid YAML: {error.problem}"
    return f": cannot be read: {(str(error).strip() or type(error).__name__).splitlines()[0]}"


class Loader(ConfigLoaderImpl):
    """Hydra's loader. It records the files that it composes, and the keys that each of them sets."""

    def __init__(self, path: ConfigSearchPath) -> None:
        super().__init__(path)
        self.repository, self.files = Files(path), list[File]()

    def _load_single_config(self, default: ResultDefault, repo: IConfigRepository) -> ConfigResult:
        loaded = super()._load_single_config(default, repo)
        group, _, name = str(default.config_path).partition("/")
        if group in PRESETS and default.package == group:
            raise ConfigError(f"{group} {name}: its file needs the first line `# @package _global_`")
        if loaded.path.startswith("file:"):
            source = f"{group} {name}" if group in PRESETS else f"config {group}" * (default.primary and group != MAIN)
            keys = tuple(flat(OmegaConf.to_container(loaded.config, resolve=False) or {"": None}))
            self.files.append(File(f"{loaded.path.partition('://')[2]}/{default.config_path}.yaml", keys, source))
        return loaded


@contextmanager
def composer(options: argparse.Namespace | None = None, plays: bool = True) -> Iterator[Composer]:
    """Initialize Hydra inside the block. Afterwards restore the configuration of a user's script that uses Hydra.

    `plays`: whether the command plays the composed env; False if it uses the env of a finished run.
    """
    register()
    before, options, own = HydraConfig.instance().cfg, options or read_options(()), conf_dir()
    name = options.config_name or MAIN
    if not any((place / f"{name}.yaml").is_file() for place in (own, Path(options.config_dir or own))):
        raise ConfigError(f"--config-name={name}: no such YAML file in --config-dir")
    try:
        with initialize_config_dir(str(own), "fasttrain", version_base="1.3"):
            if (hydra := GlobalHydra.instance().hydra) is not None:
                yield Composer(hydra, options, name, plays, hydra.config_loader.get_search_path())
    finally:
        HydraConfig.instance().cfg = before


@dataclass
class Composer:
    """Composes configurations from the files of fasttrain and of the user."""

    hydra: Hydra
    options: argparse.Namespace
    name: str  # name of the main file
    plays: bool
    path: ConfigSearchPath
    composed: Sequence[File] = ()  # the files of the last configuration

    @property
    def files(self) -> list[str]:
        """The options that name the user's own files, for another process."""
        options = {"--config-dir": self.options.config_dir, "--config-name": self.options.config_name}
        return [f"{option}={value}" for option, value in options.items() if value is not None]

    def compose(self, overrides: Sequence[str]) -> DictConfig:
        """Compose the configuration and set it in HydraConfig. In a sweep, it has no values of the swept settings."""
        with self.clear_errors(overrides):
            try:
                job = self._load(overrides, RunMode.MULTIRUN if self.options.multirun else RunMode.RUN)
            except Exception:
                swept = None
                with suppress(Exception):
                    swept = self._load(overrides, RunMode.MULTIRUN)
                if swept is None or swept.hydra.mode != RunMode.MULTIRUN:  # hydra.mode=MULTIRUN is not set: no sweep
                    raise
                job = swept
            job.hydra.mode = RunMode.MULTIRUN if self.options.multirun else job.hydra.mode or RunMode.RUN
            place = job.hydra.run if job.hydra.mode == RunMode.RUN else job.hydra.sweep
            with read_write(job.hydra.runtime), open_dict(job.hydra.runtime):
                job.hydra.runtime.output_dir = os.path.abspath(str(place.dir))
            HydraConfig.instance().set_config(job)
            return job

    def _load(self, overrides: Sequence[str], mode: RunMode) -> DictConfig:
        loader = self.hydra.config_loader = Loader(self._search_path(overrides))
        job = loader.load_configuration(self.name, list(overrides), mode)
        self.composed = loader.files
        return job

    def _search_path(self, overrides: Sequence[str]) -> ConfigSearchPath:
        """The folders of YAML files: of fasttrain, the user, engines, and the games that the configuration may name."""
        names = {name for text in overrides if key_of(text) == "env" for name in re.findall(r"[\w.-]+", text)} - {"env"}
        own = [self.options.config_dir] * (self.options.config_dir is not None)
        for text in (text for text in overrides if key_of(text) == "hydra.searchpath"):
            own += re.findall(r"file://([^'\],]+)", text)
        ConfigStore.instance().repo.pop("env", None)  # remove the entries of an earlier call
        if DEFAULT not in plugins.names(plugins.GAMES):  # DEFAULT is not installed: `game_of` raises if it is needed
            placeholder = {"game": DEFAULT} if self.plays else {"id": "CartPole-v1"}
            ConfigStore.instance().store(DEFAULT, placeholder, group="env")
        folders = dict.fromkeys([self.options.config_dir, *(one.conf for one in plugins.parts(*plugins.PARTS))])
        names |= {DEFAULT} if len(names) != 1 else set()  # a sweep over envs is first composed without them
        for name, game in games_by_name(names, bool(own)).items():
            folders[game.conf] = None
            if game.conf is None and not any(Path(folder, "env", f"{name}.yaml").is_file() for folder in own):
                ConfigStore.instance().store(name, {"game": name}, group="env")
        path = copy.deepcopy(self.path)
        for folder in filter(None, folders):
            provider = "command-line" if folder == self.options.config_dir else "package"
            path.prepend(provider, f"file://{os.path.abspath(folder)}", SearchPathQuery(provider="schema"))
        return path

    def configured(self, given: UserInput, job: DictConfig | None = None) -> tuple[Config, dict[str, str]]:
        """The typed configuration, and the source of each value that is not a default. Raises ConfigError."""
        if name := next((text for text in given.overrides if key_of(text) == "algo.name"), None):
            raise ConfigError(f"{name}: choose the algorithm by algo=…")
        job = self.compose(given.overrides) if job is None else job
        with self.clear_errors(given.overrides):
            plain = plain_values(job)
        values, sources = effective_values(plain, self.composed, given)
        try:
            return from_mapping(values), sources
        except ConfigError as error:
            folder = os.path.abspath(self.options.config_dir or os.devnull)
            error.args = (with_its_file(str(error), self.composed, folder, given.sources),)
            raise

    def typed(self, arguments: Sequence[str]) -> Config:
        """The typed configuration for other arguments, such as those of one run of a study."""
        return self.configured(read(split_options(arguments)[1], os.environ))[0]

    def run(self, job: DictConfig, task: Callable[[], int], describe: bool) -> int:
        """Make the job's folder, run `task` and return its exit code. `describe`: write `.hydra` in the folder."""
        if str(job.get("warmup")) == "only":  # warmup=only writes no files
            return task()
        folder, below = Path(job.hydra.run.dir), str(job.hydra.output_subdir or "") if describe else ""
        own = OmegaConf.masked_copy(job, [str(key) for key in job if key != "hydra"])
        parts = {"config": own, "hydra": OmegaConf.masked_copy(job, "hydra"), "overrides": job.hydra.overrides.task}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, part in parts.items() if below else ():
                (folder / below).mkdir(exist_ok=True)
                OmegaConf.save(part, folder / below / f"{name}.yaml")
        except OSError as error:
            raise ConfigError(f"cannot write the output folder: {error}; name one by hydra.run.dir=FOLDER") from error
        configure_log(job.hydra.job_logging, job.hydra.verbose)
        os.environ.update({str(name): str(value) for name, value in job.hydra.job.env_set.items()})
        return task()

    def sweep(self, given: UserInput, task: Callable[[DictConfig], int]) -> None:
        """Run `task` for each job of a sweep, by Hydra's sweeper and launcher."""
        with self.clear_errors(given.overrides):
            self.hydra.multirun(self.name, task, [*given.overrides, "hydra.mode=MULTIRUN"])

    def print(self, given: UserInput) -> None:
        """Print what an option such as `--cfg` asks Hydra for."""
        options = self.options
        where: dict[str, Any] = {"config_name": self.name, "overrides": given.overrides}
        with self.clear_errors(given.overrides):
            self.hydra.config_loader = Loader(self._search_path(given.overrides))
            if options.hydra_help:
                self.hydra.hydra_help(args_parser=get_args_parser(), args=options, config_name=self.name)
            elif options.cfg:
                self.hydra.show_cfg(cfg_type=options.cfg, package=options.package, resolve=options.resolve, **where)
            elif options.info:
                self.hydra.show_info(options.info, **where)
            else:
                self._complete(where)

    def _complete(self, where: dict[str, Any]) -> None:
        """If COMP_LINE is set, print completions of the line in it; else print the completion script for a shell."""
        if asked := "COMP_LINE" in os.environ:
            words, os.environ["COMP_LINE"] = completions(os.environ["COMP_LINE"])
            print("\n".join(words))
        with suppress(*[Exception] * asked):  # while completing, print no error about an unfinished line
            self.hydra.shell_completion(**where)

    @contextmanager
    def clear_errors(self, overrides: Sequence[str]) -> Iterator[None]:
        """Turn any exception in the block into a ConfigError with a clear message."""
        try:
            yield
        except Exception as error:
            raise self.clear_error(error, overrides) from error

    def clear_error(self, error: Exception, overrides: Sequence[str]) -> ConfigError:
        """A ConfigError that names the argument or file that caused an exception of Hydra, OmegaConf or PyYAML."""
        if own := next((one for one in (error, error.__cause__) if isinstance(one, ConfigError)), None):
            return own
        if message := _known(error, overrides):
            return ConfigError(message)
        text = (str(error).strip() or type(error).__name__).split("\n")[0]
        text = text.removeprefix("ConfigError raised while resolving interpolation: ")
        if isinstance(error, OSError) and not isinstance(error, HydraException):
            return ConfigError(f"cannot write the output folder: {text}; name one by hydra.run.dir=FOLDER")
        keys = "|".join(re.escape(key) for override in overrides if (key := key_of(override)))
        is_named = keys and re.search(rf"(?<![\w.])(?:{keys})(?![\w.])", text)
        return ConfigError(text if is_named else ": ".join([*self._culprit(overrides), text]))

    def _culprit(self, overrides: Sequence[str]) -> list[str]:
        """A list with the first override without which composing succeeds; empty if there is none."""
        for index, override in enumerate(["", *overrides]):
            with suppress(Exception):
                plain_values(self._load([*overrides[: max(0, index - 1)], *overrides[index:]], RunMode.MULTIRUN))
                return [override] * (index > 0)
        return []


def plain_values(job: DictConfig) -> dict[str, Any]:
    """The composed values without Hydra's own. References are resolved. Raises ConfigError: a YAML file has a key that
    is no text."""
    for key in job:
        if isinstance(key, (int, float)):
            raise ConfigError(f"unknown key '{key!s}': in a YAML file, keys of settings are texts")
    own = OmegaConf.masked_copy(job, [str(key) for key in job if key != "hydra"])
    return cast("dict[str, Any]", OmegaConf.to_container(own, resolve=True))


def configured(arguments: Sequence[str]) -> Config:
    options, typed = split_options(arguments)
    with composer(read_options(options)) as hydra:
        return hydra.configured(read(typed, {}))[0]


MESSAGES = {  # pattern in an error's text → the message, with the pattern's groups
    r"(?:value for argument|Sweep parameters) '(.+?)'(?: requires|$)": "{}: several values need a sweep: add -m",
    r"append to config. An item is already at '([^']+)'": "+{}: this key exists already: remove the +, or write ++",
    r"In (.+): Override '(.+?) : (.+?)' is defined before":
        "{}: in its defaults, `override {}: {}` must stand below all without override",
    r"In '(.+?)': Could not load '(.+?)'": "{}.yaml: its defaults name {}, and there is no such file",
    r"Environment variable '(.+?)' not found.*\n +full_key: (\S+)":
        "{1}: the environment variable {0} is not set; ${{oc.env:{0},VALUE}} has a default",
}  # fmt: skip


def _known(error: Exception, overrides: Sequence[str]) -> str:
    """The message for an error whose text is known; empty for other errors."""
    text = str(error)
    if isinstance(error, OverrideParseException):
        return _unreadable(str(error.override))
    if twice := re.search(r"Multiple values for (\w+)\.", text):
        return typed_twice_message(twice[1], overrides)
    if "Interpolation key 'env.name' not found" in text:
        return f"${{env.name}}: {removal_message('env.name')}; ${{env_name:}} is the name of the env"
    if "Interpolation key 'algo.name' not found" in text:
        algo = next((one for one in overrides if key_of(one) == "algo"), "algo")
        return f"{algo}: its YAML file has no key `name`; set it to one of {', '.join(ALGORITHMS)}"
    if merged := re.search(r"Error merging override (\S+=.*)", text):
        is_mapping = "=[" in merged[1] and not merged[1].startswith("hydra.")
        return f"{merged[1]}: {'expected a mapping' if is_mapping else 'this value does not fit there'}"
    if key := re.search(r"Could not override '([^']+)'", text):
        below = re.search(rf"full_key: ({re.escape(key[1])}\.\S+)", str(error.__cause__))  # below the typed key
        algos = [name for text in overrides if key_of(text) == "algo" for name in text.partition("=")[2].split(",")]
        return key_message((below or key)[1], (*algos, "maskable_ppo", "dqn"))  # the first that lacks the key is named
    for pattern, message in MESSAGES.items():
        if matched := re.search(pattern, text, re.M):
            return message.format(*matched.groups())
    if option := re.search(r"Could not find '(hydra/[^/']+|[^/']+)/([^']*)'", text):
        group, name = option[1], option[2]
        games = plugins.names(plugins.GAMES) if group == "env" else ()
        choices = sorted({*re.findall(r"^\t(\S+)$", text, flags=re.MULTILINE), *games})
        if not name:
            return f"{group}= is empty; choose from {', '.join(choices)}"
        if message := plugins.missing_text(f"{group}={name}") or plugins.missing_text(group):
            return message
        if group == "hydra/launcher":
            package = f"hydra-{name.partition('_')[0]}-launcher"
            return f"{group}={name}: no such launcher; pip install {package} adds its plugin"
        hint = plugins.hint(name, choices) + plugins.broken_text()
        if group == "env" and re.search(r"-v\d+$", name):
            hint = f"; did you mean env.id={name}?"
        return f"{group}={name}: no such {group}, choose from {', '.join(choices)}{hint}"
    return ""


def _unreadable(override: str) -> str:
    key, equals, _ = override.partition("=")
    if not equals:
        return f"cannot read '{override}': write key=value"
    if not re.fullmatch(r"[\w.$/@:+~-]+", key, re.ASCII) or "~" in key[1:]:
        return f"cannot read the key '{key.lstrip('+')}': use letters a to z, digits, _ and -"
    return f"cannot read '{override}': put the text in quotes, \"{key.lstrip('+')}='…'\""
