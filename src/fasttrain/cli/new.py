"""`fasttrain new my_project` creates a working project: an env, a callback, settings, tests and a Dockerfile."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from string import Template

from fasttrain.cli.compose import conf_dir
from fasttrain.errors import EXIT_DONE, ConfigError
from fasttrain.spec import plugins
from fasttrain.terminal import as_typed, command

PLACES = {  # template → file in the project's folder
    "game.py": "game.py",
    "callbacks.py": "callbacks.py",
    "test_game.py": "test_game.py",
    "env.yaml": "conf/env/{name}.yaml",
    "profile.yaml": "conf/profile/mine.yaml",
    "README.md": "README.md",
    "Dockerfile": "Dockerfile",
    "gitignore": ".gitignore",
}

NO_TEXT = ("null", "true", "false", "nan", "inf")  # Hydra reads `env=null` as no name


def main(arguments: Sequence[str]) -> int:
    """Write the project and print what to type next. ConfigError: no folder named, an invalid name, a used folder."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise ConfigError(f"new needs the folder to create, as in {command()} new my_project")
    folder = Path(arguments[0])
    name = folder.name
    if not re.fullmatch(r"[A-Za-z_]\w*", name):
        raise ConfigError(f"new {folder}: a project cannot be called {name!r}; use letters, digits and underscores")
    if name.lower() in NO_TEXT or name in plugins.names(plugins.GAMES) or (conf_dir() / f"env/{name}.yaml").exists():
        raise ConfigError(f"new {folder}: env={name} has a meaning already; use another name")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"new {folder}: it exists and is not empty; use another folder")
    for source, place in PLACES.items():
        text = files("fasttrain.cli").joinpath(f"project/{source}.tmpl").read_text(encoding="utf-8")
        file = folder / place.format(name=name)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(Template(text).safe_substitute(name=name, image=name.lower()), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"new {folder}: cannot be written ({error}); use another folder") from error
    lines = [f"{folder} was created: game.py is the env, README.md lists commands. Next:", f"  cd {folder}",
             f"  fasttrain --config-dir conf +profile=speed env={name}"]  # fmt: skip
    sys.stdout.write(as_typed("\n".join(lines)) + "\n")
    return EXIT_DONE
