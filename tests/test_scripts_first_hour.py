"""The watched terminal of scripts/first_hour.py: what it shows, which pauses it notes, what it writes of them."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
pytestmark = pytest.mark.skipif(os.name == "nt", reason="a pseudo-terminal is needed")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    spec = importlib.util.spec_from_file_location("first_hour_under_test", SCRIPTS / "first_hour.py")
    if spec is None or spec.loader is None:
        raise ImportError(str(SCRIPTS))
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def test_the_screen_shows_what_a_terminal_would(script: ModuleType) -> None:
    screen = script.Screen(10)
    screen.write(b"one\r\n\x1b[1mtwo\x1b[0m\r\n")
    screen.write("⠋ going".encode())
    assert screen.foot() == ["one", "two", "⠋ going"]
    screen.write(b"\r\x1b[2K\x1b[1A\x1b[2Kshort\r\n")
    assert screen.foot() == ["one", "short"]
    screen.write(b"0123456789abc")
    assert screen.foot(2) == ["0123456789", "abc"], "what is too long is cut by the terminal"
    screen.write("\xe2\x80".encode("latin-1"))
    screen.write("\xa6".encode("latin-1"))
    assert screen.foot(1) == ["abc…"], "a letter may come in two parts"


def test_pauses_and_long_lines_are_noted_with_what_stood_there(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(script.time, "monotonic", lambda: now[0])
    command = script.Command("a test", "type this")
    watching = script.Watch(command, 80)
    for after, data in ((1.0, b"first\r\n"), (3.5, b"making, 0:00"), (0.5, b"\rmaking, 0:01"), (2.0, b"\rmaking, 0:02"),
                        (0.5, b"\r\x1b[2Kdone\r\n"), (9.0, b"\x1b[0m")):  # fmt: skip
        now[0] += after
        watching.take(data)
    watching.end()
    assert command.first_s == 1.0
    assert command.seconds == 16.5
    assert [(pause["at_s"], pause["seconds"], pause["screen"]) for pause in command.pauses] == [
        (1.0, 3.5, ["first"]),
        (7.5, 9.0, ["first", "done"]),
    ], "codes that show nothing change nothing"
    assert [(phase["seconds"], phase["line"]) for phase in command.phases] == [
        (3.0, "making, 0:02"),
    ], "what does not move is a pause"
    text = script.as_text({"machine": "two cores", "measured": "today"}, 80, [command])
    assert "| a test | `type this` | None | 16.5 | 1.0 s | 9.0 s |" in text
    assert "Pauses over two seconds: 2" in text
    assert "   3.0 s  making, 0:02" in text


def test_a_command_is_watched_in_a_terminal_and_ctrl_c_reaches_it(script: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "clone").mkdir()
    (tmp_path / "clone" / "x.py").write_text(
        "import os, sys, time\n"
        "print(os.get_terminal_size().columns, sys.stdout.isatty(), 'NUMBA_CACHE_DIR' in os.environ, flush=True)\n"
        "print('going', flush=True)\n"
        "try: time.sleep(60)\n"
        "except KeyboardInterrupt: print('saved'); sys.exit(4)\n"
    )
    command = script.Command("Ctrl-C", f"{sys.executable} x.py")
    script.watch(command, tmp_path / "clone", 61, stop_after="going")
    assert command.exit_code == 4
    assert command.screen[:2] == ["61 True True", "going"]
    assert any("saved" in row for row in command.screen)
    assert command.pauses[0]["screen"][-1] == "going"
