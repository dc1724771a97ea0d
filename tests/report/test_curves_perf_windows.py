from __future__ import annotations

import numpy as np
import pytest

from fasttrain.report.curves import MOST_WINDOWS, perf_cells, windows_of
from report_toys import perf


def test_windows():
    found = windows_of(perf(4))
    assert found is not None
    assert found.in_seconds
    assert found.ends == pytest.approx([0.8, 1.6, 2.4, 3.2])
    assert found.steps_per_s == pytest.approx([1250.0] * 4)
    assert found.phases["train"] == pytest.approx([0.4] * 4), "seconds: 400 ms per 1,000 of 1,000 steps"
    shares = found.shares()
    assert list(shares) == ["env_step", "train", "rest"]
    assert [float(share[0]) for share in shares.values()] == pytest.approx([0.25, 0.5, 0.25])
    assert found.cpu == pytest.approx([0.5, 0.6, 0.7, 0.8])
    assert np.isnan(found.gpu).all()


def test_many_windows_become_fewer_with_the_same_sums():
    found = windows_of(perf(1000))
    assert found is not None
    assert len(found) == MOST_WINDOWS
    assert found.ends[-1] == pytest.approx(800.0)
    assert found.phases["env_step"].sum() == pytest.approx(200.0)
    assert found.steps_per_s == pytest.approx([1250.0] * MOST_WINDOWS)


def test_without_windows_the_lines_of_perf():
    line = (
        "[PERF] steps/s {} action_ms 0.500 env_step_ms 1.000 (enemy_turn_ms 0.149) train_ms 2.500 other_ms 0.000 "
        "update_ratio 0.004 cpu 91% gpu - mem 536MB"
    )
    found = windows_of({"lines": [line.format(1000), line.format(2000)], "total": {}})
    assert found is not None
    assert not found.in_seconds
    assert found.steps_per_s.tolist() == [1000.0, 2000.0]
    assert found.shares()["train"].tolist() == pytest.approx([0.625] * 2)
    assert found.cpu.tolist() == [0.91, 0.91]
    assert found.memory_bytes.tolist() == [536 * 2**20] * 2


@pytest.mark.parametrize(
    "content", [{}, {"windows": 3}, {"windows": [1, {"env_steps": "x"}], "lines": ["no"]}, perf(1), {"lines": [None]}]
)
def test_too_little_for_a_curve(content: dict[str, object]):
    assert windows_of(content) is None


def test_rows_of_the_table_sum_to_the_wall_time():
    total = perf()["total"] | {"enemy_turn_ms": 50.0, "transport_ms": 20.0, "beside": {"update_ms": 30.0}}
    rows = perf_cells(total)
    names = ["env_step_ms", "of it enemy_turn_ms", "of it transport_ms", "train_ms", "other_ms"]
    assert [row[0] for row in rows] == [*names, "total", "beside it update_ms"]
    assert rows[0][1:] == (200.0, 0.25, 5000.0)
    assert rows[5][1:] == (800.0, 1.0, 1250.0)
