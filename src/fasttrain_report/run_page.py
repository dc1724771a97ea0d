"""The report of one run. Each of its files may be missing, incomplete or from another version."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fasttrain.runs.logs import FIELDS, EvaluationLog, read_episodes
from fasttrain.saving.files import read_json
from fasttrain.spec.algorithms import ALGORITHMS
from fasttrain.spec.plan import is_notable
from fasttrain.spec.precedence import key_of
from fasttrain.terminal import one_line
from fasttrain_report.curves import (
    PHASE_LOOK,
    elo_chart,
    ending_charts,
    learning_charts,
    phase_ms,
    tasks_chart,
    time_charts,
)
from fasttrain_report.page import Banner, Cell, Page, Section, Table, Tile, Tone, Video, place_of
from fasttrain_report.values import as_list, as_mapping, as_number, as_rows, quality_in
from fasttrain_report.words import METRICS, NOTHING, Metric, number, percent, seconds, size, value_text

QUALITY = ("episodes", "distinct_episodes", "mean_reward", "win_rate", "draw_rate", "score_diff")
VIDEO, MOST_VIDEOS = re.compile(r"step_(\d+)\.mp4"), 8
LENGTHS = ("mean_length", "mean_turns")


def run_page(folder: Path) -> Page:
    summary, plan, perf = (read_json(folder / f"{name}.json") for name in ("summary", "plan", "perf"))
    config, flags = as_mapping(plan.get("config")), as_rows(plan.get("flags")) or as_rows(summary.get("plan"))
    total = as_mapping(perf.get("total")) or as_mapping(summary.get("perf"))  # [PERF] over the whole run
    quality, self_play = as_mapping(summary.get("quality")), as_mapping(summary.get("self_play"))
    replay = as_mapping(perf.get("replay")) or as_mapping(summary.get("replay"))
    engines = as_mapping(perf.get("engines")) or as_mapping(summary.get("engines"))
    episodes = read_episodes(folder / "episodes.csv")
    evaluations = EvaluationLog(folder / "evaluations.csv").known(sys.maxsize) or as_rows(summary.get("evaluations"))
    evaluations = [{name: as_number(row.get(name)) for name in FIELDS} for row in evaluations]
    learning = "Training episodes are played against snapshots of the learner, evaluations against other opponents. "
    sampled = f"episodes.csv is large: the curves are of an even sample of {len(episodes):,} episodes."
    facts = _facts(summary, config, flags)
    terms = [[name, number(value)] for name, value in as_mapping(summary.get("reward_terms")).items()]
    return Page(
        kind="Training run",
        title=" on ".join(facts[name] for name in ("algorithm", "env") if facts[name]) or folder.resolve().name,
        facts=[*facts.items(), *place_of(folder, "summary.json", "plan.json", "episodes.csv")],
        command=shlex.join(["fasttrain", *_overrides(summary)]) if "overrides" in summary else "",
        banners=_banners(summary),
        tiles=_tiles(summary, total, quality),
        sections=[
            Section("Learning", ((learning if self_play else "") + (sampled if episodes.sampled else "")).rstrip(),
                    learning_charts(episodes, evaluations, summary)),
            Section("Quality of the final policy", charts=ending_charts(episodes, quality),
                    tables=[_quality_table(quality), Table(["reward term", ">per episode"], terms,
                                                           "Reward terms, last training episodes")]),
            _videos(folder),
            Section("Self-play", charts=[elo_chart(self_play)], tables=[_pool_table(self_play)]),
            Section("Tasks", charts=[tasks_chart(episodes, [*as_mapping(summary.get("tasks"))])],
                    tables=[_by_name(as_mapping(summary.get("tasks")), "task", TASK, "Tasks of the curriculum",
                    "Rewards and wins are of the last 100 training episodes of each task, value errors of the last "
                    "rollout.")]),
            Section("Policies", tables=[_by_name(as_mapping(summary.get("policies")), "policy", POLICY, "Policies")]),
            Section("Phases", tables=[_by_name(as_mapping(summary.get("phases")), "phase", PHASE, "Phases of the game",
                    "All but the steps are means of the last rollout.")]),
            Section("Where the time went", _limits(as_mapping(summary.get("limits"))),
                    time_charts(total, as_rows(perf.get("windows"))), [_perf_table(total)]),
            Section("Engines", one_line(engines.get("warning") or ""), tables=_engine_tables(engines)),
            Section("Replay buffer", tables=[_replay_table(replay, total)]),
            Section("Plan", tables=[_plan_table(flags, config)]),
        ],
    )  # fmt: skip


def _videos(folder: Path) -> Section:
    """The videos made during training, the newest first. If there are many, some of them, evenly spaced."""
    made = {int(found[1]): file for file in folder.glob("videos/*.mp4") if (found := VIDEO.fullmatch(file.name))}
    steps = sorted(made)
    shown = dict.fromkeys(
        steps[-1 - round(n * (len(steps) - 1) / (MOST_VIDEOS - 1))] for n in range(MOST_VIDEOS) if steps
    )
    text = f"{len(shown)} of the {len(steps):,} in videos/." if len(steps) > len(shown) else ""
    videos = [Video(f"After {step:,} env steps", f"videos/{made[step].name}") for step in shown]
    return Section("Videos of the greedy policy", text, videos=videos)


def _overrides(summary: Mapping[str, Any]) -> list[str]:
    return [str(text) for text in as_list(summary.get("overrides"))]


def _facts(summary: Mapping[str, Any], config: Mapping[str, Any], flags: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    env, seed = as_mapping(config.get("env")), summary.get("seed", config.get("seed"))
    # The profile on the command line, or else the one that a flag names as the source of its value (`profile NAME`).
    profiles = [text.partition("=")[2] for text in _overrides(summary) if key_of(text) == "profile"]
    sources = [str(row.get("source", "")) for row in flags]
    profiles += [source.removeprefix("profile ") for source in sources if source.startswith("profile ")]
    return {
        "env": one_line(env.get("id") or env.get("entry_point") or ""),
        "algorithm": one_line(as_mapping(config.get("algo")).get("name") or ""),
        "profile": profiles[0] if profiles else "",
        "status": str(summary.get("status", "")),
        "seed": "" if seed is None else str(seed),
        "device": str(config.get("device") or ""),
        "fasttrain": str(summary.get("version", "")),
    }


def _banners(summary: Mapping[str, Any]) -> list[Banner]:
    if summary.get("status") == "crashed":
        return [Banner("Crashed", str(summary.get("error", "")), "bad")]
    if summary.get("status") == "stopped":
        return [Banner("Stopped by a signal", "everything finished by then is saved and shown here", "open")]
    unread = "no summary.json that can be read: this page shows what the run wrote before it ended"
    return [] if summary else [Banner("Unfinished", unread, "open")]


def _tiles(summary: Mapping[str, Any], total: Mapping[str, Any], quality: Mapping[str, Any]) -> list[Tile]:
    use, startup = as_mapping(summary.get("utilization")), as_number(summary.get("startup_s"))
    tiles = [
        Tile("Env steps/s", number(total.get("steps_per_s")), f"{number(total.get('env_steps'))} env steps"),
        Tile("Training time", seconds(total.get("wall_s")),
             "" if startup is None else f"after {seconds(startup)} of start-up"),
        Tile("Gradient updates", number(total.get("updates")), f"{number(total.get('update_ratio'))} per env step"),
    ]  # fmt: skip
    for metric, found in ((METRICS[name], quality_in(quality, name)) for name in ("win_rate", "mean_reward")):
        note = f"{found.interval(metric.form)}, greedy".lstrip(", ")
        tiles.append(Tile(metric.heading, metric.form(found.value), note))  # no value: the page leaves the tile out
    elo = as_mapping(summary.get("self_play")).get("elo")
    tiles.append(Tile("Learner's Elo", number(elo), "from games against snapshots"))
    if phases := phase_ms(total):
        slowest, used = max(phases.items(), key=lambda item: item[1])
        note = f"{percent(used / sum(phases.values()), 0)} of the main thread's time"
        tiles.append(Tile("Bottleneck", PHASE_LOOK[slowest][0], note))
    gpu = "" if as_number(use.get("gpu")) is None else f"GPU {percent(use['gpu'], 0)} · "
    return [*tiles, Tile("CPU busy", percent(use.get("cpu"), 0), f"{gpu}{size(use.get('memory_bytes'))} of memory")]


def _quality_table(quality: Mapping[str, Any]) -> Table:
    acting = {"greedy": quality, "sampled": as_mapping(quality.get("sampled"))}
    acting = {name: result for name, result in acting.items() if as_number(result.get("episodes"))}
    scores = [str(name) for result in acting.values() for name in as_list(result.get("scores"))]
    names = [*QUALITY, *scores, *LENGTHS]
    told = [name for name in names if any(as_number(each.get(name)) is not None for each in acting.values())]
    metrics = {name: METRICS.get(name, Metric(name)) for name in told}
    rows: list[list[Cell | str]] = [
        [name, *(Cell.of(quality_in(result, key), metric) for key, metric in metrics.items())]
        for name, result in acting.items()
    ]
    titles = [f">{metric.title}" for metric in metrics.values()]
    return Table(["acting", *titles], rows, note="In brackets: 95 % intervals.")


# Key in summary.json → a table column: its title, and the function that formats its values.
Columns = dict[str, tuple[str, Callable[[Any], str]]]
TASK: Columns = {"episodes": (">training episodes", number), "mean_reward": (">mean reward", number),
                 "win_rate": (">win rate", percent), "value_error": (">value error", number)}  # fmt: skip
POLICY: Columns = {"decisions": (">decisions", number), "updates": (">gradient updates", number),
                   "update_s": (">seconds of updating", number)}  # fmt: skip
PHASE: Columns = {"steps": (">steps", number), "share": (">share", percent), "reward": (">reward per step", number),
                  "value": (">value", number), "value_error": (">value error", number),
                  "log_prob": (">log-probability", number)}  # fmt: skip


def _by_name(figures: Mapping[str, Any], what: str, columns: Columns, title: str, note: str = "") -> Table:
    rows: list[list[Cell | str]] = [
        [one_line(name), *(form(as_mapping(one).get(key)) for key, (_, form) in columns.items())]
        for name, one in figures.items()
    ]
    return Table([what, *(head for head, _ in columns.values())], rows, title, note)


def _pool_table(self_play: Mapping[str, Any]) -> Table:
    rows = [
        [number(row.get("env_steps")), number(row.get("elo"), 4), number(row.get("games")),
         percent(row.get("learner_score"))]
        for row in as_rows(self_play.get("pool"))
    ]  # fmt: skip
    names = [">taken at env step", ">Elo", ">games", ">learner's share of the points"]
    return Table(names, rows, f"The pool, of {number(self_play.get('snapshots'))} snapshots taken", folded=True)


def _limits(limits: Mapping[str, Any]) -> str:
    words = {"env_only": "stepping envs", "policy_only": "choosing actions", "update_only": "updating"}
    found = {text: as_number(limits.get(f"{key}_steps_per_s")) for key, text in words.items()}
    parts = [f"{value:,.0f} steps/s with {text} alone" for text, value in found.items() if value]
    return f"The limits of this run: {'; '.join(parts)}." if parts else ""


def _perf_table(total: Mapping[str, Any]) -> Table:
    phases = phase_ms(total)
    wall = sum(phases.values())
    figures = {}
    for phase, value in phases.items():
        figures[f"{phase}_ms"] = value
        inside = ("enemy_turn_ms", "slowest_worker_ms", "transport_ms", "waiting_ms") if phase == "env_step" else ()
        figures |= {f"of it {name}": part for name in inside if (part := as_number(total.get(name)))}
    figures |= {"total": wall} if phases else {}
    figures |= {f"of a game's time {name}": part for name, value in as_mapping(total.get("of_a_game")).items()
                if (part := as_number(value)) is not None}  # fmt: skip
    rows: list[list[Cell | str]] = [
        [
            Cell(name, tone="dim" if name.startswith("of ") else ""),
            number(value),
            Cell(percent(value / wall), share=value / wall if name != "total" else None),
            number(1e6 / value if value else None),
        ]
        for name, value in figures.items()
    ]
    names = ["phase", ">ms per 1,000 env steps", ">share", ">steps/s if alone"]
    note = "Phases do not overlap, and their sum is the training time. The final evaluation is not included."
    return Table(names, rows, "[PERF] over the whole run", note)


def _replay_table(replay: Mapping[str, Any], total: Mapping[str, Any]) -> Table:
    held, room = as_number(replay.get("transitions")), as_number(replay.get("capacity"))
    rows: list[list[Cell | str]] = [
        ["transitions held", number(held)],
        ["room for", number(room)],
        ["filled", Cell(percent(held / room), share=held / room) if held is not None and room else NOTHING],
        ["memory when full", size(replay.get("memory_bytes"))],
        ["updates per env step", number(total.get("update_ratio"))],
    ]
    if prefetch := as_mapping(replay.get("prefetch")):
        rows += [
            ["batches that were ready", number(prefetch.get("hits"))],
            ["batches that were not ready", Cell(number(prefetch.get("waits")), seconds(prefetch.get("wait_s")))],
        ]
    return Table(["replay buffer", ">at the end"], rows if replay else [])


def _engine_tables(engines: Mapping[str, Any]) -> list[Table]:
    per_s = {name: engines.get(f"{name}_per_s") for name in ("games", "decisions")}
    times = {name: as_mapping(engines.get(f"{name}_ms")) for name in ("decision", "game")}
    restarts = [f"{cause} {number(count)}" for cause, count in as_mapping(engines.get("restarts")).items()]
    whole = [
        *([f"{name} per second", number(value)] for name, value in per_s.items()),
        *([f"a {name} took, {share.upper()}", f"{number(ms)} ms"] for name, each in times.items()
          for share, ms in each.items() if as_number(ms) is not None),
        ["engines busy", percent(engines.get("busy_share"))],
        ["started again", one_line(", ".join(restarts) or "never")],
    ]  # fmt: skip
    lost = {cause: as_mapping(one) for cause, one in as_mapping(engines.get("lost_games")).items()}
    ended = {"finished": engines, **{f"lost: {one_line(cause)}": one for cause, one in lost.items()}}
    games = [[what, number(one.get("games")), number(one.get("mean_decisions"))] for what, one in ended.items()]
    each = [
        [number(one.get("daemon")), percent(one.get("busy_share")), percent(one.get("cpu_share")),
         f"{number(one.get('memory_mb'))} MB"]
        for one in as_rows(engines.get("daemons"))
    ]  # fmt: skip
    return [
        Table(["games with engines", ">over the whole run"], whole if engines else []),
        Table(["games", ">number", ">decisions each, mean"], games if engines else []),
        Table(["engine", ">busy", ">of a core", ">memory"], each),
    ]


def _plan_table(flags: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> Table:
    """All flags, first those for which `is_notable` is true."""
    spec = ALGORITHMS.get(str(as_mapping(config.get("algo")).get("name")))
    rows: list[list[Cell | str]] = []
    notable = sum(is_notable(row, spec) for row in flags)
    for row in sorted(flags, key=lambda row: not is_notable(row, spec)):
        dim: Tone = "dim" if len(rows) >= notable else ""
        texts = [str(row.get(name) or "") for name in ("flag", "class", "source", "reason")]
        values = [value_text(row.get(name)) for name in ("requested", "effective")]
        asked = Cell(values[0], tone="dim" if row.get("requested") != row.get("effective") else dim)
        rows.append([Cell(texts[0], tone=dim), asked, *(Cell(text, tone=dim) for text in (values[1], *texts[1:]))])
    names = ["flag", "requested", "effective", "class", "source", "why"]
    title = f"{len(flags)} flags, the first {notable} differ from a plain script, were set or measured, or are off"
    return Table(names, rows, title, folded=True)
