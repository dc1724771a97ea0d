"""Pages that mkdocs makes while it builds: the settings from their declarations, and files from outside of docs/.

Also `llms.txt`, and every page as Markdown beside its HTML.
"""

from __future__ import annotations

import re
from dataclasses import MISSING
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from fasttrain.spec.algorithms import ALGORITHMS
from fasttrain.spec.config import AlgoConfig, Config
from fasttrain.spec.setting import declared, settings_of
from fasttrain.terminal import spelt

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = {
    "project/changelog.md": "CHANGELOG.md",
    "project/contributing.md": "CONTRIBUTING.md",
    "project/security.md": "SECURITY.md",
}
INTRODUCTION = """# Settings

Type a setting as `key=value` after the command. This page is made from the declarations in the code.
`fasttrain help COMMAND` prints the settings of one command.

*Class* says what a setting may change: [exact, rounding, trade-off](../concepts/classes.md).
A setting of the first table can also be set by an environment variable: `FASTTRAIN_` and its name in capitals.
"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the generated pages."""
    pages = {path: (ROOT / source).read_text(encoding="utf-8") for path, source in OUTSIDE.items()}
    newest = max((ROOT / "benchmarks" / "reports").glob("*.md"))
    pages["reference/benchmark_results.md"] = newest.read_text(encoding="utf-8")
    pages["reference/settings.md"] = settings_page()
    for path, text in pages.items():
        files.append(File.generated(config, path, content=_links_inside(text)))
    return files


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Writes the page's Markdown beside its HTML."""
    beside = Path(config.site_dir) / page.file.src_uri
    beside.parent.mkdir(parents=True, exist_ok=True)
    beside.write_text(page.markdown or "", encoding="utf-8")
    return output


def on_post_build(config: MkDocsConfig) -> None:
    """Writes llms.txt: a line for each page, from its title and first sentence."""
    lines = ["# fasttrain", "", f"> {config.site_description}", ""]
    for path in sorted(Path(config.site_dir).rglob("*.md")):
        text = path.read_text(encoding="utf-8")
        title = re.search(r"^# (.+)$", text, re.MULTILINE)
        sentence = re.search(r"^(?![#`|>\-:!\d])(\w.+)$", text, re.MULTILINE)
        about = f": {sentence[1]}" if sentence else ""
        lines.append(f"- [{title[1] if title else path.stem}]({path.relative_to(config.site_dir)}){about}")
    (Path(config.site_dir) / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def settings_page() -> str:
    """A table for each group of settings, and the keys of each algorithm."""
    groups: dict[str, list[str]] = {}
    for key, hint, one in _settings(Config):
        it = declared(one)
        if it.hidden or key.startswith("algo."):
            continue
        group = key.split(".")[0] if "." in key else ("Speed settings" if it.flag_class else "Other settings")
        cells = [f"`{key}`", _default(one), _values(hint), it.class_text if it.flag_class else "", it.text]
        groups.setdefault(group, []).append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    parts = [INTRODUCTION]
    for name in sorted(groups, key=lambda it: (it != "Speed settings", it != "Other settings", it)):
        title = name if name.endswith("settings") else f"`{name}.`"
        head = "| setting | default | values | class | meaning |\n|---|---|---|---|---|"
        parts.append(f"## {title}\n\n{head}\n" + "\n".join(groups[name]))
    parts.append(_algorithms())
    return "\n\n".join(parts) + "\n"


def _algorithms() -> str:
    lines = ["## `algo.`", "", "Every algorithm has these:", "", "| setting | default | meaning |", "|---|---|---|"]
    for key, _, one in _settings(AlgoConfig):
        if key != "name":
            lines.append(f"| `algo.{key}` | {_default(one)} | {declared(one).text} |")
    lines += ["", "The other keys have the names of the stock class's constructor, and its meaning:", ""]
    lines += ["| `algo=` | keys below `algo.` |", "|---|---|"]
    for name, spec in ALGORITHMS.items():
        keys = ", ".join(f"`{key}`" for key in list(spec.keys()))
        lines.append(f"| `{name}` | {keys} |")
    return "\n".join(lines)


def _settings(cls: type) -> list[tuple[str, Any, Any]]:
    found = []
    for key, one in settings_of(cls, parts=True):
        hint: Any = cls
        for word in key.split("."):
            hint = get_type_hints(hint)[word]
        found.append((key, hint, one))
    return found


def _default(one: Any) -> str:
    if one.default is MISSING:
        return ""
    value = spelt([*one.default] if isinstance(one.default, tuple) else one.default)
    return f"`{value}`"


def _values(hint: Any) -> str:
    hints = (hint,) if get_origin(hint) is Literal else get_args(hint) or (hint,)
    words = [str(word) for each in hints if get_origin(each) is Literal for word in get_args(each)]
    kinds = {int: "a whole number", float: "a number", str: "a text", bool: "true, false"}
    plain = [kinds[each] for each in hints if each in kinds]
    return ", ".join([*(f"`{word}`" for word in words), *plain])


def _links_inside(text: str) -> str:
    """Links to files of the repository, as links of the site or as plain text."""

    def replaced(match: re.Match[str]) -> str:
        label, target = match[1], match[2]
        if target.startswith(("http", "#")):
            return match[0]
        if target.startswith("docs/"):
            return f"[{label}](../{target.removeprefix('docs/')})"
        return label

    return re.sub(r"\[([^\]]+)\]\(([^)]+)\)", replaced, text)
