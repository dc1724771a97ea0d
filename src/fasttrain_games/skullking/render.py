"""Texts for people: the table as the learner sees it, actions, and what happened in a step."""

from __future__ import annotations

import numpy as np

from fasttrain_games.skullking.game import GameView
from fasttrain_games.skullking.rules import (
    FIRST_PLAY_ACTION,
    KIND,
    KIND_NAMES,
    NUM_NUMBERED,
    NUM_ROUNDS,
    RANKS,
    TIGRESS,
    TIGRESS_PIRATE,
    trick_result,
)
from fasttrain_games.skullking.state import BIDDING

SUIT_NAMES = ("yellow", "green", "purple", "black")


def card_name(code: int) -> str:
    """A short name for a code: "black 14", "pirate", "tigress as pirate"."""
    if code < NUM_NUMBERED:
        return f"{SUIT_NAMES[code // RANKS]} {code % RANKS + 1}"
    if code in (TIGRESS, TIGRESS_PIRATE):
        return "tigress as pirate" if code == TIGRESS_PIRATE else "tigress as escape"
    return KIND_NAMES[KIND[code]].replace("_", " ")


def describe_action(action: int) -> str:
    """ "bids 3" or "plays yellow 7"."""
    if action < FIRST_PLAY_ACTION:
        return f"bids {action}"
    return f"plays {card_name(action - FIRST_PLAY_ACTION)}"


def _name(seat: int, names: tuple[str, str]) -> str:
    return names[0] if seat == 0 else f"{names[1]} {seat}"


def describe_step(before: GameView, after: GameView, names: tuple[str, str]) -> str:
    """What happened between two decisions of the learner, as lines of text.

    Bids appear when all are made, a trick when it is full, scores at the round's end.
    """
    was_bidding, is_bidding = before.phase == BIDDING, after.phase == BIDDING
    if was_bidding and is_bidding:
        return ""
    people = [_name(seat, names) for seat in range(len(before.totals))]
    lines = []
    leader, trick, tricks, known = before.leader, list(before.trick), list(before.tricks), len(before.plays)
    if was_bidding:
        known = 0
        bids = zip(people, after.bids, strict=True)
        lines.append("bids: " + ", ".join(f"{name} {bid}" for name, bid in bids))
    for code in after.plays[known:]:
        trick.append(code)
        if len(trick) == len(people):
            winner, leads_next = trick_result(np.array(trick, np.int32), len(trick))
            cards = _cards_of(leader, trick, people)
            if winner >= 0:
                tricks[(leader + winner) % len(people)] += 1
            lines.append(f"{cards} -> {people[(leader + winner) % len(people)] if winner >= 0 else 'nobody'}")
            leader, trick = (leader + leads_next) % len(people), []
    if is_bidding:
        totals = after.final_totals if before.round_number == NUM_ROUNDS else after.totals
        results = zip(people, tricks, after.bids, totals, before.totals, strict=True)
        scores = (f"{name} {won}/{bid} {total - old:+d}" for name, won, bid, total, old in results)
        lines.append(f"round {before.round_number} over (tricks/bid, points): {', '.join(scores)}")
    return "\n".join(lines)


def _cards_of(leader: int, trick: list[int], people: list[str]) -> str:
    return ", ".join(f"{people[(leader + place) % len(people)]} {card_name(code)}" for place, code in enumerate(trick))


def render_totals(view: GameView, names: tuple[str, str]) -> str:
    """The final points of the last game, one player per line, the best one first."""
    ranked = sorted(range(len(view.final_totals)), key=lambda seat: -view.final_totals[seat])
    return "\n".join(f"{_name(seat, names):<10}{view.final_totals[seat]:>7}" for seat in ranked)


def render_table(view: GameView, names: tuple[str, str] = ("you", "bot")) -> str:
    """Round, then one line per seat (bid, tricks, score, card on the table), then the learner's hand."""
    seats = len(view.totals)
    bidding = view.phase == BIDDING
    done = sum(view.tricks) if not bidding else 0
    lines = [
        f"Skull King  round {view.round_number}/{NUM_ROUNDS}  "
        + ("bidding" if bidding else f"tricks won {done}, cards left {len(view.hands[0])}"),
        f"{'seat':<10}{'bid':>4}{'tricks':>8}{'score':>7}  on the table",
    ]
    on_table = {(view.leader + position) % seats: code for position, code in enumerate(view.trick)}
    for seat in range(seats):
        name = _name(seat, names)
        lead = "*" if seat == view.leader else ""
        bid = "?" if bidding else str(view.bids[seat])
        card = card_name(on_table[seat]) if seat in on_table else "-"
        lines.append(f"{name + lead:<10}{bid:>4}{view.tricks[seat]:>8}{view.totals[seat]:>7}  {card}")
    hand = ", ".join("tigress" if card == TIGRESS else card_name(card) for card in view.hands[0])
    lines.append(f"hand: {hand or '-'}   (* leads)")
    return "\n".join(lines)
