"""The native batch: every play of thousands of games against the plain reference, and the contract of a NativeGame."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
import yaml

from fasttrain.batch import Slots
from fasttrain.errors import ConfigError, EnvError
from fasttrain_games.skullking import kernels, state
from fasttrain_games.skullking.game import GameView, SkullKingGame
from fasttrain_games.skullking.observation import describe_observation, observation_width
from fasttrain_kernels.threads import new_team
from messages import assert_says, wrong_inputs
from reference import skull_king as reference


def make(num_envs: int, num_players: int = 4, **kwargs: Any) -> tuple[SkullKingGame, Slots]:
    game = SkullKingGame(num_envs, num_players, **kwargs)
    slots = Slots(
        observations=np.full((num_envs, observation_width(num_players)), 9, np.float32),
        actions=np.zeros(num_envs, np.int64),
        rewards=np.full(num_envs, 9, np.float32),
        terminations=np.ones(num_envs, np.bool_),
        truncations=np.ones(num_envs, np.bool_),
        action_masks=np.zeros((num_envs, 86), np.bool_),
    )
    game.bind(slots)
    return game, slots


def reset(game: SkullKingGame, seed: int | None = 0) -> None:
    seeds = [None if seed is None else seed + i for i in range(game.num_envs)]
    game.reset(np.arange(game.num_envs), seeds)


def draw_actions(masks: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Uniform over the legal actions of each row."""
    keys = rng.random(masks.shape)
    keys[~masks] = -1.0
    return keys.argmax(axis=1)


def legal_lists(masks: np.ndarray) -> list[list[int]]:
    """The legal actions of each row, ascending."""
    ends = masks.sum(axis=1).cumsum().tolist()
    actions = masks.nonzero()[1].tolist()
    return [actions[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]


# Distinct powers of two, so that no sum of some looks like another.
REWARDS = {"reward_round_scale": 0.0078125, "reward_win": 2.0, "shaping_bid_made": 0.25, "shaping_bid_error": 0.125,
           "shaping_trick_won": 0.5, "shaping_trick_toward_bid": 0.0625}  # fmt: skip


class Table:
    """One game played by the reference, decision by decision, beside the batch."""

    def __init__(self, view: GameView) -> None:
        self.totals = [0] * len(view.totals)
        self.dealer, self.number, self.decisions = view.dealer, 1, 0
        self.deal(view)

    def deal(self, view: GameView) -> None:
        seats = len(self.totals)
        assert (view.phase, view.round_number, view.dealer) == (state.BIDDING, self.number, self.dealer)
        assert view.totals == self.totals
        assert [len(hand) for hand in view.hands] == [reference.cards_per_player(self.number, seats)] * seats
        assert len({card for hand in view.hands for card in hand}) == sum(map(len, view.hands))
        self.hands, self.bids, self.round, self.played = view.hands, [], None, 0

    @property
    def seat(self) -> int:
        """Whose decision it is: bids are asked for from the learner on, cards as the trick goes round."""
        return len(self.bids) if self.round is None else int(self.round.seat_to_play())

    def legal(self) -> list[int]:
        if self.round is None:
            return list(range(self.number + 1))
        return sorted(11 + (74 if play.as_pirate else play.card) for play in self.round.legal())

    def decide(self, action: int) -> tuple[float, bool]:
        """The learner's reward for it, and whether the game is over."""
        seats = len(self.totals)
        assert action in self.legal()
        self.decisions += self.seat == 0
        if self.round is None:
            self.bids.append(action)
            if len(self.bids) == seats:
                self.round = reference.Round(self.number, (self.dealer + 1) % seats, self.hands, self.bids)
            return 0.0, False
        before = self.round.tricks[0]
        self.round.play(reference.Play(66, True) if action == 85 else reference.Play(action - 11))
        self.played += 1
        won, bid, reward = self.round.tricks[0], self.bids[0], 0.0
        if won > before:
            toward = REWARDS["shaping_trick_toward_bid"]
            reward += REWARDS["shaping_trick_won"] + (toward if won <= bid else -toward)
        if any(self.round.hands):
            return reward, False
        scores = self.round.scores()
        self.totals = [total + score for total, score in zip(self.totals, scores, strict=True)]
        reward += REWARDS["reward_round_scale"] * scores[0] + REWARDS["shaping_bid_made"] * (won == bid)
        reward -= REWARDS["shaping_bid_error"] * abs(won - bid)
        over = self.number == 10
        if over:
            reward += REWARDS["reward_win"] * (1 if self.totals[0] == max(self.totals) else -1)
        self.number, self.dealer = self.number + 1, (self.dealer + 1) % seats
        return reward, over

    def follow(self, view: GameView) -> tuple[float, bool]:
        """What the learner's decision brought with all that bots decided after it."""
        actions = [*(view.bids if self.round is None else []), *(11 + code for code in view.plays[self.played :])]
        told = [self.decide(action) for action in actions]
        return sum(reward for reward, _ in told), told[-1][1]

    def check(self, view: GameView) -> None:
        assert view.totals == self.totals
        if self.round is None:
            assert view.bids[: len(self.bids)] == self.bids
            return
        now = self.round
        table = [74 if play.as_pirate else play.card for play in now.trick]
        assert (view.trick, view.leader, view.bids) == (table, now.leader, self.bids)
        assert (view.tricks, view.bonuses, view.alliances) == (now.tricks, now.bonuses, now.alliances)
        assert view.hands == [sorted(hand) for hand in now.hands]


def side_by_side(game: SkullKingGame, slots: Slots, decisions: int, follow: bool) -> Counter[str]:
    """Play one game in each env with random legal actions: who decides, masks, states, rewards and results, after
    every decision from outside. How the games ended."""
    rng, reasons = np.random.default_rng(1), Counter[str]()
    tables = [Table(game.peek(i)) for i in range(game.num_envs)]
    for _ in range(decisions):
        assert game.opponents_turn.tolist() == [table.seat != 0 for table in tables]
        assert legal_lists(slots.action_masks) == [table.legal() for table in tables]
        slots.actions[:] = draw_actions(slots.action_masks, rng)
        game.step()
        for i, table in enumerate(tables):
            view, number = game.peek(i), table.number
            reward, over = table.follow(view) if follow else table.decide(int(slots.actions[i]))
            assert slots.rewards[i] == pytest.approx(reward, abs=1e-5)
            assert slots.terminations[i] == over
            if over:
                reasons[check_result(game.episode_info(i), table)] += 1
            elif table.number > number:
                table.deal(view)
            else:
                table.check(view)
                assert view.seat == table.seat
    assert slots.terminations.all()
    assert not game.opponents_turn.any()  # a new game begins with the learner's bid
    return reasons


def check_result(info: dict[str, Any], table: Table) -> str:
    own, *others = table.totals
    winners = [seat for seat, total in enumerate(table.totals) if total == max(table.totals)]
    assert (info["winner"], info["is_win"]) == (winners[0], 0 in winners)
    assert (info["score"], info["score_diff"], info["turn"]) == (own, own - max(others), table.decisions)
    assert info["opponents_beaten"] == pytest.approx(np.mean([(own > it) + (own == it) / 2 for it in others]))
    assert info["end_reason"] == ("lost" if 0 not in winners else "won" if len(winners) == 1 else "shared")
    return str(info["end_reason"])


def decisions_of(num_players: int) -> int:
    """Of one seat in a game."""
    return 10 + sum(reference.cards_per_player(number, num_players) for number in range(1, 11))


MIXED = {"random": 2, "easy": 1, "medium": 1, "hard": 1}
GAMES = {2: 300, 3: 80, 4: 50, 5: 30, 6: 25, 8: 20}  # of each number of players


@pytest.mark.parametrize(("num_players", "count"), GAMES.items())
def test_games_agree_with_the_reference(num_players: int, count: int) -> None:
    game, slots = make(count, num_players, opponents=MIXED, **REWARDS)
    reset(game, num_players)
    reasons = side_by_side(game, slots, decisions_of(num_players), follow=True)
    assert sum(reasons.values()) == count
    assert set(reasons) == {"won", "shared", "lost"} or num_players > 2


def play(game: SkullKingGame, slots: Slots, steps: int, seed: int) -> list[tuple[Any, ...]]:
    """Random legal steps; the trajectory with everything the step wrote, final observations included."""
    rng = np.random.default_rng(seed)
    trajectory = []
    for _ in range(steps):
        slots.actions[:] = draw_actions(slots.action_masks, rng)
        game.step()
        ended = slots.terminations.copy()
        seen = (slots.actions, slots.observations, slots.action_masks, slots.rewards, ended)
        infos = [game.episode_info(i) for i in np.flatnonzero(ended)]
        trajectory.append((*(array.copy() for array in seen), game.final_observations[ended].copy(), infos))
    return trajectory


def test_a_seed_means_the_same_game_at_any_index_and_after_any_past() -> None:
    game, slots = make(3)
    reset(game)
    play(game, slots, 100, 1)
    game.reset(np.array([2, 0]), [77, 77])
    fresh, fresh_slots = make(1)
    fresh.reset(np.array([0]), [77])
    rng = np.random.default_rng(1)
    for _ in range(140):
        observations = np.array(slots.observations)
        assert np.array_equal(observations[0], observations[2])
        assert np.array_equal(observations[0], np.array(fresh_slots.observations)[0])
        assert game.peek(0).hands == game.peek(2).hands == fresh.peek(0).hands
        fresh_slots.actions[:] = draw_actions(fresh_slots.action_masks, rng)
        slots.actions[[0, 2]] = fresh_slots.actions[0]
        slots.actions[1] = slots.action_masks[1].argmax()
        game.step()
        fresh.step()


def test_neighbouring_seeds_deal_unrelated_hands() -> None:
    game, _ = make(2000, 2)
    reset(game, 0)
    first = np.array([game.peek(i).hands[0][0] for i in range(2000)])
    counts = np.bincount(first, minlength=74)
    assert counts.min() > 5  # 27 expected
    assert counts.max() < 60
    assert abs(np.corrcoef(first[:-1], first[1:])[0, 1]) < 0.08
    dealers = np.bincount([game.peek(i).dealer for i in range(2000)])
    assert abs(dealers[0] - 1000) < 120


def test_episodes_end_after_65_decisions_and_reset_in_the_same_step() -> None:
    game, slots = make(4)
    reset(game)
    trajectory = play(game, slots, 131, 2)
    ended = np.array([step[4] for step in trajectory])
    assert np.flatnonzero(ended.any(axis=1)).tolist() == [64, 129]
    assert ended[64].all()
    blocks = describe_observation(4)
    _, observations, masks, _, _, finals, infos = trajectory[64]
    assert masks[:, :2].all()
    assert masks.sum() == 8  # round 1 again: bid 0 or 1
    assert observations[:, blocks["round"]].argmax(axis=1).tolist() == [0] * 4
    assert observations[:, blocks["is_bidding"]].tolist() == [[1]] * 4
    assert observations[:, blocks["scores"]].any() == np.False_
    assert finals[:, blocks["round"]].argmax(axis=1).tolist() == [9] * 4
    assert finals[:, blocks["hand"]].any() == np.False_
    assert finals[:, blocks["seen"]].sum(axis=1).tolist() == [40] * 4
    totals = np.sum([step[3] for step in trajectory[:65]], axis=0)
    for final, info, total in zip(finals, infos, totals, strict=True):
        assert total == pytest.approx(info["score"] / 100 + (1 if info["is_win"] else -1), abs=1e-5)
        assert final[blocks["scores"]][0] == pytest.approx(np.clip(info["score"] / 500, -1, 1))
        assert info["turn"] == 65
        assert 0 <= info["bids_made"] <= 10
    assert not slots.truncations.any()
    assert game.opponents_ns > 0


@pytest.mark.parametrize("num_players", [2, 8])
def test_masks_are_never_empty_and_observations_stay_in_the_box(num_players: int) -> None:
    game, slots = make(200, num_players, opponents=MIXED)
    reset(game, 9)
    used = np.zeros(86, np.bool_)
    for _, observations, masks, _, _, finals, _ in play(game, slots, 140, 3):
        assert masks.any(axis=1).all()
        assert max(np.abs(observations).max(), np.abs(finals).max(initial=0)) <= 1
        used |= masks.any(axis=0)
    assert used.all()  # every action is legal somewhere
    assert game.observation_space.contains(np.array(slots.observations)[0])


def test_observation_shows_the_table_as_the_learner_sees_it() -> None:
    """Every block against the state."""
    game, slots = make(25, opponents=MIXED)
    reset(game, 21)
    blocks = describe_observation(4)
    rng = np.random.default_rng(4)
    for _ in range(64):
        slots.actions[:] = draw_actions(slots.action_masks, rng)
        game.step()
        for i, row in enumerate(np.array(slots.observations)):
            check_observation({name: row[block] for name, block in blocks.items()}, game.peek(i))


def check_observation(seen: dict[str, np.ndarray], view: GameView) -> None:
    bidding = view.phase == state.BIDDING
    plays = [] if bidding else view.plays
    assert np.flatnonzero(seen["hand"]).tolist() == view.hands[0]
    assert np.flatnonzero(seen["seen"]).tolist() == sorted(66 if code == 74 else code for code in plays)
    assert np.flatnonzero(seen["round"]).tolist() == [view.round_number - 1]
    assert seen["is_bidding"][0] == bidding
    assert seen["cards_left"][0] == pytest.approx(len(view.hands[0]) / 10)
    assert seen["cards_played"][0] == pytest.approx(len(view.trick) / 3)
    assert seen["scores"] == pytest.approx(np.clip(np.array(view.totals) / 500, -1, 1))
    assert np.flatnonzero(seen["leads"]).tolist() == [view.leader]
    assert seen["tigress"][0] == (1 if 74 in plays else -1 if 66 in plays else 0)
    if bidding:
        for name in ("bids", "tricks", "needs", "need", "alliances", "is_winning", "lead_suit"):
            assert not seen[name].any()
        return
    needs = np.array(view.bids) - np.array(view.tricks)
    assert seen["trick_number"][0] == pytest.approx((view.round_number - len(view.hands[0])) / 10)
    assert seen["bids"] == pytest.approx(np.array(view.bids) / 10)
    assert seen["tricks"] == pytest.approx(np.array(view.tricks) / 10)
    assert seen["needs"] == pytest.approx(needs / 10)
    assert np.flatnonzero(seen["need"]).tolist() == [max(0, needs[0] + 1)]
    assert seen["bonus"][0] == pytest.approx(min(1, view.bonuses[0] / 100))
    allied = [sum(seat in pair for pair in view.alliances) / 2 for seat in range(4)]
    assert seen["alliances"].tolist() == allied
    trick = [reference.Play(66, True) if code == 74 else reference.Play(code) for code in view.trick]
    lead = reference.lead_suit(trick)
    closed = bool(trick) and not reference.is_number(trick[0]) and not reference.is_harmless(trick[0])
    expected_lead = [4] if closed else [reference.SUITS.index(lead)] if lead else []
    assert np.flatnonzero(seen["lead_suit"]).tolist() == expected_lead
    winner = reference.resolve(trick)[0] if trick else None
    assert np.flatnonzero(seen["is_winning"]).tolist() == ([] if winner is None else [(view.leader + winner) % 4])
    check_trick_cards(seen, view, trick)


def check_trick_cards(seen: dict[str, np.ndarray], view: GameView, trick: list[Any]) -> None:
    by_seat = {(view.leader + place) % 4: (place, card) for place, card in enumerate(trick)}
    for seat in (1, 2, 3):
        block = seen[f"trick_card_{seat}"]
        if seat not in by_seat:
            assert not block.any()
            continue
        place, card = by_seat[seat]
        expected = np.zeros(13)
        expected[12] = (place + 1) / 4
        if reference.is_number(card):
            expected[card.card // 14] = 1
            expected[4] = reference.rank(card) / 14
        else:
            tests = ("harmless", "pirate", "skull_king", "mermaid", "kraken", "whale", "loot")
            kinds = [bool(getattr(reference, f"is_{name}")(card)) for name in tests]
            kinds[0] = kinds[0] and not kinds[6]
            expected[5:12] = kinds
        assert block == pytest.approx(expected)


def test_without_card_memory_only_the_current_trick_tells_of_cards() -> None:
    """The same games with and without, beside the plain rule; what is hidden is played alike."""
    opponents = ["self", "medium", "medium"]
    full, full_slots = make(20, opponents=opponents)
    game, slots = make(20, opponents=opponents, card_memory=False)
    rng, blocks, hidden, ended = np.random.default_rng(5), describe_observation(4), 0, 0
    reset(full, 3)
    reset(game, 3)
    for _ in range(200):
        for i in range(20):
            expected = without_memory(np.array(full_slots.observations)[i], game.peek(i), blocks)
            hidden += not np.array_equal(expected, np.array(full_slots.observations)[i])
            assert np.array_equal(np.array(slots.observations)[i], expected)
        for i in np.flatnonzero(slots.terminations):
            ended += 1
            bare = full.final_observations[i].copy()
            for name in ("seen", "tigress", "bonus", "alliances"):
                bare[blocks[name]] = 0
            assert np.array_equal(game.final_observations[i], bare)
        assert np.array_equal(slots.action_masks, full_slots.action_masks)
        full_slots.actions[:] = slots.actions[:] = draw_actions(slots.action_masks, rng)
        full.step()
        game.step()
    assert hidden > 1000
    assert ended >= 20


def without_memory(row: np.ndarray, view: GameView, blocks: dict[str, slice]) -> np.ndarray:
    """The plain rule: of cards that were played a player knows those that lie on the table."""
    row = row.copy()
    for name in ("seen", "tigress", "bonus", "alliances"):
        row[blocks[name]] = 0
    if view.phase == state.PLAYING:
        for code in view.trick:
            card = 66 if code == 74 else code
            row[blocks["seen"]][card] = 1
            if card == 66:
                row[blocks["tigress"]] = 1 if code == 74 else -1
    return row


@pytest.mark.parametrize("num_players", [2, 5])
def test_hidden_hands_do_not_leak(num_players: int) -> None:
    """Other hands, the undealt deck and unrevealed bids are permuted; the learner must see exactly the same."""
    game, slots = make(24, num_players)
    reset(game, 31)
    rng = np.random.default_rng(6)
    changed = 0
    for _ in range(60):
        slots.actions[:] = draw_actions(slots.action_masks, rng)
        game.step()
        games = game.records.copy()
        for record in games:
            changed += swap_hidden_cards(record, num_players, rng)
        shadow, shadow_slots = make(24, num_players)
        shadow.records = games
        write_present(shadow)
        assert np.array_equal(slots.observations, shadow_slots.observations)
        assert np.array_equal(slots.action_masks, shadow_slots.action_masks)
    assert changed > 500


def swap_hidden_cards(record: Any, num_players: int, rng: np.random.Generator) -> bool:
    """Redeal every card that the learner cannot see among the other hands and the deck, sizes kept."""
    own = int(record["hand_numbers"][0]) | int(record["hand_specials"][0]) << 56
    seen = int(record["seen_numbers"]) | int(record["seen_specials"]) << 56
    hidden = [card for card in range(74) if not (own | seen) >> card & 1]
    rng.shuffle(hidden)
    before = record["hand_numbers"].copy()
    for seat in range(1, num_players):
        held = int(record["hand_numbers"][seat]).bit_count() + int(record["hand_specials"][seat]).bit_count()
        bits = sum(1 << hidden.pop() for _ in range(held))
        record["hand_numbers"][seat] = bits & (1 << 56) - 1
        record["hand_specials"][seat] = bits >> 56
    record["deck"] = rng.permutation(74)
    record["rng"] = rng.integers(2**63)
    if record["phase"] == state.BIDDING:
        record["bids"] = rng.integers(0, 5, 8)
    record["levels"] = rng.integers(0, 4, 8)
    return bool((before != record["hand_numbers"]).any())


def write_present(game: SkullKingGame) -> None:
    """Write observations and masks of the present state, as a step without actions would."""
    kernels.write_step(game.records, np.arange(game.num_envs), *game.written, new_team(), 0)


def test_an_illegal_action_is_refused_by_name_and_nothing_is_applied() -> None:
    game, slots = make(3)
    reset(game)
    before = [game.peek(i) for i in range(3)]
    slots.actions[:] = [0, 5, 99]
    with pytest.raises(EnvError, match=r"env 1: action 5 is illegal now, legal actions are \[0, 1\]"):
        game.step()
    assert [game.peek(i) for i in range(3)] == before
    slots.actions[:] = 0
    game.step()
    for action in (-1, 86, 10**12, *np.flatnonzero(~slots.action_masks[0])):
        slots.actions[:] = slots.action_masks.argmax(axis=1)
        slots.actions[0] = action
        with pytest.raises(EnvError, match=f"env 0: action {action} is illegal"):
            game.step()


def test_nothing_is_played_before_reset() -> None:
    game, _ = make(2)
    game.reset(np.array([0]), [0])
    with pytest.raises(EnvError, match=r"env 1 has no game .* reset"):
        game.step()
    with pytest.raises(EnvError, match="reset"):
        game.bot_actions("easy")


@pytest.mark.parametrize("arguments", wrong_inputs("arguments of SkullKingGame"))
def test_bad_settings_are_named(arguments: str) -> None:
    with pytest.raises(ConfigError) as told:
        SkullKingGame(**{"num_envs": 1, **yaml.safe_load(arguments)})
    assert_says("arguments of SkullKingGame", arguments, str(told.value))


@pytest.mark.parametrize("num_players", [2, 4, 8])
def test_description_covers_the_observation_without_gaps(num_players: int) -> None:
    blocks = list(describe_observation(num_players).values())
    assert blocks[0].start == 0
    assert all(a.stop == b.start for a, b in itertools.pairwise(blocks))
    assert blocks[-1].stop == observation_width(num_players) == SkullKingGame(1, num_players).observation_space.shape[0]
    assert observation_width(4) == 248
    with pytest.raises(ValueError, match="num_players=9"):
        describe_observation(9)
