from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from PIL import Image

from fasttrain_report import page
from fasttrain_report.charts import GAP, LIGHT, XY, Chart, Heat, Row, Rows, Series, Split
from fasttrain_report.page import style, to_png, to_svg
from fasttrain_report.words import Metric, percent, seconds
from report_toys import HOSTILE

X = np.array([0.0, 50_000.0, 100_000.0])
CHARTS: list[Chart] = [
    XY(name="xy", title="t", x=Metric("env steps"), y=Metric("win rate", percent), from_zero=True,
       lines=(Series(name=HOSTILE, x=X, y=X / 1e5, low=X / 2e5, high=X / 1e5),
              Series(name="_b", x=X, y=X / 2e5, stepped=True)),
       points=(Series(name="p", x=X, y=X / 1e5, low=X / 2e5, high=X / 1e5, labels=(HOSTILE, "", "c")),),
       levels={HOSTILE: 0.5}),
    XY(name="area", title="t", x=Metric("training time", seconds), y=Metric("share", percent), stacked=True,
       lines=(Series(name=HOSTILE, x=X, y=np.full(3, 0.25), stepped=True),
              Series(name="b", x=X, y=np.full(3, 0.75), color=1, stepped=True))),
    Rows(name="rows", title="t", value=Metric("time", seconds), levels={"equal": 0, HOSTILE: -3},
         rows=(Row(name=HOSTILE, value=1.0, bounds=(0.5, 1.5), text=HOSTILE), Row(name="b", dots=(1.0, 2.0)))),
    Split(name="split", title="t", value=Metric("share", percent), names=(HOSTILE, "b"),
          parts={HOSTILE: (0, np.array([0.25, 1.0]))}),
    Heat(name="heat", title="t", x_label=HOSTILE, y_label="k", x_values=("1", "2"), y_values=(HOSTILE,),
         values=np.array([[1.0, np.nan]]), metric=Metric("m")),
]  # fmt: skip


@pytest.mark.parametrize("chart", CHARTS, ids=lambda chart: chart.name)
def test_text_from_anywhere_stays_text_and_colours_follow_the_page(chart: Chart, tmp_path: Path):
    with style():
        figure = chart.draw()
        svg = to_svg(figure, chart.name)
        to_png(figure, tmp_path / "a.png", chart.title)
    tree = ET.fromstring(svg)
    assert "<script" not in svg
    assert any("<script>" in "".join(node.itertext()) for node in tree.iter("text"))
    assert "http" not in svg
    assert not re.findall("#[0-9a-f]{6}", svg), "every colour is a variable"
    assert set(re.findall(r"var\(--(\w+)\)", svg)) <= {*LIGHT, "font"}
    ids = [node.get("id") for node in tree.iter() if node.get("id")]
    assert ids
    assert all(name.startswith(f"{chart.name}-") for name in ids if name)
    assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', svg)) <= set(ids), "nothing refers to what is not there"
    image = Image.open(tmp_path / "a.png")
    assert image.size[0] == 864
    assert image.getpixel((2, 2))[:3] == (255, 255, 255)


def test_the_curve_is_where_the_numbers_say_and_shares_are_stacked_to_the_top():
    line = Series(x=np.array([0.0, 10.0]), y=np.array([0.0, 100.0]))
    with style():
        figure = XY(name="a", title="t", x=Metric("x"), y=Metric("y"), lines=(line,)).draw()
        to_svg(figure, "a")
    drawn = figure.axes[0].lines[0]
    assert drawn.get_xydata().tolist() == [[0.0, 0.0], [10.0, 100.0]]
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert [text for text in ("0", "50", "100") if text in labels] == ["0", "50", "100"]
    with style():
        axes = CHARTS[1].draw().axes[0]
    tops = [float(shape.get_paths()[0].vertices[:, 1].max()) for shape in axes.collections]
    assert tops == [0.25, 1.0]


@pytest.mark.parametrize(("end", "label"), [(100.0, "t (s)"), (1000.0, "t (min)"), (50_000.0, "t (h)")])
def test_the_unit_of_time_fits_the_run(end: float, label: str):
    line = Series(x=np.array([0.0, end]), y=np.array([0.0, 1.0]))
    with style():
        axes = XY(name="a", title="t", x=Metric("t", seconds), y=Metric("y"), lines=(line,)).draw().axes[0]
    assert axes.get_xlabel() == label


def names_of(points: Series) -> list[tuple[float, float, float, float]]:
    """Left, bottom, right and top of each point's name on the paper, and of the axes."""
    with style():
        figure = XY(name="a", title="t", x=Metric("x"), y=Metric("y"), points=(points,)).draw()
        boxes = [figure.axes[0].bbox, *(text.get_window_extent() for text in figure.axes[0].texts)]
    return [(box.x0, box.y0, box.x1, box.y1) for box in boxes]


def test_names_stand_beside_each_other_and_keep_off_intervals():
    x, y = np.array([1.0, 1.1, 1.05, 4.9]), np.array([1.0, 1.02, 1.1, 1.9])
    frame, *names = names_of(Series(x=x, y=y, labels=("64 · 2", "128 · 2", "256 · 4", "512 · 8")))
    assert len(names) == 4
    for n, one in enumerate(names):
        for other in names[n + 1 :]:
            apart = one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
            assert apart, (one, other)
    assert names[3][2] <= frame[2], "inside the frame"
    x, y = np.array([1.0, 1.02, 2.0]), np.array([1.0, 1.0, 1.0])
    points = Series(x=x, y=y, low=np.array([1.0, 0.0, 1.0]), high=np.array([1.0, 2.0, 1.0]), labels=("name", "", ""))
    frame, name, *_ = names_of(points)
    assert name[2] < frame[0] + (0.12 + GAP / 432) * (frame[2] - frame[0]), "left of the first point"


def test_both_themes_name_the_same_colours_and_no_setting_of_a_user_gets_in():
    template = (Path(page.__file__).parent / "templates" / "report.html.j2").read_text(encoding="utf-8")
    dark = template.split("(prefers-color-scheme: dark)")[1].split("}")[0]
    assert set(re.findall(r"--(\w+):", dark)) == {*LIGHT, "page", "good", "bad", "open"}
    assert len(set(LIGHT.values())) == len(LIGHT), "each is found again by its value"
    with matplotlib.rc_context({"text.usetex": True, "font.size": 40}):
        with style():
            assert CHARTS[0].draw().axes[0].xaxis.label.get_size() == 9.5
        assert matplotlib.rcParams["font.size"] == 40
