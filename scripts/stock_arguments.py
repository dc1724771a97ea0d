#!/usr/bin/env python3
"""Constructor arguments of the stock algorithms as a table: python3 scripts/stock_arguments.py [--write]

`fasttrain --help` takes 0.2 s and importing the stock classes 2, so their signatures are kept in
src/fasttrain/spec/stock_arguments.json. A test compares the file with the installed versions.
"""

import inspect
import json
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

from fasttrain.spec.algorithms import ALGORITHMS

FILE = Path(__file__).resolve().parent.parent / "src" / "fasttrain" / "spec" / "stock_arguments.json"


def kind_of(annotation: Any) -> str:
    """`float`, `int`, `bool`, `str|float`, `schedule`, `frequency`, with a `?` where None is allowed; else empty."""
    parts = get_args(annotation) or (annotation,)
    names = {"schedule" if "Callable" in str(part) else getattr(part, "__name__", "") for part in parts}
    optional = "?" if "NoneType" in names else ""
    names -= {"NoneType"}
    if names == {"int", "tuple"}:
        return "frequency"
    if "schedule" in names:
        return f"schedule{optional}"
    if names == {"str", "float"}:
        return f"str|float{optional}"
    return f"{names.pop()}{optional}" if len(names) == 1 and names <= {"int", "float", "bool"} else ""


def arguments_of(stock: Callable[..., Any]) -> dict[str, list[Any]]:
    """Name → [kind, default] of every argument that can be typed."""
    parameters = inspect.signature(stock).parameters.values()
    kinds = {parameter.name: (kind_of(parameter.annotation), parameter.default) for parameter in parameters}
    return {name: [kind, default] for name, (kind, default) in kinds.items() if kind and default is not inspect._empty}


def table() -> dict[str, dict[str, list[Any]]]:
    """Class → its arguments, of every algorithm that can be named."""
    found = {}
    for spec in ALGORITHMS.values():
        module, _, name = spec.stock.partition(":")
        found[name] = arguments_of(getattr(import_module(module), name))
    return found


def text() -> str:
    """The file's contents: one class a paragraph, one argument a line."""
    return json.dumps(table(), indent=1).replace("[\n   ", "[").replace(",\n   ", ", ").replace("\n  ]", "]") + "\n"


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        FILE.write_text(text(), encoding="utf-8")
    else:
        print(text(), end="")
