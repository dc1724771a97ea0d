"""Skull King in plain Python, written from the rules page: slow, readable, sharing nothing with the kernels.

A play is (card id, declared as pirate); the second matters for the Tigress alone. Positions are places in a trick.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

SUITS = ("yellow", "green", "purple", "black")


class Play(NamedTuple):
    card: int
    as_pirate: bool = False


def is_number(play: Play) -> bool:
    return play.card <= 55


def suit(play: Play) -> str:
    return SUITS[play.card // 14]


def rank(play: Play) -> int:
    return play.card % 14 + 1


def is_pirate(play: Play) -> bool:
    return 61 <= play.card <= 65 or (play.card == 66 and play.as_pirate)


def is_skull_king(play: Play) -> bool:
    return play.card == 67


def is_mermaid(play: Play) -> bool:
    return play.card in (68, 69)


def is_kraken(play: Play) -> bool:
    return play.card == 70


def is_whale(play: Play) -> bool:
    return play.card == 71


def is_loot(play: Play) -> bool:
    return play.card in (72, 73)


def is_harmless(play: Play) -> bool:
    """Escape, Loot, or the Tigress as Escape."""
    return 56 <= play.card <= 60 or is_loot(play) or (play.card == 66 and not play.as_pirate)


def lead_suit(trick: list[Play]) -> str | None:
    """The suit to follow, or None while there is none (yet, or for the whole trick)."""
    for place, play in enumerate(trick):
        if is_number(play):
            return suit(play)
        if place == 0 and not is_harmless(play):
            return None
    return None


def may_play(hand: set[int], trick: list[Play], play: Play) -> bool:
    """Follow the lead suit if you hold it, or play any special card."""
    if play.card not in hand:
        return False
    lead = lead_suit(trick)
    if not is_number(play) or lead is None or suit(play) == lead:
        return True
    return not any(card <= 55 and SUITS[card // 14] == lead for card in hand)


def legal_plays(hand: set[int], trick: list[Play]) -> set[Play]:
    options = [Play(card) for card in hand]
    if 66 in hand:
        options.append(Play(66, True))
    return {play for play in options if may_play(hand, trick, play)}


def first(trick: list[Play], is_wanted: Callable[[Play], bool]) -> int | None:
    return next((place for place, play in enumerate(trick) if is_wanted(play)), None)


def winner_by_rank(trick: list[Play], places: list[int]) -> int:
    """The highest rank among these places, the earlier on a tie."""
    best = places[0]
    for place in places:
        if rank(trick[place]) > rank(trick[best]):
            best = place
    return best


def ordinary_winner(trick: list[Play]) -> int:
    """Rules 4 to 6: characters, numbers, nothing but Escapes and Loot."""
    king, mermaid, pirate = first(trick, is_skull_king), first(trick, is_mermaid), first(trick, is_pirate)
    if king is not None and mermaid is not None:
        return mermaid
    for place in (king, pirate, mermaid):
        if place is not None:
            return place
    black = [place for place, play in enumerate(trick) if is_number(play) and suit(play) == "black"]
    if black:
        return winner_by_rank(trick, black)
    lead = lead_suit(trick)
    following = [place for place, play in enumerate(trick) if is_number(play) and suit(play) == lead]
    return winner_by_rank(trick, following) if following else 0


def resolve(trick: list[Play]) -> tuple[int | None, int]:
    """(place of the winner, or None if the trick is destroyed; place of who leads next)."""
    kraken, whale = first(trick, is_kraken), first(trick, is_whale)
    if kraken is not None and whale is not None:
        earlier = min(kraken, whale)
        trick = [Play(56) if place == earlier else play for place, play in enumerate(trick)]
        kraken, whale = first(trick, is_kraken), first(trick, is_whale)
    if kraken is not None:
        rest = [place for place in range(len(trick)) if place != kraken]
        if not rest:  # a trick just begun
            return None, kraken
        return None, rest[ordinary_winner([trick[place] for place in rest])]
    if whale is not None:
        numbers = [place for place, play in enumerate(trick) if is_number(play)]
        if not numbers:
            return None, whale
        return (winner_by_rank(trick, numbers),) * 2
    return (ordinary_winner(trick),) * 2


def bonus(trick: list[Play], winner: int | None) -> int:
    """What the trick adds for its winner if the bid is made, Loot apart."""
    if winner is None:
        return 0
    points = 0
    for play in trick:
        if is_number(play) and rank(play) == 14:
            points += 20 if suit(play) == "black" else 10
    if is_skull_king(trick[winner]):
        points += 30 * sum(map(is_pirate, trick))
    if is_mermaid(trick[winner]):
        points += 40 * sum(map(is_skull_king, trick))
    if is_pirate(trick[winner]):
        points += 20 * sum(map(is_mermaid, trick))
    return points


def allies(trick: list[Play], winner: int | None) -> list[int]:
    """Places of those who played Loot to a trick that another player wins."""
    if winner is None:
        return []
    return [place for place, play in enumerate(trick) if is_loot(play) and place != winner]


def cards_per_player(round_number: int, num_players: int) -> int:
    return 8 if num_players == 8 and round_number in (9, 10) else round_number


class Round:
    """One round, driven from outside: deal and bids at the start, then one play after the other."""

    def __init__(self, round_number: int, leader: int, hands: list[list[int]], bids: list[int]) -> None:
        self.round_number = round_number
        self.hands = [set(hand) for hand in hands]
        self.bids = bids
        self.num_players = len(hands)
        self.leader = leader
        self.trick: list[Play] = []
        self.tricks = [0] * self.num_players
        self.bonuses = [0] * self.num_players
        self.alliances: list[tuple[int, int]] = []

    def seat_to_play(self) -> int:
        return (self.leader + len(self.trick)) % self.num_players

    def legal(self) -> set[Play]:
        return legal_plays(self.hands[self.seat_to_play()], self.trick)

    def may_play(self, play: Play) -> bool:
        return may_play(self.hands[self.seat_to_play()], self.trick, play)

    def play(self, play: Play) -> None:
        self.hands[self.seat_to_play()].remove(play.card)
        self.trick.append(play)
        if len(self.trick) < self.num_players:
            return
        winner, next_leader = resolve(self.trick)
        seats = [(self.leader + place) % self.num_players for place in range(self.num_players)]
        if winner is not None:
            self.tricks[seats[winner]] += 1
            self.bonuses[seats[winner]] += bonus(self.trick, winner)
            self.alliances += [(seats[place], seats[winner]) for place in allies(self.trick, winner)]
        self.leader = seats[next_leader]
        self.trick = []

    def scores(self) -> list[int]:
        scores = []
        for bid, tricks, extra in zip(self.bids, self.tricks, self.bonuses, strict=True):
            if bid == 0:
                score = 10 * self.round_number if tricks == 0 else -10 * self.round_number
            else:
                score = 20 * bid if tricks == bid else -10 * abs(tricks - bid)
            scores.append(score + (extra if tricks == bid else 0))
        for pair in self.alliances:
            if all(self.bids[seat] == self.tricks[seat] for seat in pair):
                for seat in pair:
                    scores[seat] += 20
        return scores
