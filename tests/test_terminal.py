from __future__ import annotations

import errno
import io
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from fasttrain.terminal import (
    COMMAND_VARIABLE,
    command,
    folded,
    near,
    one_line,
    own_program,
    rate_text,
    speak_its_letters,
    with_own_pip,
)  # fmt: skip


def test_a_command_and_a_rate_read_as_they_are_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(COMMAND_VARIABLE, raising=False)
    assert command() == "fasttrain"
    monkeypatch.setenv(COMMAND_VARIABLE, "python3 scripts/run.py")
    assert command() == "python3 scripts/run.py"
    rates = (61_234.4, 100, 8.31, 0.0125, 0)
    assert [rate_text(rate) for rate in rates] == ["61,234", "100", "8.31", "0.0125", "0"]


@pytest.mark.skipif(os.name == "nt", reason="programs of POSIX")
def test_a_program_of_this_environment_is_named_where_the_path_leads_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("mine", "other"):
        for name in ("python", "pip"):
            (tmp_path / folder).mkdir(exist_ok=True)
            (tmp_path / folder / name).touch(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "mine" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "mine"))
    assert own_program("pip") == "pip"
    monkeypatch.setenv("PATH", str(tmp_path / "other"))
    own = str(tmp_path / "mine" / "pip")
    assert own_program("pip") == shlex.quote(own)
    assert own_program("not_there") == "not_there"
    text = "missing: pip install 'fasttrain[onnx]' or uv pip install it or python -m pip install it"
    assert with_own_pip(text) == text.replace("pip", own, 1)


@pytest.mark.parametrize("width", [60, 80])
def test_lines_are_cut_between_words_and_a_command_stays_whole(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COMMAND_VARIABLE, "python3 scripts/run.py")
    whole = "python3 scripts/run.py resume run=outputs/2026-01-31/12-00-00_skullking_maskable_ppo_1"
    text = f"  saved: model.zip, checkpoint of 1,234,567 steps and more; {whole} goes on, at 99.5 % of it all"
    lines = folded(text, width).split("\n")
    assert " ".join(line.strip() for line in lines) == text.strip()
    assert all(len(line) <= width or whole in line for line in lines)
    assert any(whole in line for line in lines)
    assert any("99.5 %" in line for line in lines)
    assert lines[0].startswith("  saved")
    assert lines[1].startswith("    ")


def test_columns_that_do_not_fit_stand_below_each_other() -> None:
    text = "  fasttrain doctor +profile=speed        where the bottleneck is, and what would pay"
    assert folded(text, 60) == "  fasttrain doctor +profile=speed\n    where the bottleneck is, and what would pay"
    assert folded(text, 90) == text
    assert folded("a\n\n  b", 60) == "a\n\n  b"


@pytest.mark.parametrize(("encoding", "shown"), [("ascii", "a | b... 2x ? done"), ("latin-1", "a · b... 2× ? done")])
def test_letters_that_cannot_be_shown_are_written_plainly(encoding, shown, monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
    speak_its_letters()
    sys.stdout.write("a · b… 2× 雪 done")
    sys.stdout.flush()
    assert written.getvalue().decode(encoding) == shown
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="surrogateescape")
    monkeypatch.setattr(sys, "stdout", stream)
    speak_its_letters()
    assert stream.errors == "surrogateescape", "a terminal of UTF-8 is left alone"


def test_a_path_is_as_short_as_it_can_be_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert near(tmp_path / "outputs" / "a") == tmp_path / "outputs" / "a", "no terminal"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert near(tmp_path / "outputs" / "a") == Path("outputs/a")
    assert near(tmp_path) == tmp_path
    assert near(tmp_path.parent / "b") == tmp_path.parent / "b"
    assert near(Path("c")) == Path("c")


def test_what_is_told_to_nobody_leaves_nothing_to_be_written():
    code = (
        "import os, sys; from fasttrain import terminal\n"
        "reading, writing = os.pipe(); os.close(reading); os.dup2(writing, 2)\n"
        "terminal.tell('num_envs=0: must be at least 1'); sys.exit(2)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=200).returncode == 2


@pytest.mark.skipif(os.name == "nt", reason="descriptors of POSIX")
@pytest.mark.parametrize(("name", "number"), [("stdout", 1), ("stderr", 2)])
def test_a_stream_that_was_closed_before_the_start_is_replaced(name: str, number: int):
    code = f"import sys; from fasttrain import terminal; terminal.speak_its_letters(); sys.exit(sys.{name} is None)"
    command = f"exec {shlex.quote(sys.executable)} -c {shlex.quote(code)} {number}>&-"
    assert subprocess.run(["sh", "-c", command], timeout=200).returncode == 0


def test_text_becomes_one_line_that_can_be_written() -> None:
    hostile = "a\nb\x00\x1b[31m\ud800\u202ec"
    assert one_line(hostile) == "a b\ufffd\ufffd[31m\ufffd\ufffdc"
    assert one_line(hostile).encode("utf-8")
    assert one_line("x" * 500) == "x" * 399 + "…"


def test_an_env_does_not_close_the_output(tmp_path: Path) -> None:
    code = """
import sys
from fasttrain.terminal import let_output_end
let_output_end()
for stream in (sys.stdout, sys.stderr):
    stream.write("one ")
    stream.close()
    print("two", file=stream)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "one two\n", "one two\n")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no such device there")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_below_the_output_costs_what_is_printed_alone(unbuffered: str, tmp_path: Path) -> None:
    code = """
from fasttrain.terminal import Output, let_output_end
let_output_end()
for _ in range(3):
    print("line " * 2000, flush=True)
open("told", "w").write(Output.lost)
"""
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, cwd=tmp_path,
                              env={**os.environ, "PYTHONUNBUFFERED": unbuffered})  # fmt: skip
    assert (done.returncode, done.stderr) == (0, b"")
    assert (tmp_path / "told").read_text() == str(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
