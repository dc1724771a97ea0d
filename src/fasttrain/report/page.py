"""A page as plain data, and how it becomes report.html with pictures beside it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fasttrain import __version__
from fasttrain.report.charts import DARK, LIGHT, Chart, css_variables, style, to_png, to_svg
from fasttrain.report.words import clean

FILE, PICTURES = "report.html", "report"
Tone = Literal["", "good", "bad", "open", "dim"]


@dataclass(frozen=True, slots=True)
class Tile:
    """One number worth seeing first."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Cell:
    """A table's field; `share` 0..1 draws a bar behind it, `link` is relative to the page."""

    text: str
    note: str = ""
    tone: Tone = ""
    share: float | None = None
    link: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """`names` that begin with `>` are columns of numbers, set to the right."""

    names: Sequence[str]
    rows: Sequence[Sequence[Cell | str]]
    title: str = ""
    note: str = ""
    folded: bool = False
    optional: Sequence[str] = ()  # columns that are left out where no row has a text

    @property
    def columns(self) -> list[tuple[str, bool]]:
        """Name and whether it holds numbers."""
        return [(self.names[place].removeprefix(">"), self.names[place].startswith(">")) for place in self._shown]

    @property
    def cells(self) -> list[list[Cell]]:
        """Rows of fields, in the order of `columns`."""
        rows = [[cell if isinstance(cell, Cell) else Cell(cell) for cell in row] for row in self.rows]
        return [[row[place] for place in self._shown] for row in rows]

    @property
    def _shown(self) -> list[int]:
        def empty(place: int) -> bool:
            return all(row[place] in ("", Cell("")) for row in self.rows)

        return [n for n, name in enumerate(self.names) if name not in self.optional or not empty(n)]


@dataclass(frozen=True, slots=True)
class Banner:
    """A verdict, or what went wrong."""

    title: str
    text: str = ""
    tone: Tone = ""


@dataclass(frozen=True, slots=True)
class Section:
    """A heading with charts and tables below it."""

    title: str
    text: str = ""
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()

    def __bool__(self) -> bool:
        return bool(self.charts or self.tables or self.text)


@dataclass(frozen=True, slots=True)
class Page:
    """Everything that a report says; text in it is from anywhere and trusted nowhere."""

    kind: str
    title: str
    facts: Sequence[tuple[str, str]] = ()
    command: str = ""
    banners: Sequence[Banner] = ()
    tiles: Sequence[Tile] = ()
    sections: Sequence[Section] = ()


@dataclass(frozen=True, slots=True)
class Picture:
    """A drawn chart."""

    title: str
    note: str
    svg: Any  # Markup: the one thing on the page that is not escaped; matplotlib escaped the text in it
    png: str


def write_page(page: Page, folder: Path) -> Path:
    """report.html in `folder`, and report/NAME.png for each of its charts; returns the first.

    The page is written last, whole or not at all.
    """
    pictures = folder / PICTURES
    charts = [chart for section in page.sections for chart in section.charts]
    drawn: dict[str, Picture] = {}
    if charts:
        pictures.mkdir(exist_ok=True)
        drawn = {chart.name: picture for chart, picture in zip(charts, _draw(charts, pictures), strict=True)}
    text = _render(page, drawn)
    file = folder / FILE
    temporary = file.with_suffix(".html.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, file)
    return file


def _draw(charts: Iterable[Chart], folder: Path) -> Iterable[Picture]:
    from markupsafe import Markup

    with style():
        from fasttrain.report.drawing import draw

        for chart in charts:
            figure = draw(chart)
            svg = to_svg(figure, chart.name)
            title = clean(chart.title)
            to_png(figure, folder / f"{chart.name}.png", title)
            yield Picture(title, clean(chart.note), Markup(svg), f"{PICTURES}/{chart.name}.png")


def _render(page: Page, pictures: dict[str, Picture]) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("fasttrain.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: (
            clean(value, 4000) if isinstance(value, str) and not hasattr(value, "__html__") else value
        ),
    )
    template = environment.get_template("report.html.j2")
    return template.render(
        page=page, pictures=pictures, light=css_variables(LIGHT), dark=css_variables(DARK), version=__version__
    )
