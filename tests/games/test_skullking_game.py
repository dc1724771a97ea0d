"""The native batch: every play of thousands of games against the plain reference, and the contract of a NativeGame."""

from __future__ import annotations

import importlib.util
import itertools
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fasttrain.batch import Slots
from fasttrain.errors import ConfigError, EnvError, EnvSpecError
from fasttrain.threads import ThreadChoice, new_team
from fasttrain_games.skullking import kernels, state
from fasttrain_games.skullking.game import GameView, SkullKingGame
from fasttrain_games.skullking.observation import describe_observation, observation_width


def load_reference() -> ModuleType:
    path = Path(__file__).resolve().parents[1] / "reference" / "skull_king.py"
    spec = importlib.util.spec_from_file_location("skull_king_reference", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


reference = load_reference()


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


class Follower:
    """Replays one game of the batch with the reference, round by round, from what `peek` shows."""

    def __init__(self, view: GameView) -> None:
        self.totals = [0] * len(view.totals)
        self.dealer = view.dealer
        self.begin_round(view, 1)

    def begin_round(self, view: GameView, number: int) -> None:
        assert view.phase == state.BIDDING
        assert view.round_number == number
        assert view.dealer == self.dealer
        seats = len(view.hands)
        size = reference.cards_per_player(number, seats)
        assert [len(hand) for hand in view.hands] == [size] * seats
        assert len({card for hand in view.hands for card in hand}) == size * seats
        assert view.totals == self.totals
        self.number = number
        self.hands = view.hands
        self.learner_masks: list[list[int]] = []  # legal actions at each decision

    def end_round(self, bids: list[int], plays: list[int]) -> None:
        """Feed the round's plays to the reference; every one must be legal and every learner's mask exact."""
        seats = len(bids)
        assert all(0 <= bid <= self.number for bid in bids)
        bid_mask, *masks = self.learner_masks
        assert bid_mask == list(range(self.number + 1))
        current = reference.Round(self.number, (self.dealer + 1) % seats, self.hands, bids)
        decisions = 0
        for code in plays:
            play = reference.Play(66, True) if code == 74 else reference.Play(code)
            assert current.may_play(play)
            if current.seat_to_play() == 0:
                expected = sorted(11 + (74 if option.as_pirate else option.card) for option in current.legal())
                assert masks[decisions] == expected
                decisions += 1
            current.play(play)
        assert decisions == len(masks)
        assert not any(current.hands)
        self.totals = [total + score for total, score in zip(self.totals, current.scores(), strict=True)]
        self.dealer = (self.dealer + 1) % seats


def follow_games(num_envs: int, num_players: int, opponents: Any, seed: int) -> Counter[str]:
    """Play one game in each env with random legal actions and compare every one with the reference."""
    game, slots = make(num_envs, num_players, opponents=opponents)
    reset(game, seed)
    rng = np.random.default_rng(seed)
    followers = [Follower(game.peek(i)) for i in range(num_envs)]
    reasons: Counter[str] = Counter()
    assert slots.action_masks is not None
    for turn in range(10 + sum(reference.cards_per_player(r, num_players) for r in range(1, 11))):
        for follower, legal in zip(followers, legal_lists(slots.action_masks), strict=True):
            follower.learner_masks.append(legal)
        slots.actions[:] = draw_actions(slots.action_masks, rng)
        before = [follower.totals[0] for follower in followers]
        game.step()
        over = slots.action_masks[:, 0].tolist()  # bidding again
        for i, follower in enumerate(followers):
            if over[i]:
                view = game.peek(i)
                follower.end_round(view.bids, view.plays)
                ended = follower.number == 10
                assert bool(slots.terminations[i]) is ended
                reward = (follower.totals[0] - before[i]) / 100
                if ended:
                    info = game.episode_info(i)
                    reasons[check_result(info, follower.totals, turn + 1)] += 1
                    reward += 1 if info["is_win"] else -1
                else:
                    follower.begin_round(view, follower.number + 1)
                assert abs(slots.rewards[i] - reward) < 1e-6
        assert not slots.rewards[~slots.action_masks[:, 0]].any()
    assert slots.terminations.all()
    return reasons


def check_result(info: dict[str, Any], totals: list[int], turn: int) -> str:
    best = max(totals)
    winners = [seat for seat, total in enumerate(totals) if total == best]
    assert info["winner"] == winners[0]
    assert info["is_win"] is (0 in winners)
    assert info["score"] == totals[0]
    assert info["score_diff"] == totals[0] - max(totals[1:])
    assert info["turn"] == turn
    duels = [(totals[0] > total) + (totals[0] == total) / 2 for total in totals[1:]]
    assert info["opponents_beaten"] == pytest.approx(np.mean(duels))
    reason = "lost" if 0 not in winners else "won" if len(winners) == 1 else "shared"
    assert info["end_reason"] == reason
    return reason


OPPONENTS = st.sampled_from(["random", "easy", "medium", "hard", {"random": 2, "easy": 1, "medium": 1, "hard": 1}])
# Games per example for 2 to 8 players, times 20 examples: 18,000 games, more of the small ones, which play faster.
GAMES = {2: 150, 3: 110, 4: 75, 5: 40, 6: 30, 7: 25, 8: 20}


@pytest.mark.parametrize("num_players", GAMES)
@settings(max_examples=12)
@given(opponents=OPPONENTS, seed=st.integers(0, 2**32))
def test_games_agree_with_the_reference(num_players: int, opponents: Any, seed: int) -> None:
    count = GAMES[num_players]
    assert sum(follow_games(count, num_players, opponents, seed).values()) == count


def test_shared_wins_occur_and_count_as_wins() -> None:
    reasons = follow_games(400, 2, "random", 5)
    assert set(reasons) == {"won", "shared", "lost"}
    assert reasons["won"] > 100 < reasons["lost"]


def test_the_follower_notices_a_wrong_score_and_a_wrong_mask() -> None:
    """The comparison itself must be able to fail."""
    game, slots = make(1)
    reset(game)
    follower = Follower(game.peek(0))
    assert slots.action_masks is not None
    follower.learner_masks += legal_lists(slots.action_masks)
    game.step()
    bids = game.peek(0).bids
    follower.learner_masks += legal_lists(slots.action_masks)
    slots.actions[0] = slots.action_masks[0].argmax()
    game.step()
    view = game.peek(0)
    masks = list(follower.learner_masks)
    follower.learner_masks = [masks[0], [*masks[1], 85]]
    with pytest.raises(AssertionError):
        follower.end_round(bids, view.plays)
    follower.learner_masks = masks
    follower.end_round(bids, view.plays)
    follower.totals[1] += 1
    with pytest.raises(AssertionError):
        follower.begin_round(view, 2)


def test_each_opponents_bid_and_mid_round_state_agree_step_by_step() -> None:
    """Tricks won, bonuses, alliances, leader and table after every single decision, in 40 games of 5."""
    game, slots = make(40, 5, opponents={"random": 1, "hard": 1})
    reset(game, 11)
    rng = np.random.default_rng(11)
    assert slots.action_masks is not None
    dealt = [game.peek(i).hands for i in range(40)]
    compared = 0
    for _ in range(65):
        slots.actions[:] = draw_actions(slots.action_masks, rng)
        game.step()
        for i in range(40):
            view = game.peek(i)
            if view.phase == state.BIDDING:
                dealt[i] = view.hands
                continue
            current = reference.Round(view.round_number, (view.dealer + 1) % 5, dealt[i], view.bids)
            for code in view.plays:
                current.play(reference.Play(66, True) if code == 74 else reference.Play(code))
            table = [74 if play.as_pirate else play.card for play in current.trick]
            assert (view.tricks, view.bonuses, view.leader) == (current.tricks, current.bonuses, current.leader)
            assert (view.trick, view.alliances) == (table, current.alliances)
            assert view.hands == [sorted(hand) for hand in current.hands]
            compared += 1
    assert compared == 40 * 55


def play(game: SkullKingGame, slots: Slots, steps: int, seed: int) -> list[tuple[Any, ...]]:
    """Random legal steps; the trajectory with everything the step wrote, final observations included."""
    rng = np.random.default_rng(seed)
    trajectory = []
    assert slots.action_masks is not None
    for _ in range(steps):
        slots.actions[:] = draw_actions(slots.action_masks, rng)
        game.step()
        ended = slots.terminations.copy()
        trajectory.append(
            (
                slots.actions.copy(),
                np.array(slots.observations),
                slots.action_masks.copy(),
                slots.rewards.copy(),
                ended,
                game.final_observations[ended].copy(),
                [game.episode_info(i) for i in np.flatnonzero(ended)],
            )
        )
    return trajectory


def assert_same(a: list[tuple[Any, ...]], b: list[tuple[Any, ...]]) -> None:
    for step_a, step_b in zip(a, b, strict=True):
        for part_a, part_b in zip(step_a[:-1], step_b[:-1], strict=True):
            assert part_a.dtype == part_b.dtype
            assert np.array_equal(part_a, part_b)
        assert step_a[-1] == step_b[-1]


MIXED = {"random": 1, "easy": 1, "medium": 1, "hard": 1}


def test_same_seed_and_actions_give_the_same_trajectory() -> None:
    trajectories = []
    for seed in (3, 3, 4):
        game, slots = make(8, opponents=MIXED)
        reset(game, seed)
        trajectories.append(play(game, slots, 150, 1))
    assert_same(trajectories[0], trajectories[1])
    assert not np.array_equal(trajectories[0][0][1], trajectories[2][0][1])


def test_a_seed_means_the_same_game_at_any_index_and_after_any_past() -> None:
    game, slots = make(3)
    reset(game)
    play(game, slots, 100, 1)
    game.reset(np.array([2, 0]), [77, 77])
    fresh, fresh_slots = make(1)
    fresh.reset(np.array([0]), [77])
    assert fresh_slots.action_masks is not None
    rng = np.random.default_rng(1)
    for _ in range(140):
        observations = np.array(slots.observations)
        assert np.array_equal(observations[0], observations[2])
        assert np.array_equal(observations[0], np.array(fresh_slots.observations)[0])
        assert game.peek(0).hands == game.peek(2).hands == fresh.peek(0).hands
        fresh_slots.actions[:] = draw_actions(fresh_slots.action_masks, rng)
        slots.actions[[0, 2]] = fresh_slots.actions[0]
        assert slots.action_masks is not None
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


def test_reset_without_a_seed_goes_on_with_the_stream_or_begins_one_from_entropy() -> None:
    hands = []
    for seed in (5, 5, 6):
        game, _ = make(1)
        reset(game, seed)
        game.reset(np.array([0]), [None])
        hands.append((game.peek(0).hands, game.peek(0).dealer))
    assert hands[0] == hands[1] != hands[2]
    decks = []
    for _ in range(2):
        game, slots = make(30)
        reset(game, None)
        decks.append([game.peek(i).hands for i in range(30)])
        assert slots.action_masks is not None
        assert slots.action_masks[:, :2].all()
    assert decks[0] != decks[1]


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
    for final, info in zip(finals, infos, strict=True):
        assert final[blocks["scores"]][0] == pytest.approx(np.clip(info["score"] / 500, -1, 1))
        assert info["turn"] == 65
        assert 0 <= info["bids_made"] <= 10
    assert not slots.truncations.any()
    assert game.opponents_ns > 0


@pytest.mark.parametrize("num_players", [2, 4, 8])
def test_masks_are_never_empty_and_observations_stay_in_the_box(num_players: int) -> None:
    game, slots = make(200, num_players, opponents=MIXED)
    reset(game, 9)
    used = np.zeros(86, np.bool_)
    for step in play(game, slots, 140, 3):
        _, observations, masks, _, _, finals, _ = step
        assert masks.any(axis=1).all()
        assert np.abs(observations).max() <= 1
        assert np.abs(finals).max(initial=0) <= 1
        used |= masks.any(axis=0)
    assert used.all()  # every action is legal somewhere
    assert game.observation_space.contains(np.array(slots.observations)[0])


def test_observation_shows_the_table_as_the_learner_sees_it() -> None:
    """Every block against the state, in thousands of states."""
    game, slots = make(60, 4, opponents=MIXED)
    reset(game, 21)
    blocks = describe_observation(4)
    assert [block.start for block in blocks.values()] == [0, *[block.stop for block in blocks.values()]][:-1]
    rng = np.random.default_rng(4)
    assert slots.action_masks is not None
    for _ in range(64):
        slots.actions[:] = draw_actions(slots.action_masks, rng)
        game.step()
        for i in range(60):
            row = np.array(slots.observations)[i]
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


@pytest.mark.parametrize("num_players", [3, 4])
def test_without_card_memory_only_the_current_trick_tells_of_cards(num_players: int) -> None:
    """The same games with and without, beside the plain rule; what is hidden is played alike."""
    opponents = ["self", *["medium"] * (num_players - 2)]
    full, full_slots = make(40, num_players, opponents=opponents)
    game, slots = make(40, num_players, opponents=opponents, card_memory=False)
    rng, blocks, hidden, ended = np.random.default_rng(5), describe_observation(num_players), 0, 0
    reset(full, 3)
    reset(game, 3)
    for _ in range(200):
        for i in range(40):
            expected = without_memory(np.array(full_slots.observations)[i], game.peek(i), blocks)
            hidden += not np.array_equal(expected, np.array(full_slots.observations)[i])
            assert np.array_equal(np.array(slots.observations)[i], expected)
        for i in np.flatnonzero(slots.terminations):
            ended += 1
            bare = full.final_observations[i].copy()
            for name in ("seen", "tigress", "bonus", "alliances"):
                bare[blocks[name]] = 0
            assert np.array_equal(game.final_observations[i], bare)
        assert slots.action_masks is not None
        assert np.array_equal(slots.action_masks, full_slots.action_masks)
        full_slots.actions[:] = slots.actions[:] = draw_actions(slots.action_masks, rng)
        full.step()
        game.step()
    assert hidden > 1000
    assert ended > 20


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


@pytest.mark.parametrize("num_players", [2, 4, 8])
def test_hidden_hands_do_not_leak(num_players: int) -> None:
    """Other hands, the undealt deck and unrevealed bids are permuted; the learner must see exactly the same."""
    game, slots = make(64, num_players)
    reset(game, 31)
    rng = np.random.default_rng(6)
    assert slots.action_masks is not None
    changed = 0
    for _ in range(60):
        slots.actions[:] = draw_actions(slots.action_masks, rng)
        game.step()
        games = game.records.copy()
        for record in games:
            changed += swap_hidden_cards(record, num_players, rng)
        shadow, shadow_slots = make(64, num_players)
        shadow.records = games
        write_present(shadow, shadow_slots)
        assert shadow_slots.action_masks is not None
        assert np.array_equal(slots.observations, shadow_slots.observations)
        assert np.array_equal(slots.action_masks, shadow_slots.action_masks)
    assert changed > 1000


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


def write_present(game: SkullKingGame, slots: Slots) -> None:
    """Write observations and masks of the present state, as a step without actions would."""
    finals = game.final_observations
    kernels.write_step(
        game.records,
        np.arange(game.num_envs),
        slots.observations,
        slots.action_masks,
        slots.rewards,
        slots.terminations,
        slots.truncations,
        finals,
        game.opponents_turn,
        new_team(),
        0,
    )


def test_shaping_terms_add_what_they_say() -> None:
    """Each term at 0.25 in turn: the difference to the plain reward, against the tricks and bids of the reference."""
    plain_game, plain_slots = make(50)
    reset(plain_game, 8)
    plain = play(plain_game, plain_slots, 130, 5)
    actions, rewards = [step[0] for step in plain], np.array([step[3] for step in plain])
    expected = expected_shaping(actions)
    for name, terms in expected.items():
        game, slots = make(50, **{name: 0.25})
        reset(game, 8)
        shaped = np.array([step[3] for step in play(game, slots, 130, 5)])
        assert shaped - rewards == pytest.approx(0.25 * terms, abs=1e-5), name
        assert np.abs(terms).sum() > 100


def expected_shaping(actions: list[np.ndarray]) -> dict[str, np.ndarray]:
    game, slots = make(50)
    reset(game, 8)
    names = ("shaping_bid_made", "shaping_bid_error", "shaping_trick_won", "shaping_trick_toward_bid")
    terms = {name: np.zeros((len(actions), 50)) for name in names}
    leaders = [game.peek(i).leader for i in range(50)]
    won = [0] * 50
    for step, chosen in enumerate(actions):
        slots.actions[:] = chosen
        game.step()
        for i in range(50):
            view = game.peek(i)
            over = view.phase == state.BIDDING
            bid, tricks = view.bids[0], learners_tricks(view.plays, leaders[i], 4)
            for number in range(won[i] + 1, tricks + 1):
                terms["shaping_trick_won"][step, i] += 1
                terms["shaping_trick_toward_bid"][step, i] += 1 if number <= bid else -1
            won[i] = 0 if over else tricks
            if over:
                terms["shaping_bid_made"][step, i] = tricks == bid
                terms["shaping_bid_error"][step, i] = -abs(tricks - bid)
                leaders[i] = view.leader
    return terms


def learners_tricks(codes: list[int], leader: int, seats: int) -> int:
    """Tricks of seat 0 among the full tricks of a round's plays."""
    plays = [reference.Play(66, True) if code == 74 else reference.Play(code) for code in codes]
    tricks = 0
    for start in range(0, len(plays) - seats + 1, seats):
        winner, following = reference.resolve(plays[start : start + seats])
        tricks += winner is not None and (leader + winner) % seats == 0
        leader = (leader + following) % seats
    return tricks


def test_reward_weights_scale_the_round_score_and_the_outcome() -> None:
    totals = {}
    for scale, win in ((0.01, 1.0), (0.0, 1.0), (0.02, 0.0), (0.0, 3.0)):
        game, slots = make(20, reward_round_scale=scale, reward_win=win)
        reset(game, 2)
        steps = play(game, slots, 65, 7)
        totals[scale, win] = np.sum([step[3] for step in steps], axis=0)
        scores = np.array([info["score"] for info in steps[-1][-1]])
        outcomes = np.array([1 if info["is_win"] else -1 for info in steps[-1][-1]])
        assert totals[scale, win] == pytest.approx(scale * scores + win * outcomes, abs=1e-4)
    assert len(set(totals[0.0, 1.0])) <= 2


def test_an_illegal_action_is_refused_by_name_and_nothing_is_applied() -> None:
    game, slots = make(3)
    reset(game)
    before = [game.peek(i) for i in range(3)]
    slots.actions[:] = [0, 5, 99]
    with pytest.raises(EnvError, match=r"env 1: action 5 is illegal now, legal actions are \[0, 1\]"):
        game.step()
    assert [game.peek(i) for i in range(3)] == before
    for action in (-1, 2, 11, 85, 86, 10**12):
        slots.actions[:] = [0, 0, action]
        with pytest.raises(EnvError, match=rf"env 2: action {action} is illegal"):
            game.step()
    slots.actions[:] = 0
    game.step()
    assert slots.action_masks is not None
    illegal = np.flatnonzero(~slots.action_masks[0])
    for action in illegal.tolist():
        slots.actions[:] = slots.action_masks.argmax(axis=1)
        slots.actions[0] = action
        with pytest.raises(EnvError, match=f"env 0: action {action} is illegal"):
            game.step()


def test_order_of_calls_is_checked() -> None:
    game = SkullKingGame(2)
    with pytest.raises(EnvError, match="bind"):
        game.step()
    with pytest.raises(EnvError, match="bind"):
        game.reset(np.arange(2), [0, 0])
    game, slots = make(2)
    game.reset(np.array([0]), [0])
    with pytest.raises(EnvError, match=r"env 1 has no game .* reset"):
        game.step()
    with pytest.raises(EnvError, match="reset"):
        game.bot_actions("easy")
    slots.rewards = np.zeros(2)  # type: ignore[assignment]
    with pytest.raises(EnvSpecError, match=r"slots.rewards as an array \(2,\) of float32"):
        game.bind(slots)
    slots.rewards = np.zeros(2, np.float32)
    slots.action_masks = None
    with pytest.raises(EnvSpecError, match="action_masks"):
        game.bind(slots)
    slots.action_masks = np.zeros((2, 86), np.bool_)
    slots.actions = np.zeros(2, np.float32)
    with pytest.raises(EnvSpecError, match="actions"):
        game.bind(slots)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_envs": 0}, "num_envs=0"),
        ({"num_envs": 1, "num_players": 9}, "num_players=9"),
        ({"num_envs": 1, "num_players": 1}, "2 to 8 players"),
        ({"num_envs": 1, "opponents": "mediun"}, "unknown opponent 'mediun', did you mean 'medium'"),
        ({"num_envs": 1, "opponents": "xyz"}, "Choices: random, easy, medium, hard"),
        ({"num_envs": 1, "opponents": ["easy", "hard"]}, "names 2 bots, but num_players=4 has 3"),
        ({"num_envs": 1, "opponents": {"easy": -1}}, "weight of 'easy' is -1"),
        ({"num_envs": 1, "opponents": {"easy": float("nan")}}, "weight of 'easy'"),
        ({"num_envs": 1, "opponents": {"easy": 0}}, "at least one weight"),
        ({"num_envs": 1, "opponents": {}}, "at least one weight"),
        ({"num_envs": 1, "opponents": 3}, "neither a name"),
        ({"num_envs": 1, "reward_win": float("inf")}, "finite"),
        ({"num_envs": 1, "card_memory": "off"}, "card_memory='off': true or false"),
    ],
)
def test_bad_settings_are_named(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SkullKingGame(**kwargs)


@pytest.mark.parametrize("num_players", range(2, 9))
def test_description_covers_the_observation_without_gaps(num_players: int) -> None:
    blocks = list(describe_observation(num_players).values())
    assert blocks[0].start == 0
    assert all(a.stop == b.start for a, b in itertools.pairwise(blocks))
    assert blocks[-1].stop == observation_width(num_players) == SkullKingGame(1, num_players).observation_space.shape[0]


def test_observation_of_four_players_has_248_entries() -> None:
    assert observation_width(4) == 248
    with pytest.raises(ValueError, match="num_players=9"):
        describe_observation(9)


@pytest.mark.parametrize("threads", [2, 4])
def test_threads_change_no_game(threads: int, monkeypatch: pytest.MonkeyPatch):
    """300 games over 80 steps, in two and four parts, against one game after the other."""
    monkeypatch.setattr(ThreadChoice, "next", lambda _: True)
    mix = {"random": 1, "easy": 1, "medium": 1, "hard": 1}
    (alone, expected), (parted, slots) = make(300, opponents=mix), make(300, opponents=mix)
    parted.max_threads = threads
    reset(alone)
    reset(parted)
    rng = np.random.default_rng(0)
    for _ in range(80):
        assert expected.action_masks is not None
        actions = draw_actions(expected.action_masks, rng)
        for game, its in ((alone, expected), (parted, slots)):
            its.actions[:] = actions
            game.step()
        for name in ("observations", "action_masks", "rewards", "terminations", "truncations"):
            np.testing.assert_array_equal(getattr(slots, name), getattr(expected, name), err_msg=name)
        np.testing.assert_array_equal(parted.final_observations, alone.final_observations)
    assert parted.opponents_ns > 0
