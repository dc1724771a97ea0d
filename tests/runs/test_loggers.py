from __future__ import annotations

from pathlib import Path

from stable_baselines3.common.logger import configure

from fasttrain.runs.loggers import STEPS, continued_logger, cut_back


def test_rows_are_cut_and_appended_to_and_columns_may_be_added(tmp_path: Path):
    first = configure(str(tmp_path), ["csv"])
    for steps in (100, 200, 300):
        first.record(STEPS, steps)
        first.record("loss", steps / 1000)
        first.dump(steps)
    first.close()
    logger = continued_logger(str(tmp_path), ["csv"])
    cut_back(logger, 200)
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


def test_a_file_that_was_not_there_is_begun(tmp_path: Path):
    logger = continued_logger(str(tmp_path), ["csv", "stdout"])
    cut_back(logger, 0)
    logger.record(STEPS, 1)
    logger.dump(1)
    logger.close()
    assert (tmp_path / "progress.csv").read_text() == f"{STEPS}\n1\n"
