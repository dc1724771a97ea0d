"""Pages that mkdocs makes while it builds: the settings from their declarations, and files from outside of docs/.

Also `llms.txt`, and every page as Markdown beside its HTML.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page

from fasttrain.cli.help import STOCK, profiles, table
from fasttrain.cli.settings import rows

ROOT = Path(__file__).resolve().parent.parent
LINK = r"\[([^\]]+)\]\(([^)]+)\)"
OUTSIDE = {
    "project/changelog.md": "CHANGELOG.md",
    "project/contributing.md": "CONTRIBUTING.md",
    "project/security.md": "SECURITY.md",
}
INTRODUCTION = """# Settings

Type a setting as `key=value` after the command. This page is made from the declarations in the code.
`fasttrain settings env.` prints a group, and `fasttrain help COMMAND` the settings of one command.
`fasttrain settings --schema` is a JSON schema for editors, and `fasttrain check --config FILE.yaml` checks a file.

*Class* says what a setting may change: [exact, rounding, trade-off](../concepts/classes.md).
A setting of the first table can also be set by an environment variable: `FASTTRAIN_` and its name in capitals.
"""
PROFILES = """# What profiles change

A cell shows the value in stock SB3 (`+profile=baseline`) and the value under the profile.
A value alone does not change. A dash means that the algorithm has no such setting or does not use it.
The class is that of the value under the profile: [exact, rounding, trade-off](../concepts/classes.md).
`fasttrain help speed` prints such a table in the terminal.

A game may have its own number of environments, rollout, minibatch and learning rate. The plan of a run prints them.
"""
NO_RESULTS = "# Benchmark results\n\nThey are in `benchmarks/reports/` of the repository. A source archive has none.\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the generated pages."""
    pages = {path: (ROOT / source).read_text(encoding="utf-8") for path, source in OUTSIDE.items()}
    newest_first = sorted((ROOT / "benchmarks" / "reports").glob("*.md"), reverse=True)
    results = "\n\n".join(report.read_text(encoding="utf-8") for report in newest_first)
    pages["reference/benchmark_results.md"] = results or NO_RESULTS
    pages["reference/settings.md"] = settings_page()
    pages["reference/profiles.md"] = "\n\n".join(
        [PROFILES, *(f"## `{name}`\n\n{table(name)}" for name in profiles() if name != STOCK)]
    )
    for path, text in pages.items():
        files.append(File.generated(config, path, content=_links_inside(text)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replaces `<!-- keys of summary -->` by a table of the keys in that schema."""
    return re.sub(r"<!-- keys of (\w+) -->", lambda match: keys_of(match[1]), markdown)


def keys_of(name: str) -> str:
    """A table of key, type and meaning. The keys of an inner object are dotted; `[]` is each entry of a list."""
    schema = json.loads((ROOT / f"docs/reference/schemas/{name}.schema.json").read_text(encoding="utf-8"))
    lines = [schema["description"], "", "| key | type | meaning |", "|---|---|---|"]

    def add(place: str, node: dict[str, Any]) -> None:
        types = node.get("type", "any value")
        words = types if isinstance(types, str) else " or ".join(types)
        lines.append(f"| `{place}` | {words} | {node.get('description', '')} |")
        inside = node.get("items", node)
        for key, below in inside.get("properties", {}).items() if place.count(".") < 1 else ():
            add(f"{place}{'[]' if inside is not node else ''}.{key}", below)

    for key, node in schema["properties"].items():
        add(key, node)
    return "\n".join(lines)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Writes the page's Markdown beside its HTML."""
    beside = Path(config.site_dir) / page.file.src_uri
    beside.parent.mkdir(parents=True, exist_ok=True)
    beside.write_text(page.markdown or "", encoding="utf-8")
    return output


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> None:
    """Keeps the pages in the order of the navigation, for llms.txt."""
    config.extra["pages"] = nav.pages


def on_post_build(config: MkDocsConfig) -> None:
    """Writes llms.txt: sections, and a line for each page from its title and first sentence outside of code."""
    lines = ["# fasttrain", "", f"> {config.site_description}"]
    section = ""
    for page in config.extra["pages"]:
        above = page.ancestors[-1].title if page.ancestors else ""
        lines += ["", f"## {above}", ""] if above != section else []
        section = above
        text = re.sub(r"```.*?```", "", page.markdown or "", flags=re.DOTALL)
        sentence = re.search(r"^(?![#|>:\-]|\d\.)(.+?(?:\.(?=\s)|$))", text, re.MULTILINE)
        about = ": " + re.sub(LINK, r"\1", sentence[1]) if sentence else ""
        lines.append(f"- [{page.title}]({page.file.src_uri}){about}")
    (Path(config.site_dir) / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def settings_page() -> str:
    """A table for each group of settings; those below `algo.` say which algorithms have them."""
    groups: dict[str, list[str]] = {}
    for row in rows():
        group = row.key.split(".")[0] if "." in row.key else ("Speed settings" if row.flag_class else "Other settings")
        values = ", ".join(f"`{word}`" for word in row.choices) or ", ".join(row.types)
        last = ", ".join(f"`{name}`" for name in row.algorithms) if group == "algo" else row.flag_class
        cells = [f"`{row.key}`", row.text, f"`{row.usual}`" if row.usual else "", values, last]
        groups.setdefault(group, []).append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    parts = [INTRODUCTION]
    for name in sorted(groups, key=lambda it: (it != "Speed settings", it != "Other settings", it)):
        title = name if name.endswith("settings") else f"`{name}.`"
        head = f"| setting | meaning | default | values | {'algorithms' if name == 'algo' else 'class'} |"
        parts.append(f"## {title}\n\n{head}\n|---|---|---|---|---|\n" + "\n".join(groups[name]))
    return "\n\n".join(parts) + "\n"


def _links_inside(text: str) -> str:
    """Links to files of the repository, as links of the site or as plain text."""

    def replaced(match: re.Match[str]) -> str:
        label, target = match[1], match[2]
        if target.startswith(("http", "#")):
            return match[0]
        if target.startswith("docs/"):
            return f"[{label}](../{target.removeprefix('docs/')})"
        return label

    return re.sub(LINK, replaced, text)
