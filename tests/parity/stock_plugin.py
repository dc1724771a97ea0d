"""A pytest plugin for test_stock_suites.py: our classes in place of stock's, and a file of what came of each test.

Loaded before any test module, so that `from stable_baselines3 import PPO` there finds ours. The environment says which
classes (`STOCK_SUITES_CLASSES`: ours or stock) and where to write (`STOCK_SUITES_FOUND`).
"""

from __future__ import annotations

import inspect
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import sb3_contrib
import stable_baselines3
from stable_baselines3.common.base_class import BaseAlgorithm

import fasttrain

STOCK = {"PPO": stable_baselines3.PPO, "DQN": stable_baselines3.DQN, "MaskablePPO": sb3_contrib.MaskablePPO}
NAMED = re.compile(rf"\b({'|'.join(STOCK)})\b")


def put_ours_in_place() -> None:
    """Under every name by which a module of stock's packages has one of the classes."""
    ours = {stock: getattr(fasttrain, name) for name, stock in STOCK.items()}
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").partition(".")[0] in ("stable_baselines3", "sb3_contrib"):
            for name, value in list(vars(module).items()):
                if inspect.isclass(value) and value in ours:
                    setattr(module, name, ours[value])


def concerns(item: Any) -> bool:
    """Whether a test is of one of the classes: a parameter says so, or, without a class among them, its text."""
    given = getattr(item, "callspec", None)
    classes = [one for one in (given.params.values() if given else ()) if inspect.isclass(one)]
    algorithms = [one.__name__ for one in classes if issubclass(one, BaseAlgorithm)]
    if algorithms:
        return bool(set(algorithms) & STOCK.keys())
    return bool(NAMED.search(inspect.getsource(item.function)))


class Notes:
    """What came of each test, and which files could not be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tests: dict[str, dict[str, Any]] = {}
        self.unread: dict[str, str] = {}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = [item for item in items if concerns(item)]

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.unread[report.nodeid] = last_line(report.longrepr)

    def pytest_runtest_logreport(self, report: Any) -> None:
        noted = self.tests.setdefault(report.nodeid, {"outcome": "passed"})
        if report.outcome != "passed" and noted["outcome"] != "failed":
            noted |= {"outcome": report.outcome, "why": last_line(report.longrepr)}

    def pytest_sessionfinish(self) -> None:
        self.path.write_text(json.dumps({"tests": self.tests, "unread": self.unread}), encoding="utf-8")


def last_line(representation: Any) -> str:
    """The error in one line: of a test that is pytest's summary of the crash, else the last `E` line."""
    crash = getattr(representation, "reprcrash", None)
    text = crash.message if crash is not None else str(representation)
    errors = [line[1:].strip() for line in text.splitlines() if line.startswith("E  ")]
    return (errors[-1] if errors else text.splitlines()[0] if text else "")[:300]


def pytest_configure(config: pytest.Config) -> None:
    if os.environ["STOCK_SUITES_CLASSES"] == "ours":
        put_ours_in_place()
    config.pluginmanager.register(Notes(Path(os.environ["STOCK_SUITES_FOUND"])))
