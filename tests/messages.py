"""The wordings of errors in one file: `messages.json` has, for each wrong input, the whole message that it gives.

`WRITE_MESSAGES=1 pytest -n 0 FILE` writes what the program says now, for inputs that are in the file; a new one gets
"" there first. Read the difference before it is committed.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

FILE = Path(__file__).with_name("messages.json")


def wrong_inputs(section: str) -> list[str]:
    """The inputs of a section, for `pytest.mark.parametrize`."""
    return list(json.loads(FILE.read_text(encoding="utf-8"))[section])


def assert_says(section: str, given: str, said: str) -> None:
    """Assert that `said` is the whole message that the section has for the input `given`."""
    known = json.loads(FILE.read_text(encoding="utf-8"))
    if os.environ.get("WRITE_MESSAGES"):
        known[section][given] = said
        FILE.write_text(json.dumps(known, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    assert said == known[section][given]
