from __future__ import annotations

import io

import pytest
from rich.console import Console

from fasttrain.runs.view import FittingTable, make_console, say


def shown(width: int, table: FittingTable) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=width).print(table)
    return [line.rstrip() for line in file.getvalue().splitlines()]


@pytest.fixture
def table() -> FittingTable:
    made = FittingTable(["flag", "effective", "source", "why"], right=["effective"], plain=["why"])
    made.add_row("num_envs", "256", "default", "the game's own number in this tier of all its numbers [bold]")
    made.add_row("engine", "1,024", "", "")
    return made


def test_where_there_is_room_everything_stands_beside_each_other(table: FittingTable) -> None:
    assert shown(140, table) == [
        "flag      effective  source   why",
        "num_envs        256  default  the game's own number in this tier of all its numbers [bold]",
        "engine        1,024",
    ]


def test_long_words_of_the_last_column_are_folded_while_there_is_room(table: FittingTable) -> None:
    lines = shown(75, table)
    assert lines[1].startswith("num_envs        256  default  the game's own")
    assert lines[2].startswith(" " * 30)


def test_where_there_is_none_they_stand_below(table: FittingTable) -> None:
    assert shown(60, table) == [
        "flag      effective  source",
        "num_envs        256  default",
        "  the game's own number in this tier of all its numbers",
        "    [bold]",
        "engine        1,024",
    ]
    assert shown(24, table)[:3] == ["flag      effective", "num_envs        256", "  source default · the"]


@pytest.mark.parametrize("width", [20, 40, 60, 80, 200])
def test_nothing_is_cut_in_a_word_and_nothing_is_lost(width: int, table: FittingTable) -> None:
    words = " ".join(shown(width, table)).split()
    assert {"num_envs", "256", "default", "1,024", "engine", "numbers", "[bold]"} <= set(words)
    assert all(len(line) <= width for line in shown(width, table))


def test_names_of_the_users_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]):
    console = make_console()
    console.print("a :Dog: [red]")
    say(console, "b :Dog: [red]")
    assert capsys.readouterr().out == "a :Dog: [red]\nb :Dog: [red]\n"
