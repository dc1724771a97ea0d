from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from stable_baselines3.common.logger import KVWriter, configure

from conftest import configured
from fasttrain.errors import ConfigError
from fasttrain.perf.clock import PhaseClock
from fasttrain.runs.loggers import STEPS, GuardedWriter, UsersCallbacks, cut_logs, make_logger


def test_rows_are_cut_and_appended_to_and_columns_may_be_added(tmp_path: Path):
    first = configure(str(tmp_path), ["csv"])
    for steps in (100, 200, 300):
        first.record(STEPS, steps)
        first.record("loss", steps / 1000)
        first.dump(steps)
    first.close()
    logger = make_logger(configured("loggers=[csv]"), tmp_path, continued=True)
    cut_logs(logger, 200)
    logger.record(STEPS, 400)
    logger.record("loss", 0.5)
    logger.dump(400)
    logger.record(STEPS, 500)
    logger.record("more", 1.0)
    logger.dump(500)
    logger.close()
    lines = (tmp_path / "progress.csv").read_text().splitlines()
    assert sorted(lines[0].split(",")[:2]) == ["loss", STEPS]
    assert lines[0].endswith(",more")
    steps = [line.split(",")[lines[0].split(",").index(STEPS)] for line in lines[1:]]
    assert steps == ["100", "200", "400", "500"]
    assert {path.name for path in tmp_path.iterdir()} == {"progress.csv"}


def test_a_list_or_flags_choose_the_loggers_and_wrong_ones_are_told(tmp_path: Path):
    typed = ("train_log_to_file=true", "train_log_to_console=false")
    found = []
    for flags in (typed, ("train_log_enabled=false",), (*typed, "loggers=[]")):
        logger = make_logger(configured(*flags), tmp_path, continued=False)
        found.append([type(writer).__name__ for writer in logger.output_formats])
        logger.close()
    assert found == [["CSVOutputFormat"], [], []]
    entry = '{callback: "stable_baselines3.common.callbacks:EvalCallback", eval_env: CartPole-v1}'
    config = configured("env.id=CartPole-v1", "algo=ppo", f"callbacks=[{entry}]")
    with pytest.raises(ConfigError, match=r"EvalCallback could not be made.*; without eval_env it gets the run's own"):
        UsersCallbacks(config, PhaseClock(), lambda: pytest.fail("none is wanted"))


@pytest.mark.parametrize("method", ["write", "close"])
def test_a_writer_of_the_users_that_raises_is_left_out(method: str):
    class Broken(KVWriter):
        calls = 0

        def write(self, *arguments: Any, **further: Any) -> None:
            Broken.calls += 1
            if method == "write":
                raise OSError("no room")

        def close(self) -> None:
            raise KeyError("file")

    said: list[str] = []
    watched = GuardedWriter(Broken(), said.append)
    for _ in range(2):
        watched.write({}, {}, 0)
    watched.close()
    assert Broken.calls == (1 if method == "write" else 2)
    (line,) = said
    assert line.startswith(f"warning: logger Broken.{method} failed: ")
    assert "test_loggers.py:" in line
    assert watched.failed in line, "which ends the run with exit code 1"
