"""The report of one run."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fasttrain.report.curves import Windows, perf_cells, phase_ms, windows_of
from fasttrain.report.files import RunFiles, date_of, read_run
from fasttrain.report.page import Banner, Cell, Page, Section, Table, Tile
from fasttrain.report.run_charts import PHASE_WORDS, elo_chart, ending_charts, learning_charts, time_charts
from fasttrain.report.words import (
    NOTHING,
    as_mapping,
    as_number,
    as_rows,
    interval,
    number,
    percent,
    seconds,
    size,
    value_text,
)
from fasttrain.spec.algorithms import ALGORITHMS
from fasttrain.spec.flags import BY_NAME, NOT_APPLICABLE


def run_page(folder: Path) -> Page:
    """What there is to say of the run in `folder`."""
    run = read_run(folder)
    windows = windows_of(run.perf)
    sections = [
        Section("Learning", _learning_text(run), charts=learning_charts(run)),
        Section("Quality of the final policy", charts=ending_charts(run), tables=_quality_tables(run)),
        Section("Self-play", charts=_only(elo_chart(_self_play(run))), tables=_pool_tables(_self_play(run))),
        Section("Where the time went", _time_text(run), time_charts(run, windows), _perf_tables(run, windows)),
        Section("Replay buffer", tables=_replay_tables(run)),
        Section("Plan", tables=_plan_tables(run)),
    ]
    what = " on ".join(part for part in (run.algorithm, run.env) if part)
    return Page(
        kind="Training run",
        title=what or folder.resolve().name,
        facts=_facts(run),
        command=shlex.join(["fasttrain", *run.overrides]) if "overrides" in run.summary else "",
        banners=_banners(run),
        tiles=_tiles(run),
        sections=[section for section in sections if section],
    )


def _only(chart: Any) -> list[Any]:
    return [] if chart is None else [chart]


def _self_play(run: RunFiles) -> dict[str, Any]:
    return as_mapping(run.summary.get("self_play"))


def _facts(run: RunFiles) -> list[tuple[str, str]]:
    seed = run.summary.get("seed", run.config.get("seed"))
    facts = [
        ("env", run.env),
        ("algorithm", run.algorithm),
        ("profile", run.profile),
        ("status", str(run.summary.get("status", ""))),
        ("seed", "" if seed is None else str(seed)),
        ("device", str(run.config.get("device") or "")),
        ("fasttrain", str(run.summary.get("version", ""))),
        ("date", date_of(run.folder)),
        ("folder", run.folder.resolve().name),
    ]
    return [(name, value) for name, value in facts if value]


def _banners(run: RunFiles) -> list[Banner]:
    status = run.summary.get("status")
    if status == "crashed":
        return [Banner("Crashed", str(run.summary.get("error", "")), "bad")]
    if status == "stopped":
        return [Banner("Stopped by a signal", "everything finished by then is saved and shown here", "open")]
    if not run.summary:
        return [
            Banner("Unfinished", "no summary.json that can be read: shown is what the run wrote on its way", "open")
        ]
    return []


def _tiles(run: RunFiles) -> list[Tile]:
    total, summary = run.total, run.summary
    phases = phase_ms(total)
    tiles = [
        Tile("Env steps/s", number(total.get("steps_per_s")), f"{number(total.get('env_steps'))} env steps")
        if as_number(total.get("steps_per_s"))
        else None,
        Tile("Training time", seconds(total.get("wall_s")), _startup(summary))
        if as_number(total.get("wall_s"))
        else None,
        Tile("Gradient updates", number(total.get("updates")), f"{number(total.get('update_ratio'))} per env step")
        if as_number(total.get("updates")) is not None
        else None,
        *_quality_tiles(run.quality),
        Tile("Learner's Elo", number(_self_play(run).get("elo")), "by the snapshots it met")
        if as_number(_self_play(run).get("elo"))
        else None,
    ]
    if phases:
        wall, used = max(phases.items(), key=lambda item: item[1])
        note = f"{percent(used / sum(phases.values()), 0)} of the main thread's time"
        tiles.append(Tile("The wall", PHASE_WORDS[wall], note))
    use = as_mapping(summary.get("utilization"))
    if as_number(use.get("cpu")) is not None:
        gpu = f"GPU {percent(use.get('gpu'), 0)} · " if as_number(use.get("gpu")) is not None else ""
        tiles.append(Tile("CPU busy", percent(use.get("cpu"), 0), f"{gpu}{size(use.get('memory_bytes'))} of memory"))
    return [tile for tile in tiles if tile is not None]


def _startup(summary: Mapping[str, Any]) -> str:
    startup = as_number(summary.get("startup_s"))
    return "" if startup is None else f"after {seconds(startup)} of start-up"


def _quality_tiles(quality: Mapping[str, Any]) -> list[Tile]:
    ci95, tiles = as_mapping(quality.get("ci95")), []
    for name, title, form in (("win_rate", "Win rate", percent), ("mean_reward", "Mean reward", number)):
        if as_number(quality.get(name)) is not None:
            low, high = _bounds(ci95.get(name))
            tiles.append(Tile(title, form(quality[name]), f"{interval(low, high, form)}, greedy".lstrip(", ")))
    return tiles


def _bounds(value: Any) -> tuple[Any, Any]:
    return (value[0], value[1]) if isinstance(value, list) and len(value) == 2 else (None, None)


def _learning_text(run: RunFiles) -> str:
    texts = []
    if _self_play(run):
        texts.append(
            "Training episodes are played against snapshots of the learner, evaluations against other opponents."
        )
    if run.episodes.sampled:
        texts.append(f"episodes.csv is large: the curves are of an even sample of {len(run.episodes):,} episodes.")
    return " ".join(texts)


def _quality_tables(run: RunFiles) -> list[Table]:
    results = {"greedy": run.quality, "sampled": as_mapping(run.quality.get("sampled"))}
    results = {name: result for name, result in results.items() if as_number(result.get("episodes"))}
    columns = [
        (">episodes", "episodes", number),
        (">mean reward", "mean_reward", number),
        (">win rate", "win_rate", percent),
        (">draws", "draw_rate", percent),
        (">score difference", "score_diff", number),
        *((f">{name}", name, number) for result in results.values() for name in result.get("scores", ())),
        (">mean length", "mean_length", number),
        (">mean turns", "mean_turns", number),
    ]
    shown = [
        column
        for column in dict.fromkeys(columns)
        if any(as_number(r.get(column[1])) is not None for r in results.values())
    ]
    rows: list[list[Cell | str]] = []
    for name, result in results.items():
        ci95 = as_mapping(result.get("ci95"))
        cells = [Cell(form(result.get(key)), interval(*_bounds(ci95.get(key)), form)) for _, key, form in shown]
        rows.append([Cell(name), *cells])
    tables = (
        [Table(["acting", *(title for title, _, _ in shown)], rows, note="In brackets: 95 % intervals.")]
        if rows
        else []
    )
    if terms := as_mapping(run.summary.get("reward_terms")):
        parts = [[name, number(value)] for name, value in terms.items()]
        tables.append(Table(["reward term", ">per episode"], parts, "Reward terms, last training episodes"))
    return tables


def _pool_tables(self_play: Mapping[str, Any]) -> list[Table]:
    rows = [
        [
            number(row.get("env_steps")),
            number(row.get("elo"), 4),
            number(row.get("games")),
            percent(row.get("learner_score")),
        ]
        for row in as_rows(self_play.get("pool"))
    ]
    names = [">taken at env step", ">Elo", ">games", ">learner's share of the points"]
    title = f"The pool, of {number(self_play.get('snapshots'))} snapshots taken"
    return [Table(names, rows, title, folded=True)] if rows else []


def _time_text(run: RunFiles) -> str:
    limits = as_mapping(run.summary.get("limits"))
    words = {"env_only": "stepping envs", "policy_only": "choosing actions", "update_only": "updating"}
    found = {text: as_number(limits.get(f"{key}_steps_per_s")) for key, text in words.items()}
    parts = [f"{value:,.0f} steps/s if {text} were all it did" for text, value in found.items() if value]
    return f"The limits of this run: {'; '.join(parts)}." if parts else ""


def _perf_tables(run: RunFiles, windows: Windows | None) -> list[Table]:
    rows: list[list[Cell | str]] = [
        [
            Cell(name, tone="dim" if name.startswith(("of it", "beside")) else ""),
            number(value),
            Cell(percent(share), share=share if name != "total" else None),
            number(alone) if alone else NOTHING,
        ]
        for name, value, share, alone in perf_cells(run.total)
    ]
    names = ["phase", ">ms per 1,000 env steps", ">share", ">steps/s if alone"]
    note = "Phases are disjoint and sum to the training time; evaluation after the training is not in it."
    return [Table(names, rows, "[PERF] over the whole run", note)] if rows else []


def _replay_tables(run: RunFiles) -> list[Table]:
    replay = as_mapping(run.perf.get("replay")) or as_mapping(run.summary.get("replay"))
    if not replay:
        return []
    held, room = as_number(replay.get("transitions")), as_number(replay.get("capacity"))
    rows: list[list[Cell | str]] = [
        ["transitions held", number(held)],
        ["room for", number(room)],
        ["filled", Cell(percent(held / room), share=held / room) if held is not None and room else NOTHING],
        ["memory when full", size(replay.get("memory_bytes"))],
        ["updates per env step", number(run.total.get("update_ratio"))],
    ]
    if prefetch := as_mapping(replay.get("prefetch")):
        rows += [
            ["batches that were ready", number(prefetch.get("hits"))],
            ["batches waited for", Cell(number(prefetch.get("waits")), seconds(prefetch.get("wait_s")))],
        ]
    return [Table(["replay buffer", ">at the end"], rows)]


def _plan_tables(run: RunFiles) -> list[Table]:
    """Flags that differ from a plain script or from the request first."""
    spec = ALGORITHMS.get(str(as_mapping(run.config.get("algo")).get("name")))
    own = spec.tiers["baseline"] if spec else {}
    notable = [row for row in run.flags if _is_notable(row, own)]
    others = [row for row in run.flags if row not in notable]
    names = ["flag", "requested", "effective", "class", "source", "why"]
    rows = [_plan_row(row, row in notable) for row in (*notable, *others)]
    title = f"{len(run.flags)} flags, {len(notable)} of them other than in a plain Stable-Baselines3 script"
    return [Table(names, rows, title, folded=True)] if rows else []


def _is_notable(row: Mapping[str, Any], own: Mapping[str, Any]) -> bool:
    """As the plan on the terminal; `own`: the algorithm's values in the baseline tier."""
    name, effective = str(row.get("flag")), row.get("effective")
    if effective == NOT_APPLICABLE:
        return False
    stock = BY_NAME[name].stock if name in BY_NAME else own.get(name.removeprefix("algo."), row.get("requested"))
    return effective not in (stock, None) or row.get("source") in ("command line", "environment")


def _plan_row(row: Mapping[str, Any], notable: bool) -> list[Cell]:
    changed = row.get("requested") != row.get("effective")
    texts = [str(row.get("flag", "")), value_text(row.get("requested")), value_text(row.get("effective"))]
    texts += [str(row.get(name) or "") for name in ("class", "source", "reason")]
    return [
        Cell(text, tone="dim" if not notable or (place == 1 and changed) else "") for place, text in enumerate(texts)
    ]
