"""What several test files share."""

from __future__ import annotations

import copy
import csv
import functools
import gc
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

# Before torch is loaded, here and in all that tests start. Its threads wait by spinning, which costs four fifths of a
# small training's processor time where two processes share two cores; asleep they compute the same.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Else each of the hundreds of processes that the tests start would compile fasttrain anew, half a second.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import hypothesis
import pytest
import torch
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

import composed_once
from fasttrain import cli
from fasttrain.cli import main
from fasttrain.cli.compose import Composer, composer, plain_values
from fasttrain.runs import calibration, view
from fasttrain.spec import plugins
from fasttrain.spec.config import Config
from fasttrain.spec.games import DEFAULT
from fasttrain.spec.precedence import key_of, read, variables
from fasttrain.spec.reading import from_mapping
from fasttrain.vec import stock
from fasttrain_vec import crew, process

# No test measures time: the first example of a test may wait for a compiler, and all of them for a busy core.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


def pytest_configure(config: pytest.Config) -> None:
    """Only tests marked `cuda` see a GPU, so that all others compute the same on every machine.

    No collection looks at what is loaded until tests begin, then or later: it would cost a tenth of the suite.
    `&` in a script lets the suite ignore Ctrl-C, nohup a closed terminal, and with it all that the tests start."""
    if config.option.markexpr != "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    gc.disable()
    if DEFAULT not in plugins.names(plugins.GAMES):
        raise pytest.UsageError(
            "fasttrain is installed without the entry points of pyproject.toml: pip install -e . once more, or "
            "python3 scripts/test.py, which does so"
        )
    for number, usual in (
        (signal.SIGINT, signal.default_int_handler),
        (getattr(signal, "SIGHUP", None), signal.SIG_DFL),
    ):
        if number is not None and signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _no_flags_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flag exported in the tester's shell must not decide a test, nor whether its kernels were compiled before, nor
    what is faster on the tester's machine."""
    for name in variables(os.environ).values():
        monkeypatch.delenv(name)
    monkeypatch.setenv("FASTTRAIN_ENGINE_SWITCH_AT", "0")
    monkeypatch.setattr(calibration, "PAYS_FROM_S", float("inf"))


@pytest.fixture(autouse=True, scope="session")
def _composed_once_a_command() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        composed_once.patch(patched)
        yield


ALL_THREADS = torch.get_num_threads()
STARTED = process.START_METHOD


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Torch's, in the tests' own process: networks are small here, and a second thread costs more than it computes."""
    torch.set_num_threads(1)


@pytest.fixture
def all_threads() -> Iterator[None]:
    """As many as torch has when nobody asks it for less, for tests of what becomes of them."""
    torch.set_num_threads(ALL_THREADS)
    yield
    torch.set_num_threads(1)


@pytest.fixture
def busy_threads() -> Iterator[None]:
    """Python changes threads every 10 µs, not every 5 ms: within each operation, not once in a thousand."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.fixture
def forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of this process are forked from one that has loaded what they need: a third of a second less for each.

    For tests of what becomes of workers once they are there. Starting one anew, as users do, is the business of
    tests/vec/test_worker_start.py, and of every training in a process of its own. Stock's
    own workers and what evaluates beside a training are started as ever.
    """
    assert stock.START_METHOD == STARTED, "it is read when it is imported"
    if sys.platform != "win32":
        for module in (crew, process):
            monkeypatch.setattr(module, "START_METHOD", "forkserver")
        multiprocessing.set_forkserver_preload(["fasttrain_vec.worker", "toys", "worker_toys"])


def composed(*arguments: str) -> dict[str, Any]:
    """The plain mapping that the command line `arguments` composes to, the caller's own."""
    return copy.deepcopy(_composed(arguments))


@functools.cache
def _composed(arguments: tuple[str, ...]) -> dict[str, Any]:
    with composer() as hydra:
        OmegaConf.register_new_resolver("pid", lambda: 0, replace=True)
        return plain_values(_values_set(hydra, tuple(read(arguments, {}).overrides)))


GROUPS = ("algo", "env", "profile", "tuned", "hydra")
CHOSEN: dict[tuple[str, ...], DictConfig] = {}


def _values_set(hydra: Composer, overrides: tuple[str, ...]) -> DictConfig:
    """What Hydra composes of these: the files chosen once a session, for it is a tenth of a second, then the values."""
    chosen = tuple(text for text in overrides if key_of(text) in GROUPS or not text.partition("=")[1])
    values = [text for text in overrides if text not in chosen]
    try:
        if chosen not in CHOSEN:
            CHOSEN[chosen] = hydra.compose(chosen)
        config = copy.deepcopy(CHOSEN[chosen])
        ConfigLoaderImpl._apply_overrides_to_config(OverridesParser.create().parse_overrides(values), config)
    except HydraException:  # said better by all of Hydra
        return hydra.compose(overrides)
    return config


def configured(*arguments: str) -> Config:
    """The typed configuration of the command line `arguments`."""
    return from_mapping(composed(*arguments))


class Finished(NamedTuple):
    """What a command left behind."""

    exit_code: int
    out: str
    err: str
    folder: Path

    def ok(self) -> Finished:
        """Itself, of a command that ended well."""
        assert self.exit_code == 0, self.err
        return self

    def refused(self, *told: str) -> None:
        """It was wrong input, and one line says so; what the checkup found stands below it."""
        lines = [line for line in self.err.splitlines() if line[:2] != "  "]
        assert (self.exit_code, [line[:18] for line in lines]) == (2, ["fasttrain: error: "]), self.err
        assert all(text in self.err for text in told), self.err

    def json(self, name: str) -> Any:
        return json.loads((self.folder / name).read_text(encoding="utf-8"))

    def episodes(self) -> list[tuple[float, int]]:
        """Return and length of each episode."""
        return [(float(row["return"]), int(row["length"])) for row in self.table("episodes.csv")]

    def table(self, name: str) -> list[dict[str, str]]:
        return list(csv.DictReader((self.folder / name).read_text(encoding="utf-8").splitlines()))


RunCommand = Callable[..., Finished]


@pytest.fixture(scope="session")
def nursery() -> Iterator[Any]:
    """Starts trainings by forking, for all of tests/faults: loading all of fasttrain once costs seconds."""
    from injector import Nursery

    with Nursery() as made:
        yield made


@pytest.fixture
def forked_stock_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock's workers are forked: they need not load torch, two seconds for each."""
    if sys.platform != "win32":
        monkeypatch.setattr(stock, "START_METHOD", "fork")


@pytest.fixture
def fasttrain(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, forked_workers: None
) -> RunCommand:
    """Runs the command line in this process, in an empty working directory; `folder` is where the run wrote."""
    monkeypatch.chdir(tmp_path)
    draw = cli.draw_report
    is_run = ("summary.json", "plan.json")  # up to a second a run; tests/report/test_index.py draws one
    skip = lambda folder: "" if any((folder / name).exists() for name in is_run) else draw(folder)  # noqa: E731
    monkeypatch.setattr(cli, "draw_report", skip)
    monkeypatch.setattr(view, "SILENT_S", 3600.0)  # else a slow machine says more than a fast one
    numbers = itertools.count()

    def run(*arguments: str) -> Finished:
        folder = tmp_path / f"run{next(numbers)}"
        where = [f"hydra.run.dir={folder}", f"hydra.sweep.dir={folder}"]
        threads = torch.get_num_threads()
        try:
            exit_code = main([*arguments, *where])
        finally:
            torch.set_num_threads(threads)
            torch.use_deterministic_algorithms(False)
        out, err = capfd.readouterr()
        return Finished(exit_code, out, err, folder)

    return run


@pytest.fixture(scope="session")
def _trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[RunCommand, tuple[str, ...]], Finished]:
    done: dict[tuple[str, ...], Finished] = {}

    def once(fasttrain: RunCommand, arguments: tuple[str, ...]) -> Finished:
        if arguments not in done:
            first = fasttrain(*arguments)
            assert first.exit_code == 0, first.err
            kept = tmp_path_factory.mktemp("trained") / first.folder.name
            done[arguments] = first._replace(folder=Path(shutil.move(first.folder, kept)))
        return done[arguments]

    return once


@pytest.fixture
def trained(
    fasttrain: RunCommand, tmp_path: Path, _trained: Callable[[RunCommand, tuple[str, ...]], Finished]
) -> RunCommand:
    """As `fasttrain`, of a training that ends well; the same arguments train once, and each gets a copy of the run."""
    numbers = itertools.count()

    def copied(*arguments: str) -> Finished:
        done = _trained(fasttrain, arguments)
        return done._replace(folder=Path(shutil.copytree(done.folder, tmp_path / f"trained{next(numbers)}")))

    return copied
