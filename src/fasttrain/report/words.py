"""Numbers as text, and text from envs made harmless for labels. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fasttrain.terminal import one_line

LABEL_CHARACTERS = 34  # what fits beside a bar
NOTHING = "–"


def clean(text: Any, limit: int = 400) -> str:
    """`text` in one line without control characters, lone surrogates and marks that turn the writing direction.

    Envs choose names of end reasons and info keys freely; a lone surrogate alone makes a file impossible to write.
    """
    return one_line(text, limit)


def label(text: Any) -> str:
    """`clean` for a chart: short, and not beginning with the underscore by which matplotlib hides a legend's entry."""
    line = clean(text, LABEL_CHARACTERS)
    return "\N{THIN SPACE}" + line if line.startswith("_") else line or NOTHING


def as_number(value: Any) -> float | None:
    """A finite number, else None: files may be cut or come from another version."""
    if isinstance(value, bool) or value is None or value == "":
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def as_mapping(value: Any) -> dict[str, Any]:
    """The object, empty where there is none."""
    return dict(value) if isinstance(value, Mapping) else {}


def as_rows(value: Any) -> list[dict[str, Any]]:
    """The objects of a list, empty where there is none."""
    return [dict(row) for row in value if isinstance(row, Mapping)] if isinstance(value, list) else []


def number(value: Any, digits: int = 3) -> str:
    """`256,648`, `2.26`, `0.0039`, `1.2e-07`; `–` where there is none."""
    found = as_number(value)
    if found is None:
        return NOTHING
    if found and abs(found) < 1e-4:
        text = f"{found:.{digits - 1}e}"
    elif abs(found) >= 1000 or found == int(found):
        text = f"{found:,.0f}"
    else:
        text = f"{found:.{max(0, digits - 1 - math.floor(math.log10(abs(found))))}f}"
    return text.replace("-", "−", 1) if text.startswith("-") else text


def compact(value: float) -> str:
    """For ticks: `0`, `1,250`, `15k`, `200k`, `1M`."""
    if 1000 <= abs(value) < 10_000:
        return f"{value:,.4g}".replace("-", "−") if value != round(value) else f"{value:,.0f}".replace("-", "−")
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{letter}".replace("-", "−")
    return f"{value:.4g}".replace("-", "−")


def percent(value: Any, digits: int = 1) -> str:
    """`50.7 %` of 0.507."""
    found = as_number(value)
    return NOTHING if found is None else f"{100 * found:.{digits}f} %".replace("-", "−")


def times(value: Any) -> str:
    """`2.41×`."""
    found = as_number(value)
    return NOTHING if found is None else f"{found:.2f}×"


def seconds(value: Any) -> str:
    """`3.96 s`, `12 min 34 s`, `1 h 02 min`."""
    found = as_number(value)
    if found is None:
        return NOTHING
    if found < 59.95:
        return f"{found:.3g} s"
    whole = round(found)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600:,} h {whole % 3600 // 60:02} min"


def size(value: Any) -> str:
    """`563 MB`, `2.9 GB`."""
    found = as_number(value)
    if found is None:
        return NOTHING
    return f"{found / 1e9:.1f} GB" if found >= 1e9 else f"{found / 1e6:.0f} MB"


def interval(low: Any, high: Any, form: Any = number) -> str:
    """`[2.03, 2.49]`; a missing bound is an open one, and without both there is nothing to say."""
    bounds = as_number(low), as_number(high)
    if bounds == (None, None):
        return ""
    below = "−∞" if bounds[0] is None else form(bounds[0]).removesuffix(" %").removesuffix("×")
    above = "∞" if bounds[1] is None else form(bounds[1]).removesuffix(" %").removesuffix("×")
    return f"[{below}, {above}]"


def value_text(value: Any) -> str:
    """Any value of a configuration: `true`, `1,024`, `[64, 64]`, `–` for null."""
    if value is None:
        return NOTHING
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return number(value, 4)
    return clean(value)
