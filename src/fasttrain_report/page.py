"""The contents of a report page, and how they are written as report.html with pictures beside it.

Colours in the SVG become `var(--…)` of the page's style sheet. Text in the SVG stays text, in the page's font.
"""

from __future__ import annotations

import io
import logging
import re
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from fasttrain import __version__
from fasttrain.saving.files import read_json, write_whole
from fasttrain.terminal import one_line
from fasttrain_report.charts import FAINT, INK, LIGHT, MUTED, PAPER, Chart
from fasttrain_report.values import Estimate, as_list, as_number, quality_of
from fasttrain_report.words import NOTHING, Metric, metric_of, number, seconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FILE = "report.html"
Tone = Literal["", "good", "bad", "open", "dim"]
TONES: dict[str, Tone] = {  # verdict → tone of the table cell that shows it
    "pass": "good", "keep": "good", "fail": "bad", "failed": "bad", "illegal": "open", "stopped": "open",
    "not enough seeds": "open",
}  # fmt: skip


class Tile(NamedTuple):
    """A number at the top of the page. A tile without a value is left out."""

    label: str
    value: str
    note: str = ""


class Cell(NamedTuple):
    """A cell of a table. `share` (0..1) draws a bar behind the text; `link` is relative to the page."""

    text: str
    note: str = ""
    tone: Tone = ""
    share: float | None = None
    link: str = ""

    @classmethod
    def of(cls, found: Estimate, metric: Metric) -> Cell:
        """A cell with a figure and its interval."""
        if found.value is None:
            return cls(metric.text(found), tone="dim")
        return cls(metric.text(found), found.interval(metric.form))

    @classmethod
    def run(cls, text: str, run: Path, folder: Path) -> Cell:
        """A cell of a page in `folder`. If `run` lies below `folder`, the cell links to the run's page or folder."""
        try:
            target = run.resolve().relative_to(folder.resolve()) / (FILE if (run / FILE).is_file() else "")
            return cls(text, link="./" + quote(target.as_posix()) if run.is_dir() else "")
        except (OSError, ValueError):  # the run is not below `folder`, or its name cannot be a path
            return cls(text)


@dataclass(slots=True)
class Table:
    """A table. `names` that begin with `>` are columns of numbers, aligned to the right. Empty columns are left out."""

    names: Sequence[str]
    rows: Sequence[Sequence[Cell | str]]
    title: str = ""
    note: str = ""
    folded: bool = False
    columns: Sequence[tuple[str, bool]] = field(init=False)  # (name, whether the column has numbers)
    cells: Sequence[Sequence[Cell]] = field(init=False)  # rows of cells in the order of `columns`

    def __post_init__(self) -> None:
        rows = [[Cell(cell) if isinstance(cell, str) else cell for cell in row] for row in self.rows]
        shown = [n for n in range(len(self.names)) if any(row[n] != Cell("") for row in rows)]
        self.columns = [(self.names[n].removeprefix(">"), self.names[n].startswith(">")) for n in shown]
        self.cells = [[row[n] for n in shown] for row in rows]


class Video(NamedTuple):
    """A video with its title; `link` is relative to the page."""

    title: str
    link: str


class Banner(NamedTuple):
    """A verdict, or a message about what failed or is missing."""

    title: str
    text: str = ""
    tone: Tone = ""


@dataclass(slots=True)
class Section:
    """A heading with charts, tables and videos below it. Charts, tables and videos without content are left out."""

    title: str
    text: str = ""
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()
    videos: Sequence[Video] = ()

    def __post_init__(self) -> None:
        self.charts = [chart for chart in self.charts if chart]
        self.tables = [table for table in self.tables if table.rows]

    def __bool__(self) -> bool:
        return bool(self.charts or self.tables or self.videos or self.text)


@dataclass(slots=True)
class Page:
    """The contents of a report. Empty parts are left out. The template escapes all its texts."""

    kind: str
    title: str
    facts: Sequence[tuple[str, str]] = ()
    command: str = ""
    banners: Sequence[Banner] = ()
    tiles: Sequence[Tile] = ()
    sections: Sequence[Section] = ()

    def __post_init__(self) -> None:
        self.facts = [fact for fact in self.facts if fact[1]]
        self.tiles = [tile for tile in self.tiles if tile.value != NOTHING]
        self.sections = [section for section in self.sections if section]


def place_of(folder: Path, *files: str) -> list[tuple[str, str]]:
    """Facts for the top of a page: date of the newest of the `files`, and the folder's name."""
    newest = max(((folder / name).stat().st_mtime for name in files if (folder / name).is_file()), default=None)
    date = "" if newest is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(newest))
    return [("date", date), ("folder", folder.resolve().name)]


def cells_tile(cells: Sequence[Mapping[str, Any]]) -> Tile:
    """A tile with the number of a study's trainings (`cells`) and their time."""
    done = sum(cell.get("status") == "done" for cell in cells)
    took = sum(as_number(cell.get("seconds")) or 0.0 for cell in cells)
    return Tile("Cells", number(len(cells)), f"{done} done, {seconds(took)} in all")


def cell_table(folder: Path, cells: Sequence[Mapping[str, Any]], title: str, metric: str, folded: bool) -> Table:
    """The table of a study's trainings (`cells`). It shows the `metric`, or the overrides if `metric` is empty."""
    rows: list[list[Cell | str]] = []
    for cell in cells:
        run, status = folder / str(cell.get("folder") or "."), str(cell.get("status", ""))
        summary = read_json(run / "summary.json")
        rows.append([
            Cell.run(str(cell.get("label", "")), run, folder),
            "" if cell.get("seed") is None else str(cell["seed"]),
            Cell(status, tone=TONES.get(status, "")),
            number(summary.get("steps_per_s")),
            Cell.of(quality_of(summary, metric), metric_of(metric)) if metric else "",
            seconds(cell.get("seconds")),
            "" if metric else " ".join(map(str, as_list(cell.get("overrides")))),
            str(cell.get("error") or ""),
        ])  # fmt: skip
    quality = f">{metric_of(metric).title}"
    names = [title, ">seed", "status", ">steps/s", quality, ">seconds in all", "overrides", "error"]
    said = f"{len(rows)} cells, each" if len(rows) > 1 else "1 cell,"
    return Table(names, rows, f"{said} a run in a process of its own", folded=folded)


# --- writing


def write_page(page: Page, folder: Path, name: str = FILE) -> Path:
    """Write the page `name` into `folder`, and a PNG of each chart into a folder beside it. Returns the page's path.

    The page is written last, completely or not at all.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    charts = [chart for section in page.sections for chart in section.charts]
    file = folder / name
    pictures = _draw(charts, folder / file.stem) if charts else {}
    environment = Environment(
        loader=PackageLoader("fasttrain_report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: one_line(value, 4000) if type(value) is str else value,  # removes control characters
    )
    template = environment.get_template("report.html.j2")
    more = {"pictures": pictures, "folder": file.stem, "light": LIGHT, "version": __version__}
    write_whole(file, template.render(page=page, **more))
    return file


def _draw(charts: Sequence[Chart], folder: Path) -> dict[str, str]:
    """Chart name → SVG. Writes the PNG files into `folder`."""
    folder.mkdir(exist_ok=True)
    drawn = {}
    with style():
        for chart in charts:
            figure = chart.draw()
            drawn[chart.name] = to_svg(figure, chart.name)
            to_png(figure, folder / f"{chart.name}.png", one_line(chart.title))
    return drawn


# --- drawing

BY_HEX = {value: f"var(--{name})" for name, value in LIGHT.items()}
PNG_DPI = 144
TITLE_INCHES = 0.33
STYLE: dict[str, Any] = {
    "font.family": ["DejaVu Sans"],  # comes with matplotlib; report.html itself uses other fonts
    "font.size": 9.5,
    "text.parse_math": False,  # names of envs may contain $
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.facecolor": "none",
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.handlelength": 1.4,
    "legend.columnspacing": 1.4,
    "figure.facecolor": "none",
    "svg.fonttype": "none",
    "path.simplify_threshold": 0.3,
}


@contextmanager
def style() -> Iterator[None]:
    """matplotlib's settings for figures that are made inside the block; a user's matplotlibrc is ignored."""
    logger = logging.getLogger("matplotlib")  # at its first use matplotlib logs that it builds a font cache
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        from matplotlib.style import context

        with warnings.catch_warnings():
            # If DejaVu Sans lacks a glyph, the PNG shows a box; the page's own font may have the glyph.
            warnings.filterwarnings("ignore", message="Glyph .* missing from")
            # With a legend of very many runs no room is left for the axes; the picture is drawn all the same.
            warnings.filterwarnings("ignore", message="constrained_layout not applied")
            with context(["default", STYLE]):
                yield
    finally:
        logger.setLevel(level)


def to_svg(figure: Figure, prefix: str) -> str:
    """Inline SVG. Its ids begin with `prefix`, because several pictures share a page."""
    from matplotlib import rc_context

    out = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with rc_context({"svg.hashsalt": "fasttrain"}):  # so that the same figure gives the same text
        figure.savefig(out, format="svg", metadata=nothing)
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    return re.sub(r"<[^>]+>", lambda tag: _tag(tag[0], prefix), text).strip()


def _tag(tag: str, prefix: str) -> str:
    """Rewrite one tag of the SVG for the page. Each `<…>` is a tag, because text has `<` and `>` only as escapes."""
    if tag.startswith("<!--"):
        return ""
    if tag.startswith("<svg"):
        box = re.search(r'viewBox="[^"]*"', tag)
        return f'<svg {box[0] if box else ""} role="presentation" focusable="false">'
    tag = tag.replace("xlink:href=", "href=")
    tag = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}-", tag)
    tag = re.sub(r"font: ([\d.]+px|[a-z0-9]+ [\d.]+px) [^;\"]*", r"font: \1 var(--font)", tag)
    return re.sub(r"#[0-9a-f]{6}\b", lambda found: BY_HEX.get(found[0], found[0]), tag)


def to_png(figure: Figure, file: Path, title: str) -> None:
    """Write a PNG in the light theme, with the title above the picture.

    The title is drawn as a figure of its own, because inside the figure it would cover a legend outside the axes.
    """
    from matplotlib.figure import Figure
    from matplotlib.image import imsave

    strip = Figure(figsize=(figure.get_size_inches()[0], TITLE_INCHES))
    strip.text(0.012, 0.2, title, fontsize=11, fontweight="bold", color=INK)
    imsave(file, np.vstack([_pixels(strip), _pixels(figure)]), format="png")


def _pixels(figure: Figure) -> NDArray[np.uint8]:  # (height, width, 4)
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure.set_dpi(PNG_DPI)
    figure.set_facecolor(PAPER)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()  # type: ignore[no-untyped-call]
    return np.asarray(canvas.buffer_rgba())  # type: ignore[no-untyped-call]
