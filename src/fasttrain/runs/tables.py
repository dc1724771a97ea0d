"""Tables that fit: columns that a terminal has no room for stand on a line of their own below each row."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table
from rich.text import Text

from fasttrain.terminal import GLUE, folded

GAP = "  "
LEAST = 40  # columns of text in which the last column may be folded beside the others


class Row(NamedTuple):
    """Cells as they are; nothing in them is markup."""

    cells: list[str]
    style: str


class FittingTable:
    """Rows of text under names. What is wider than the console is never cut within a word.

    Args:
        right: names of columns of numbers, which end together.
        plain: names that are not repeated where their cells stand below a row.
    """

    def __init__(self, names: Sequence[str], right: Collection[str] = (), plain: Collection[str] = ()) -> None:
        self.names, self.right, self.plain = list(names), right, plain
        self.rows: list[Row] = []

    def add_row(self, *cells: str, style: str = "") -> None:
        """A cell for each name."""
        self.rows.append(Row(list(cells), style))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        rows = [Row(self.names, "bold"), *self.rows]
        widths = [max(cell_len(row.cells[column]) for row in rows) for column in range(len(self.names))]
        before_last = sum(widths[:-1]) + len(GAP) * (len(widths) - 1)
        if before_last + min(widths[-1], LEAST) <= options.max_width:
            yield self._beside()
            return
        beside = len(widths) - 1
        while beside > 1 and sum(widths[:beside]) + len(GAP) * (beside - 1) > options.max_width:
            beside -= 1
        for row in rows:
            padded = [self._padded(name, row.cells[i], widths[i]) for i, name in enumerate(self.names[:beside])]
            yield Text(GAP.join(padded).rstrip(), style=row.style, overflow="fold")
            if row.cells is not self.names and (below := self._below(row, beside)):
                yield Text(folded(GAP + below, options.max_width), style=row.style, overflow="fold")

    def _beside(self) -> Table:
        table = Table(box=None, pad_edge=False)
        for name in self.names:
            table.add_column(name, overflow="fold", justify="right" if name in self.right else "left")
        for row in self.rows:
            table.add_row(*map(Text, row.cells), style=row.style)
        return table

    def _padded(self, name: str, cell: str, width: int) -> str:
        space = " " * (width - cell_len(cell))
        return space + cell if name in self.right else cell + space

    def _below(self, row: Row, beside: int) -> str:
        named = list(zip(self.names, row.cells, strict=True))[beside:]
        told = (cell if name in self.plain else f"{name} {cell}" for name, cell in named if cell)
        return " · ".join(text.replace(" ", GLUE) if cell_len(text) < LEAST else text for text in told)
