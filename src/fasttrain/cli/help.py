"""The pages of `--help` and `fasttrain help COMMAND | PROFILE | TOPIC`.

Settings come from their declarations, all other texts from the pages in docs/, which are also in the wheel.
"""

from __future__ import annotations

import re
from dataclasses import Field
from functools import cache
from pathlib import Path
from textwrap import indent
from typing import Any, NamedTuple

from fasttrain import __version__
from fasttrain.cli.commands import COMMANDS, OF_A_RUN, OTHER_WORDS, OWNERS, PLAIN, is_of_others
from fasttrain.cli.compose import conf_dir, configured
from fasttrain.cli.settings import lines, rows
from fasttrain.errors import ConfigError
from fasttrain.spec.algorithms import ALGORITHMS, own_values
from fasttrain.spec.checks import FLAGS
from fasttrain.spec.config import Config
from fasttrain.spec.games import DEFAULT
from fasttrain.spec.setting import declared, did_you_mean, settings_of
from fasttrain.terminal import value_text

HELP = """fasttrain {version}: Stable-Baselines3 training several times faster, and where the time went.

usage: fasttrain [COMMAND] [+profile=NAME] [key=value …]      without a command: train
       fasttrain help [COMMAND | PROFILE | TOPIC]

  fasttrain +profile=speed                                   the default game with MaskablePPO
  fasttrain +profile=speed env.id=CartPole-v1 algo=ppo       any registered Gymnasium environment
  fasttrain +profile=balance env.id=CartPole-v1 algo=dqn num_envs=16 updates_per_step=8
  fasttrain +profile=speed env.entry_point=my_game.envs:MyGame env.kwargs.size=5
  fasttrain -m +profile=speed num_envs=64,128,256 algo.n_epochs=2,4      a sweep, a process for each cell
  FASTTRAIN_NUM_ENVS=16 fasttrain +profile=speed             a flag from the environment

{commands}

profiles   baseline (stock SB3)  exact (same numbers, faster)  balance  speed  debug
algo=      {algorithms}
env=       a game that a package offers ({game}, the default), or env.id=…, env.entry_point=module:Class

flags (variable in the environment: FASTTRAIN_ and the name in capitals; command line > environment > profile > default)
{flags}

topics     {topics}
more       --cfg job      print the configuration without running     --info searchpath   where it comes from
           --version      --config-dir DIR   your own profiles        FASTTRAIN_TRACEBACK=1   tracebacks for errors
           --trust   eval, play, export: load a model as SB3 does, running the code pickled in it
exit code  0 done  1 crash  2 bad input  3 gate failed  4 stopped by a signal with everything saved
           130 stopped before there was anything to save"""

USAGE_END = "\n\nfasttrain --help lists profiles, algorithms, flags and topics; fasttrain help train: all settings"
# Command on a finished run → settings of a training that it reads. `resume` also reads what a resume may change.
OF_RUNS = {
    "eval": ("opponent", "eval.", "env.kwargs"),
    "play": ("opponent",),
    "resume": ("eval.", "stop.", "checkpoint.", "video.", "cluster.address", "cluster.actors"),
}


def help_on(arguments: list[str]) -> str:
    """The page of the first word: a command, a profile or a topic. Without a word, the page of all commands.

    Raises ConfigError: there is no page for the word.
    """
    words = [word for word in arguments if word not in ("-h", "--help", "help")][:1]
    if words and re.fullmatch(r"\w[\w-]*", words[0]):
        word = words[0].lower()
        return _page_of(word if word in COMMANDS else word.replace("-", "_"))
    commands = "\n".join(f"  {usage:<30} {does}" for usage, does, _ in _commands())
    if not {"-h", "--help", "help"} & {*arguments}:
        return HELP.partition("\n\nprofiles")[0].format(version=__version__, commands=commands) + USAGE_END
    flags = "\n".join(f"  {flag.name:<22} {flag.class_text:<10} {flag.text}" for flag in FLAGS)
    topics = " ".join(topic for topic in _topics() if topic not in COMMANDS)
    facts = {"version": __version__, "commands": commands, "flags": flags, "topics": topics}
    return HELP.format(**facts, algorithms="  ".join(ALGORITHMS), game=DEFAULT)


def _page_of(word: str) -> str:
    if word in COMMANDS or word in OTHER_WORDS:
        return _of_command(word)
    if is_of_others(word):
        return f"{word} is a command of another package: fasttrain {word} --help"
    if word in profiles():
        return f"What {word} changes against stock SB3 (the profile baseline):\n\n{table(word)}"
    topics, word = _topics(), "algorithms" if word in ALGORITHMS else word
    near = [word] if word in topics else [name for name, page in topics.items() if word.rstrip("s") in _words(page)]
    if len(near) == 1:
        return about(topics[near[0]])
    if near:
        return "\n".join(f"fasttrain help {topic:<18} {title(topics[topic])}" for topic in near)
    hint = did_you_mean(word, (*COMMANDS, *OTHER_WORDS, *profiles(), *topics))
    raise ConfigError(f"help {word}: no command, profile or topic{hint}; fasttrain --help lists them")


def _topics() -> dict[str, Path]:
    """The pages of the documentation by their names."""
    return {page.stem: page for page in sorted((conf_dir().parent / "docs").glob("[!p]*/*.md"))}  # skip project/


def title(page: Path) -> str:
    """The title of a page in Markdown."""
    return page.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")


def _words(page: Path) -> set[str]:
    """The words of a page's name and title, each in the singular."""
    return {word.rstrip("s") for word in re.findall(r"[a-z0-9]+", f"{page.stem} {title(page)}".lower())}


def about(page: Path) -> str:
    """The title, first paragraph, first command and sections of a page, and where the page is."""
    text = page.read_text(encoding="utf-8")
    commands = _typed(page)[:1]
    sections = " · ".join(re.findall(r"^## (.+)", text, re.MULTILINE))
    parts = [
        title(page),
        opening(text),
        *(f"  {command}" for command in commands),
        sections and f"Sections: {sections}",
    ]
    return "\n\n".join(filter(None, [*parts, f"The whole page: {page}"]))


def _typed(page: Path) -> list[str]:
    """The shell commands in the code blocks of a page."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return re.findall(r"^fasttrain .+", "".join(blocks), re.MULTILINE)


def opening(text: str) -> str:
    """The first paragraph of a page in Markdown, without links; empty if the page has none."""
    plain = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    paragraph = re.search(r"^(?=[`\w])(?:.+\n)+", plain, re.MULTILINE)
    return re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", paragraph[0].strip()) if paragraph else ""


def _commands() -> list[tuple[str, str, str]]:
    """From docs/reference/commands.md: each command with its arguments, what it does, and the page about it."""
    text = _topics()["commands"].read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(.+?)` \| (.+) \| (?:\[.*\]\(.*?(\w+)\.md|below)", text, re.MULTILINE)
    return [(usage, does.replace("`", ""), page) for usage, does, page in rows]


def _of_command(word: str) -> str:
    """The page of a command: its row in docs/reference/commands.md, examples from its guide, and its settings."""
    topics = _topics()
    usage, does, name = next(row for row in _commands() if re.split("[ =]", row[0])[0] == word)
    page = topics[name or "commands"]
    begins = " ".join(OTHER_WORDS.get(word, [word])) if word != "train" else "+"
    examples = [line for line in _typed(page) if line.startswith(f"fasttrain {begins}")]
    command = OTHER_WORDS.get(word, [word])[0]
    parts = [f"fasttrain {usage}: {does}", "\n".join(f"  {line}" for line in examples)]
    fields = dict(settings_of(Config, parts=True))
    told = [lines(row) for row in rows() if _reads(command, row.key, fields.get(row.key))]
    parts.append(indent("\n".join(told), "  ") if word != "warmup" else "")
    trains = command not in (*OF_A_RUN, *PLAIN) and word != "train"
    parts.append("The settings of a training: fasttrain help train" if trains else "")
    return "\n\n".join(filter(None, [*parts, f"More: {page}"]))


def _reads(command: str, key: str, one: Field[Any] | None) -> bool:
    """Whether the command itself reads the setting. Some commands only pass a setting on to a training."""
    owner = OWNERS.get(key) or OWNERS.get(key.split(".")[0] + ".")
    if owner is not None:
        return command in owner.commands
    changes = command == "resume" and one is not None and declared(one).may_change
    return command == "train" or changes or key.startswith(OF_RUNS.get(command, "\n"))


STOCK = "baseline"  # the profile with the classes and values of stock SB3
NOTHING = "–"
ALGOS = ("ppo", "maskable_ppo", "recurrent_ppo", "dqn", "sac")  # the columns of the tables


class Value(NamedTuple):
    """The value of a setting as the user types it, and its class (exact, rounding or trade-off)."""

    text: str
    flag_class: str


def profiles() -> list[str]:
    """The names of the shipped profiles."""
    return sorted(file.stem for file in (conf_dir() / "profile").glob("*.yaml"))


def table(profile: str) -> str:
    """The settings that `profile` changes, as a table in Markdown whose columns are aligned for terminals.

    An entry is `64 → 256`, the value alone if it does not change, and – if the algorithm has no such setting.
    """
    stock, chosen = ([_values(name, algo) for algo in ALGOS] for name in (STOCK, profile))
    rows: list[tuple[str, ...]] = [("setting", "class", *ALGOS)]
    for key in stock[0]:
        values = [(old[key], new[key]) for old, new in zip(stock, chosen, strict=True)]
        changed = [new for old, new in values if old.text != new.text]
        if changed:
            cells = [old.text if old.text == new.text else f"{old.text} → {new.text}" for old, new in values]
            rows.append((key, changed[0].flag_class, *cells))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, tuple("-" * width for width in widths))
    return "\n".join("| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in rows)


@cache
def _values(profile: str, algo: str) -> dict[str, Value]:
    """Setting → its value with this profile and algorithm. Keys below `algo.` come last."""
    spec = ALGORITHMS[algo]
    env = "Pendulum-v1" if spec.actions == ("Box",) else "CartPole-v1"
    config = configured([f"+profile={profile}", f"algo={algo}", f"env.id={env}"])
    found = {}
    for key, one in settings_of(Config):
        it = declared(one)
        if key.startswith("algo.") or it.hidden:
            continue
        value: Any = config if key != "batch_size" else own_values({}, spec, config.tier)
        for name in key.split("."):
            value = getattr(value, name)
        means = it.fits(spec) and key not in spec.lacks
        found[key] = Value(value_text(value) if means else NOTHING, it.class_of(value) if it.flag_class else "")
    own = {
        f"algo.{name}": getattr(config.algo, name, NOTHING) for name in ("learning_rate", "n_epochs", "rollout_size")
    }
    return found | {key: Value(value_text(value), "trade-off") for key, value in own.items()}
