"""Stored results about games with external engines as the pages show them. Used by reproduce.py."""

from __future__ import annotations

from rendering import Json, Load, cores, prose, rounded, table, turns_of

DAEMONS = {
    "daemons-4-engines": "4 engine processes each; ours play 64 games on them",
    "daemons-1": "1 game",
    "daemons-4": "4 games",
    "daemons-16": "16 games in flight",
    "daemons-64": "64",
    "daemons-64-lognormal": "64, thinking varies (lognormal, variation 0.63)",
    "daemons-computing": "16 on 2 engines that compute",
}


def daemons(load: Load) -> str:
    """Games with an engine, against one blocking process per env."""
    rows = []
    for name, what in DAEMONS.items():
        stored = load(name)
        rates, ratios, late = {"": stored["ours"], **stored["theirs"]}, stored["ratios"], stored.get("p95_ms", {})
        plain = "SubprocVecEnv" if "SubprocVecEnv" in ratios else "the engines alone"
        both = [rounded(rates[each]["median"], 2) for each in ("", plain)]
        same = ratios.get("SubprocVecEnv, our PPO")
        shown = [
            f"{value['median']:.2f}× [{value['min']:.2f}, {value['max']:.2f}]"
            for value in (ratios[plain], same)
            if value
        ]
        p95 = [f"{late[each]['median']:.1f}" for each in ("fasttrain", plain) if each in late]
        rows.append((what, both[0], both[1], shown[0], shown[1] if same else "-", " / ".join(p95)))
    head = (
        "games",
        "decisions/s",
        "theirs",
        "ratio",
        "ratio, both with our PPO",
        "P95 of a decision, ms, ours / theirs",
    )
    text = (
        f"Against one blocking process per env in SubprocVecEnv with stock's MaskablePPO, {cores(load('daemons-64'))}: "
        "the Java reference engine sleeps 5 ms a decision; training and updates included, medians of turns. Of "
        "engines that compute 5 ms, theirs is what they do in a closed loop of recorded answers, with no learning:"
    )
    return f"{prose(text)}\n\n{table(head, rows)}"


BOARDS = (1, 4, 16, 64)


def stored(engine: str) -> tuple[str, ...]:
    """Files of what `engines` shows."""
    return tuple(f"{engine}-{games}{part}.json" for games in BOARDS for part in ("", "-capacity"))


def turns(stored: Json) -> str:
    """How often each was measured, in words."""
    count = turns_of(stored)
    return "one turn each" if count == 1 else f"medians of {count} turns"


def engines(load: Load, engine: str, text: str) -> str:
    """Games with a real engine, against one blocking process per env and against what the engine can do."""
    rows = []
    for games in BOARDS:
        stored, alone = load(f"{engine}-{games}"), load(f"{engine}-{games}-capacity")
        shown = [f"{stored['ratios'][name]['median']:.2f}×" for name in ("SubprocVecEnv", "SubprocVecEnv, our PPO")]
        late = " / ".join(f"{stored['p95_ms'][each]['median']:.0f}" for each in ("fasttrain", "SubprocVecEnv"))
        pace = rounded(stored["games_per_s"]["fasttrain"]["median"], 2)
        both = [rounded(one["median"], 2) for one in (stored["ours"], stored["theirs"]["SubprocVecEnv"])]
        share = f"{100 * alone['ratios']['the engines alone']['median']:.0f} %"
        rows.append((str(games), *both, *shown, share, pace, late))
    head = (
        "at once",
        "decisions/s",
        "theirs",
        "ratio",
        "ratio, both with our PPO",
        "of what the engines can do",
        "games/s",
        "P95 of a decision, ms, ours / theirs",
    )
    return f"{prose(text)}\n\n{table(head, rows)}"


def go(load: Load) -> str:
    """GNU Go."""
    text = (
        f"Size 5, level 1; {cores(load('go-16'))}, with training, {turns(load('go-16'))}; theirs is one blocking "
        "process an env in SubprocVecEnv with stock's MaskablePPO. What the engines can do: recorded games in a closed "
        "loop, without policy and learning:"
    )
    return engines(load, "go", text)


def go_learning(load: Load, size: int = 5) -> str:
    """What a training against GNU Go comes to, and how it went."""
    stored = load(f"go-{size}-learning")
    rows = [
        (kind, *(f"{100 * stored[kind][key]:.1f} %" for key in ("win_rate", "black", "white", "distinct_share")))
        for kind in ("greedy", "sampled")
    ]
    begins = "errs in two moves of five" if size == 5 else "plays any legal moves"
    erred = ", ".join(f"{100 * part['errs']:.0f}" for part in stored["curve"] if "errs" in part)
    text = (
        f"MaskablePPO on {size}×{size} against level 1, which {begins} at first, and errs less with every win; "
        f"{_training(stored)} {f'It erred then in so many percent of its moves: {erred}. ' if erred else ''}Then "
        f"{stored['greedy']['games']} games each against level 1 that does not err, half of them as Black, with seeds "
        "that training did not see:"
    )
    return f"{prose(text)}\n\n{table(('play', 'won', 'as Black', 'as White', 'games that differ'), rows)}"


def _training(stored: Json) -> str:
    went = ", ".join(f"{100 * part['win_rate']:.0f}" for part in stored["curve"])
    return (
        f"{stored['env_steps']:,} decisions in {stored['wall_s'] / 60:.0f} minutes ({cores(stored)}). Won in each "
        f"tenth of its games, in percent: {went}."
    )


def daemon_faults(load: Load) -> str:
    """The run in which engines fail in every way there is."""
    parts = load("faults_daemons")["parts"]
    run, frames = parts["trainings"], parts["frames"]
    faults = run["faults"]
    kinds = (
        "the engine crashes, hangs, is stopped or killed for its memory, does not come up, half closes, sends garbage, "
        "too much, too deep, a byte a second, for another game, refuses"
    )
    refused = faults["connection refused"]  # five games ask for four connections, again and again
    count = f"{sum(faults.values()) - refused:,} faults of {len(faults) - 1} kinds"
    text = (
        f"One training of {run['decisions']:,} decisions, {count} ({kinds}) and {refused:,} connections too many: it "
        f"ended by itself, {run['illegal']} illegal transitions were learnt, {run['lost']:,} games were lost, each "
        f"counted, {run['processes_left']} processes and {run['sockets_left']} sockets were left. "
        f"{frames['count']:,} mutated, cut or reordered frames: each was a message or a game lost with a cause; the "
        f"process grew by {frames['grown_mb']:.0f} MB."
    )
    return prose(text)


def showdown(load: Load) -> str:
    """Decisions/s beside the obvious program and beside what the simulator can do."""
    text = (
        f"Generation 1, against max_damage; {cores(load('showdown-16'))}, with training, "
        f"{turns(load('showdown-16'))}; theirs is one Node process and one blocking socket an env in SubprocVecEnv "
        "with stock's MaskablePPO. What the engines can do: recorded battles in a closed loop on one process per core, "
        "without policy and learning:"
    )
    return engines(load, "showdown", text)


def showdown_learning(load: Load) -> str:
    """What a training comes to, and how it went."""
    stored = load("showdown-learning")
    rows = [
        (opponent, *(f"{100 * stored[f'{kind}_{opponent}']['win_rate']:.1f} %" for kind in ("greedy", "sampled")))
        for opponent in ("random", "max_damage")
    ]
    games = stored["greedy_random"]["games"]
    distinct = 100 * min(stored[f"greedy_{opponent}"]["distinct_share"] for opponent in ("random", "max_damage"))
    text = (
        f"MaskablePPO in generation {stored['generation']} against max_damage, {_training(stored)} "
        f"Then {games} battles each with seeds that training did not see, {distinct:.0f} % of them distinct:"
    )
    return f"{prose(text)}\n\n{table(('opponent', 'won, greedy', 'won, sampled'), rows)}"


def showdown_legal(load: Load) -> str:
    """Random legal actions: what was refused, and what was lost."""
    rows = [
        (
            str(part["generation"]),
            *(f"{part[key]:,}" for key in ("decisions", "games", "distinct_games", "refused", "lost")),
        )
        for part in load("showdown-legal")["parts"]
    ]
    head = (
        "generation",
        "decisions",
        "battles",
        "that differ",
        "refused, asked again",
        "lost to a fault or an illegal action",
    )
    return f"Random legal actions, against random ones:\n\n{table(head, rows)}"
