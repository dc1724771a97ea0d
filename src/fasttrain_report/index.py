"""`fasttrain report run=FOLDER`: report.html about a run, a sweep, a study or several runs. The file opens offline.

The `*_page.py` modules make the contents of the pages. This module chooses the page by the files in a folder.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fasttrain.errors import ConfigError
from fasttrain.runs.folders import contents_of
from fasttrain.runs.view import activity, make_console, say
from fasttrain.saving.files import read_json
from fasttrain.spec.config import Config
from fasttrain_report.page import FILE, Page, write_page
from fasttrain_report.run_page import run_page

NO_FILES = "no summary.json, sweep.json or study.json there"
NAME_ONE = "name the folder of a run, a sweep or a study"
NOTHING_TO_SHOW = {"multirun.yaml", "model.zip"}  # marks of a folder of which there is no page yet


def main(config: Config, sources: Mapping[str, str], folder: Path, overrides: Sequence[str]) -> int:
    """Write the report of `run=FOLDER`, or of several folders, and print where it is. Raises ConfigError if a folder
    has no files of fasttrain or cannot be written to.
    """
    typed = {key for key, source in sources.items() if source == "command line"}
    if ignored := sorted(typed - {"run", "output"}):
        raise ConfigError(f"report takes run=… and output=… only: {', '.join(ignored)} would do nothing")
    console, folders = make_console(), named_folders(str(config.run))
    try:
        with activity(console, "drawing report.html"):
            many = len(folders) > 1 or (_kind(folders[0]) is None and folders[0].is_dir())
            if config.output is not None and not many:
                what = "is for the page over several runs; the page of one run lies in its folder"
                raise ConfigError(f"output={config.output} {what}")
            file = _over_all(folders, config.output) if many else write_report(folders[0])
    except OSError as error:
        raise ConfigError(f"run={config.run}: cannot write the report there ({error})") from error
    say(console, f"report: {file}")
    return 0


def named_folders(text: str) -> list[Path]:
    """The folders A and B of `run=A,B`. A folder with a comma in its name is recognized if it exists."""
    found, name = [], ""
    for part in text.split(","):
        name = f"{name},{part}" if name else part
        if Path(name).exists():
            found.append(Path(name))
            name = ""
    return [*found, *([Path(name)] if name else [])]


def _over_all(folders: Sequence[Path], output: str | None) -> Path:
    """Write one page about the runs in or below these folders. Raises ConfigError if a folder is missing, there is no
    run, or the page cannot be written.
    """
    from fasttrain_report.runs_page import runs_page
    from fasttrain_report.watch import Watch

    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"run={folder}: no such folder; name the folders of runs: run=A,B")
    runs = list(dict.fromkeys(run for folder in folders for run in Watch([folder]).folders()))
    if not runs:
        raise ConfigError(f"run={','.join(map(str, folders))}: {NO_FILES} or below; {NAME_ONE}")
    above = folders[0] if len(folders) == 1 else Path(os.path.commonpath([folder.absolute() for folder in folders]))
    file = above / FILE if output is None else Path(output)
    if output is None and _kind(above) is not None:
        raise ConfigError(f"run=…: {above} contains all these runs and has its own report; use output=FILE.html")
    if file.suffix != ".html" or not file.parent.is_dir():
        raise ConfigError(f"output={file}: name a file that ends in .html, in an existing folder")
    return write_page(runs_page(runs, file.parent), file.parent, file.name)


def write_report(folder: Path) -> Path:
    """Write report.html into `folder` and its pictures into `folder`/report; returns the page's path. Raises
    ConfigError if the folder has no files of fasttrain, OSError if it cannot be written to.
    """
    return write_page(page_of(folder), folder)


def page_of(folder: Path) -> Page:
    """The page of the study, sweep or run in `folder`. Raises ConfigError if there is none."""
    if not folder.is_dir():
        raise ConfigError(f"run={folder}: no such folder; {NAME_ONE}")
    kind = _kind(folder)
    if kind is None:
        raise ConfigError(f"run={folder}: {NO_FILES}; {NAME_ONE}")
    return kind(folder)


def _kind(folder: Path) -> Callable[[Path], Page] | None:
    """The function that makes the page of a folder; None if it has no files of fasttrain."""
    found = contents_of(folder, {path.name for path in folder.glob("*")} - NOTHING_TO_SHOW)
    kind = None if found is None else found.kind
    if kind == "study":
        from fasttrain_report import compare_page, study_page

        compares = read_json(folder / "study.json").get("command") == "compare"
        return compare_page.compare_page if compares else study_page.study_page
    if kind == "sweep":
        from fasttrain_report.study_page import sweep_page

        return sweep_page
    return run_page if kind == "run" else None
