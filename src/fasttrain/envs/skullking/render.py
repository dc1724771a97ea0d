"""The table as text: what the learner sees, in columns per seat."""

from __future__ import annotations

from fasttrain.envs.skullking.game import GameView
from fasttrain.envs.skullking.rules import (
    KIND,
    KIND_NAMES,
    NUM_NUMBERED,
    NUM_ROUNDS,
    RANKS,
    TIGRESS,
    TIGRESS_PIRATE,
)
from fasttrain.envs.skullking.state import BIDDING

SUIT_NAMES = ("yellow", "green", "purple", "black")


def card_name(code: int) -> str:
    """A short name of a code: "black 14", "pirate", "tigress as pirate"."""
    if code < NUM_NUMBERED:
        return f"{SUIT_NAMES[code // RANKS]} {code % RANKS + 1}"
    if code in (TIGRESS, TIGRESS_PIRATE):
        return "tigress as pirate" if code == TIGRESS_PIRATE else "tigress as escape"
    return KIND_NAMES[KIND[code]].replace("_", " ")


def render_table(view: GameView) -> str:
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
        name = "you" if seat == 0 else f"bot {seat}"
        lead = "*" if seat == view.leader else ""
        bid = "?" if bidding else str(view.bids[seat])
        card = card_name(on_table[seat]) if seat in on_table else "-"
        lines.append(f"{name + lead:<10}{bid:>4}{view.tricks[seat]:>8}{view.totals[seat]:>7}  {card}")
    hand = ", ".join("tigress" if card == TIGRESS else card_name(card) for card in view.hands[0])
    lines.append(f"hand: {hand or '-'}   (* leads)")
    return "\n".join(lines)
