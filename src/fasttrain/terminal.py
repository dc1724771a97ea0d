"""Text for the terminal: how to type the command, lines that fit the width, letters that can be shown."""

from __future__ import annotations

import codecs
import errno
import io
import math
import os
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

COMMAND_VARIABLE = "FASTTRAIN_COMMAND"  # set by scripts/run.py, which users call if `fasttrain` is not on the PATH
PLAIN = str.maketrans({
    "·": "|", "…": "...", "→": "->", "×": "x", "±": "+-", "µ": "u", "–": "-", "█": "#", "’": "'", "“": '"', "”": '"',
})  # fmt: skip
PLAIN_WORDS = "fasttrain.plain"
GLUE = "\N{NO-BREAK SPACE}"


def command() -> str:
    """The command that the user must type to start fasttrain, such as `fasttrain`."""
    return os.environ.get(COMMAND_VARIABLE) or "fasttrain"


def own_program(name: str) -> str:
    """What the user must type for a program of this Python's environment: its path, unless the PATH leads to it."""
    there = shutil.which(name, path=str(Path(sys.executable).parent))
    return name if there in (None, shutil.which(name)) else shlex.quote(str(near(Path(str(there)))))


def with_own_pip(text: str) -> str:
    """`text` with the pip of this Python in place of `pip`."""
    return re.sub(r"(?<![/\\])(?<!-m )(?<!uv )\bpip install\b", lambda _: f"{own_program('pip')} install", text)


def near(path: Path) -> Path:
    """`path` relative to the working directory if it is inside; unchanged if stdout is no terminal."""
    here = Path.cwd()
    return path.relative_to(here) if sys.stdout.isatty() and path != here and path.is_relative_to(here) else path


def as_typed(text: str) -> str:
    """`text` with the result of `command()` in place of every `fasttrain …`."""
    return re.sub(r"\bfasttrain (?=[-+a-z\[]+)", lambda _: f"{command()} ", text)


def folded(text: str, width: int) -> str:
    """`text` in lines of at most `width`, without breaking a word, a number with its %, or a command."""
    one_piece = re.compile(rf"{re.escape(command())} \S+(?: [^\s\[]+=\S*)*|(?:[a-z]+ )?[\d.]+ %")
    lines: list[str] = []
    for line in text.split("\n"):
        indent = line[: len(line) - len(line.lstrip())]
        if len(line) > width and (columns := re.match(r"(\s*\S.*\S) {3,}(\S.*)", line)):
            lines += [folded(columns[1], width), folded(f"{indent}  {columns[2]}", width)]
            continue
        glued = one_piece.sub(lambda match: match[0].replace(" ", GLUE), line.lstrip())
        wrapper = textwrap.TextWrapper(
            max(20, width), indent, f"{indent}  ", break_long_words=False, break_on_hyphens=False
        )
        lines += wrapper.wrap(glued) or [""]
    return "\n".join(lines).replace(GLUE, " ")


def rate_text(per_s: float) -> str:
    """A rate such as `61,234`, `8.3` or `0.0125`."""
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.3g}"


def duration_text(seconds: float) -> str:
    """A time such as `3.25 s`, `0.5 ms` or `60 µs`."""
    factor, unit = (1, "s") if seconds >= 1 else (1e3, "ms") if seconds >= 1e-3 else (1e6, "µs")
    return f"{factor * seconds:.3g} {unit}"


def with_interval(value: float | None, bounds: Sequence[float] | None, form: str, scale: float = 1.0) -> str:
    """A text such as `61.3 % [60.1, 62.4]`. Without bounds only the value; a dash for None, `never` for infinity."""
    if value is None:
        return "-"
    text, *ends = ("never" if math.isinf(it) else form.format(scale * it) for it in (value, *(bounds or ())))
    return text if not bounds or math.isinf(bounds[0]) else f"{text} [{', '.join(end.rstrip(' %×') for end in ends)}]"


def spelt(value: object, none: str = "null") -> str:
    """A value as the user types it: `true`, `null`, `0.5`."""
    return none if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def value_text(value: object) -> str:
    """As `spelt`, with all parts: `[64, 64]`, `{pi: [64], vf: [64]}`. Texts lack the quotes that Hydra may need."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {value_text(part)}' for key, part in value.items())}}}"
    return f"[{', '.join(map(value_text, value))}]" if isinstance(value, (list, tuple)) else spelt(value)


def fitting(text: str, stream: TextIO) -> str:
    """`text`, in lines that fit if `stream` is a terminal."""
    try:
        return folded(text, os.get_terminal_size(stream.fileno()).columns or 80)
    except (OSError, ValueError):  # `stream` is a file, or closed
        return text


def tell(text: str) -> None:
    """Write `text` to stderr. If that fails, later output to stderr is thrown away."""
    try:
        sys.stderr.write(f"{fitting(text, sys.stderr)}\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def show_warning(
    show: Callable[..., None], message: object, category: type[Warning], filename: str, *where: Any
) -> None:
    """Tell a warning of fasttrain's own code in one line; `show` others with their path and line of code."""
    if filename.startswith(str(Path(__file__).parents[1] / "fasttrain")):
        tell(f"fasttrain: warning: {message}")
    else:
        show(message, category, filename, *where)


class Output:
    """stdout and stderr of this process.

    Attributes:
        lost: why stdout or stderr failed; empty once reported, and if the reader or terminal closed the stream.
    """

    lost = ""

    @classmethod
    def end(cls, error: OSError, file: int) -> None:
        """Throw away everything that is written to `file` from now on."""
        if error.errno not in (errno.EPIPE, errno.EIO):  # else the reader or terminal closed `file`
            cls.lost = str(error)
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), file)


class _Lasting(io.FileIO):
    """A file whose `write` never raises: after an error, such as a full disk, all further output is thrown away."""

    def write(self, content: Any) -> int:
        try:
            return super().write(content)
        except OSError as error:
            Output.end(error, self.fileno())
            return memoryview(content).nbytes


def let_output_end() -> None:
    """Let stdout and stderr never raise when they cannot be written to, and let no env close them."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        old = getattr(sys, name)
        raw = getattr(getattr(old, "buffer", None), "raw", getattr(old, "buffer", None))
        if type(raw) is io.FileIO and raw.fileno() == number:  # False in notebooks, tests, Windows consoles
            lasting = _Lasting(number, "w", closefd=False)
            whole = lasting if raw is old.buffer else io.BufferedWriter(lasting)
            form = {key: getattr(old, key) for key in ("encoding", "errors", "line_buffering", "write_through")}
            stream = io.TextIOWrapper(whole, **form)
            stream.close = stream.flush  # type: ignore[method-assign]
            setattr(sys, name, stream)


def speak_its_letters() -> None:
    """Write ASCII (`...` for an ellipsis) for letters that stdout and stderr cannot encode, instead of raising.

    A stream that was closed before the process began is replaced by one that throws everything away.
    """
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 - open until the process ends
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
    """`text` in one line, without control characters, lone surrogates and marks that change the writing direction."""
    line = shown(" ".join(str(text).split()))
    return line if len(line) <= limit else line[: limit - 1] + "…"


def shown(text: str) -> str:
    """Lines for a terminal, without control characters, and thus without escape sequences."""
    return "".join(it if it.isprintable() or it in "\n\t" else "\N{REPLACEMENT CHARACTER}" for it in text)
