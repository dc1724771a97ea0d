from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fasttrain.runs.logs import read_episodes
from report_toys import write_episodes

HEAD = "episode,env_steps,env,return,length,wall_s,end_reason,is_win\n"


def test_columns(tmp_path: Path):
    file = tmp_path / "episodes.csv"
    write_episodes(file, 400)
    found = read_episodes(file)
    assert (len(found), found.sampled) == (400, False)
    assert found.numbers["return"][[0, -1]].tolist() == [0.01, 4.0]
    assert found.numbers["wall_s"][-1] == 4.0
    assert found.numbers["is_win"].sum() == 200
    assert found.reasons[:3] == ["lost", "won", "lost"]
    assert found.column(("vp_diff",)) is None


def test_a_cut_line_a_broken_row_and_quotes(tmp_path: Path):
    file = tmp_path / "episodes.csv"
    rows = (
        '1,10,0,1.5,10,0.1,"a, ""b""\nc",1\n'
        "2,twenty,0,2.5,10,0.2,won,1\n3,30,0\n4,40,0,,10,0.4,won,\n5,50,0,3.5,10,0.5,,0\n"
    )
    file.write_text(HEAD + rows + "6,60,0,4", encoding="utf-8")
    found = read_episodes(file)
    assert found.numbers["env_steps"].tolist() == [10.0, 50.0], "others lack a number, or may lack digits"
    assert found.reasons == ['a, "b"\nc', "none given"]


@pytest.mark.parametrize(
    "text", ["", "episode\n1\n", HEAD, HEAD + "1,10", "\x00\n\x00\n", HEAD + "1,10,0,1,1,0.1,\x00,1\n"]
)
def test_nothing_to_read_is_no_error(tmp_path: Path, text: str):
    (tmp_path / "episodes.csv").write_text(text, encoding="utf-8")
    assert len(read_episodes(tmp_path / "episodes.csv")) <= 1
    assert len(read_episodes(tmp_path / "missing.csv")) == 0


def test_of_a_large_file_an_even_sample(tmp_path: Path):
    file = tmp_path / "episodes.csv"
    write_episodes(file, 30_000)
    found = read_episodes(file, whole_bytes=0, blocks=4)
    assert found.sampled
    assert 5000 < len(found) < 7000, "of 30,000 with 43 to 50 bytes each: 262 kB"
    steps = found.numbers["env_steps"]
    assert (np.diff(steps) > 0).all(), "no row twice, none cut in two"
    assert found.numbers["return"] == pytest.approx(steps / 10 * 4 / 30_000)
    assert steps[0] == 10
    assert steps[-1] == 300_000
