"""The terminal that a person sits at: how the command was typed, what fits into a line, which letters it shows."""

from __future__ import annotations

import codecs
import errno
import io
import math
import os
import re
import sys
import textwrap
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

COMMAND_VARIABLE = "FASTTRAIN_COMMAND"  # set by scripts/run.py, whose user has no `fasttrain` on the PATH
PLAIN = str.maketrans({
    "·": "|", "…": "...", "→": "->", "×": "x", "±": "+-", "µ": "u", "–": "-", "█": "#", "’": "'", "“": '"', "”": '"',
})  # fmt: skip
PLAIN_WORDS = "fasttrain.plain"
GLUE = "\N{NO-BREAK SPACE}"


def command() -> str:
    """What to type for `fasttrain` where the user is: for every message that shows a command."""
    return os.environ.get(COMMAND_VARIABLE) or "fasttrain"


def near(path: Path) -> Path:
    """`path` as it can be typed at this terminal: short, if it lies below. In a file it stays whole."""
    here = Path.cwd()
    return path.relative_to(here) if sys.stdout.isatty() and path != here and path.is_relative_to(here) else path


def as_typed(text: str) -> str:
    """`text` with every `fasttrain …` in it as `command` has it."""
    return re.sub(r"\bfasttrain (?=[-+a-z\[]+)", lambda _: f"{command()} ", text)


def folded(text: str, width: int) -> str:
    """`text` in lines of at most `width`, never cut in a word, before its %, or in a command that is to be copied."""
    one_piece = re.compile(rf"{re.escape(command())} \S+(?: [^\s\[]+=\S*)*|(?:[a-z]+ )?[\d.]+ %")
    lines: list[str] = []
    for line in text.split("\n"):
        indent = line[: len(line) - len(line.lstrip())]
        if len(line) > width and (columns := re.match(r"(\s*\S.*\S) {3,}(\S.*)", line)):
            lines += [folded(columns[1], width), folded(f"{indent}  {columns[2]}", width)]
            continue
        glued = one_piece.sub(lambda found: found[0].replace(" ", GLUE), line.lstrip())
        wrapper = textwrap.TextWrapper(
            max(20, width), indent, f"{indent}  ", break_long_words=False, break_on_hyphens=False
        )
        lines += wrapper.wrap(glued) or [""]
    return "\n".join(lines).replace(GLUE, " ")


def rate_text(per_s: float) -> str:
    """`61,234`, `8.3`, `0.0125`: a rate, of slow environments too."""
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.3g}"


def with_interval(value: float | None, bounds: Sequence[float] | None, form: str, scale: float = 1.0) -> str:
    """`61.3 % [60.1, 62.4]`; the value alone without bounds, a dash where there is none, `never` for infinity."""
    if value is None:
        return "-"
    text, *ends = ("never" if math.isinf(it) else form.format(scale * it) for it in (value, *(bounds or ())))
    return text if not bounds or math.isinf(bounds[0]) else f"{text} [{', '.join(end.rstrip(' %×') for end in ends)}]"


def spelt(value: object, none: str = "null") -> str:
    """A value as it is typed: `true`, `null`, `0.5`."""
    return none if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def fitting(text: str, stream: TextIO) -> str:
    """`text` as it is, or folded where `stream` is a terminal."""
    try:
        return folded(text, os.get_terminal_size(stream.fileno()).columns or 80)
    except (OSError, ValueError):  # a file; or closed
        return text


def tell(text: str) -> None:
    """`text` to stderr. Where nobody reads that any more, nothing is left that would fail to be written at the end."""
    try:
        sys.stderr.write(f"{fitting(text, sys.stderr)}\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


class Output:
    """stdout and stderr of this process.

    Attributes:
        lost: why one of them ended, until that is told; a reader may go away, and a terminal close.
    """

    lost = ""

    @classmethod
    def end(cls, error: OSError, file: int) -> None:
        """Throw away what is written to `file` from here on."""
        if error.errno not in (errno.EPIPE, errno.EIO):  # the SIGHUP of a terminal may come a moment later
            cls.lost = str(error)
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), file)


class _Lasting(io.FileIO):
    """A full disk below the output ends the output, not what writes there: an env's own `print` neither."""

    def write(self, content: Any) -> int:
        try:
            return super().write(content)
        except OSError as error:
            Output.end(error, self.fileno())
            return memoryview(content).nbytes


def let_output_end() -> None:
    """stdout and stderr of this process never raise because nothing can be written there; no env closes them."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        old = getattr(sys, name)
        raw = getattr(getattr(old, "buffer", None), "raw", getattr(old, "buffer", None))
        if type(raw) is io.FileIO and raw.fileno() == number:  # not of a notebook, a test, a console of Windows
            lasting = _Lasting(number, "w", closefd=False)
            whole = lasting if raw is old.buffer else io.BufferedWriter(lasting)
            form = {key: getattr(old, key) for key in ("encoding", "errors", "line_buffering", "write_through")}
            stream = io.TextIOWrapper(whole, **form)
            stream.close = stream.flush  # type: ignore[method-assign]
            setattr(sys, name, stream)


def speak_its_letters() -> None:
    """What stdout and stderr cannot encode is written in ASCII (`...` for an ellipsis) instead of raising.

    One that was closed before the process began is replaced by nothing.
    """
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 - as long as the process
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    codecs.register_error(PLAIN_WORDS, _plain)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and not stream.encoding.lower().startswith("utf"):
            stream.reconfigure(errors=PLAIN_WORDS)


def _plain(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    plain = error.object[error.start : error.end].translate(PLAIN)
    return plain.encode("ascii", "replace").decode("ascii"), error.end


def one_line(text: object, limit: int = 400) -> str:
    """`text` in one line without control characters, lone surrogates and marks that turn the writing direction."""
    line = shown(" ".join(str(text).split()))
    return line if len(line) <= limit else line[: limit - 1] + "…"


def shown(text: str) -> str:
    """Lines for a terminal as they are, without control characters: no escape sequence gets through."""
    return "".join(it if it.isprintable() or it in "\n\t" else "\N{REPLACEMENT CHARACTER}" for it in text)
