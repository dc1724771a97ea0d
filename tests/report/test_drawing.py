from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fasttrain.report.charts import (
    DARK,
    LIGHT,
    XY,
    Area,
    Axis,
    Chart,
    Heat,
    Level,
    Line,
    Part,
    Points,
    Row,
    Rows,
    Split,
    style,
    to_png,
    to_svg,
)
from fasttrain.report.drawing import draw
from report_toys import HOSTILE

X = np.array([0.0, 50_000.0, 100_000.0])
CHARTS: list[Chart] = [
    XY(name="xy", title="t", x=Axis("env steps", "steps"), y=Axis("win rate", "share"), from_zero=True,
       lines=(Line(name=HOSTILE, x=X, y=X / 1e5, low=X / 2e5, high=X / 1e5, stepped=True),
              Line(name="_b", x=X, y=X / 2e5)),
       points=(Points(name="p", x=X, y=X / 1e5, low=X / 2e5, high=X / 1e5, labels=(HOSTILE, "", "c")),),
       levels=(Level(0.5, HOSTILE),)),
    Area(name="area", title="t", x=Axis("training time", "seconds"), y=Axis("share", "share"), at=X, stepped=True,
         parts=(Part(name=HOSTILE, values=np.full(3, 0.25)), Part(name="b", values=np.full(3, 0.75), color=1))),
    Rows(name="rows", title="t", value=Axis("time", "seconds"), levels=(Level(0, "equal"), Level(-3, HOSTILE)),
         rows=(Row(name=HOSTILE, value=1.0, low=0.5, high=1.5, text=HOSTILE), Row(name="b", dots=(1.0, 2.0)))),
    Split(name="split", title="t", names=(HOSTILE, "b"), parts=(Part(name=HOSTILE, values=np.array([0.25, 1.0])),)),
    Heat(name="heat", title="t", x_label=HOSTILE, y_label="k", x_values=("1", "2"), y_values=(HOSTILE,),
         values=np.array([[1.0, np.nan]]), texts=(("1.0", HOSTILE),)),
]  # fmt: skip


@pytest.mark.parametrize("chart", CHARTS, ids=lambda chart: chart.name)
def test_text_from_anywhere_stays_text_and_colours_follow_the_page(chart: Chart, tmp_path: Path):
    with style():
        figure = draw(chart)
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


def test_the_curve_is_where_the_numbers_say():
    line = Line(name="", x=np.array([0.0, 10.0]), y=np.array([0.0, 100.0]))
    with style():
        figure = draw(XY(name="a", title="t", x=Axis("x"), y=Axis("y"), lines=(line,)))
        to_svg(figure, "a")
    drawn = figure.axes[0].lines[0]
    assert drawn.get_xydata().tolist() == [[0.0, 0.0], [10.0, 100.0]]
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert [text for text in ("0", "50", "100") if text in labels] == ["0", "50", "100"]


@pytest.mark.parametrize(("end", "label"), [(100.0, "t (s)"), (1000.0, "t (min)"), (50_000.0, "t (h)")])
def test_the_unit_of_time_fits_the_run(end: float, label: str):
    line = Line(name="", x=np.array([0.0, end]), y=np.array([0.0, 1.0]))
    with style():
        axes = draw(XY(name="a", title="t", x=Axis("t", "seconds"), y=Axis("y"), lines=(line,))).axes[0]
    assert axes.get_xlabel() == label


def test_shares_are_stacked_to_the_top():
    with style():
        axes = draw(CHARTS[1]).axes[0]
    tops = [float(shape.get_paths()[0].vertices[:, 1].max()) for shape in axes.collections]
    assert tops == [0.25, 1.0]


def test_nothing_of_a_users_settings_gets_in_or_stays_changed():
    import matplotlib

    with matplotlib.rc_context({"text.usetex": True, "font.size": 40}):
        with style():
            assert draw(CHARTS[0]).axes[0].xaxis.label.get_size() == 9.5
        assert matplotlib.rcParams["font.size"] == 40


def test_both_themes_name_the_same_colours():
    assert list(LIGHT) == list(DARK)
    assert len(set(LIGHT.values())) == len(LIGHT), "each is found again by its value"
