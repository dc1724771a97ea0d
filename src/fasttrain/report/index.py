"""`fasttrain report run=FOLDER`: report.html of a run, a sweep or a study: one file that opens offline.

What a page says comes from `*_page.py`; this module finds out which folder it has before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from fasttrain.errors import ConfigError
from fasttrain.report.compare_page import compare_page
from fasttrain.report.page import Page, write_page
from fasttrain.report.run_page import FILES, run_page
from fasttrain.report.study_page import STUDY, SWEEP, study_page, sweep_page
from fasttrain.runs.view import activity, make_console, say
from fasttrain.saving.files import read_json
from fasttrain.spec.config import Config


def main(config: Config, sources: Mapping[str, str], folder: Path, overrides: Sequence[str]) -> int:
    """Write the report of `run=FOLDER` and say where it is.

    Raises:
        ConfigError: no folder named, none with files of ours, or one that cannot be written to.
    """
    if config.run is None:
        raise ConfigError("report needs run=FOLDER, the folder of a run, a sweep or a study (outputs/DATE/TIME_…)")
    ignored = sorted(key for key, source in sources.items() if source == "command line" and key != "run")
    if ignored:
        raise ConfigError(f"report takes run=… only: {', '.join(ignored)} would do nothing")
    console = make_console()
    try:
        with activity(console, "drawing report.html"):
            file = write_report(Path(config.run))
    except OSError as error:
        raise ConfigError(f"run={config.run}: cannot write the report there ({error})") from error
    say(console, f"report: {file}")
    return 0


def write_report(folder: Path) -> Path:
    """report.html for what lies in `folder`, its pictures in `folder`/report; returns the page.

    Raises:
        ConfigError: nothing of ours lies there.
        OSError: it cannot be written.
    """
    return write_page(page_of(folder), folder)


def page_of(folder: Path) -> Page:
    """The page for a study, a sweep or a run, found out by its files.

    Raises:
        ConfigError: it is none of them.
    """
    if not folder.is_dir():
        raise ConfigError(f"run={folder}: no such folder; name that of a run, a sweep or a study")
    if (folder / STUDY).is_file():
        command = read_json(folder / STUDY).get("command")
        return compare_page(folder) if command == "compare" else study_page(folder)
    if (folder / SWEEP).is_file():
        return sweep_page(folder)
    if any((folder / name).is_file() for name in FILES):
        return run_page(folder)
    raise ConfigError(
        f"run={folder}: no summary.json, sweep.json or study.json there; name the folder of a run, a sweep or a study"
    )
