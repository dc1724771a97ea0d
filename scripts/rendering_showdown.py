"""Stored results about Pokémon Showdown as docs/showdown.md shows them. Used by reproduce.py."""

from __future__ import annotations

from rendering import Load, cores, prose, table
from rendering_home import engines


def speed(load: Load) -> str:
    """Decisions/s beside the obvious program and beside what the simulator can do."""
    text = (
        f"Generation 1, against max_damage; {cores(load('showdown-16'))}, with training; theirs is one Node process "
        "and one blocking socket an env in SubprocVecEnv with stock's MaskablePPO. What the engines can do: recorded "
        "battles in a closed loop on one process per core, without policy and learning:"
    )
    return engines(load, "showdown", text)


def learning(load: Load) -> str:
    """What a training comes to, and how it went."""
    stored = load("showdown-learning")
    rows = [
        (opponent, *(f"{100 * stored[f'{kind}_{opponent}']['win_rate']:.1f} %" for kind in ("greedy", "sampled")))
        for opponent in ("random", "max_damage")
    ]
    games = stored["greedy_random"]["games"]
    went = ", ".join(f"{100 * part['win_rate']:.0f}" for part in stored["curve"])
    distinct = 100 * min(stored[f"greedy_{opponent}"]["distinct_share"] for opponent in ("random", "max_damage"))
    text = (
        f"MaskablePPO in generation {stored['generation']} against max_damage, {stored['env_steps']:,} decisions in "
        f"{stored['wall_s'] / 60:.0f} minutes ({cores(stored)}). Won in each tenth of them, in percent: {went}. "
        f"Then {games} battles each with seeds that training did not see, {distinct:.0f} % of them distinct:"
    )
    return f"{prose(text)}\n\n{table(('opponent', 'won, greedy', 'won, sampled'), rows)}"


def legal(load: Load) -> str:
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
