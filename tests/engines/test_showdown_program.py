"""The Node program on the real simulator: hostile lines, what it hides, games that can be played again.

pokemon-showdown is looked for in the folder that FASTTRAIN_SHOWDOWN names, or in `.engines` of the checkout: run there
`npm install --omit=optional --ignore-scripts pokemon-showdown@0.11.11`, as .ci/run does.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import fasttrain_engines
from fasttrain.spec.setting import build
from fasttrain.vec.self_play import SelfPlayVecEnv
from fasttrain_engines.settings import DaemonsConfig
from fasttrain_engines.showdown import SIZE
from fasttrain_engines.vec_env import DaemonVecEnv
from pig_games import ports

ROOT = Path(__file__).parents[2]
FOLDER = Path(os.environ.get("FASTTRAIN_SHOWDOWN") or ROOT / ".engines")
NODE, BATTLES = shutil.which("node"), Path(fasttrain_engines.__file__).parent / "node" / "battles.js"
pytestmark = pytest.mark.skipif(
    NODE is None or not (FOLDER / "node_modules" / "pokemon-showdown").is_dir(),
    reason="pokemon-showdown is not installed (FASTTRAIN_SHOWDOWN or .engines; needs node)",
)
SHIPPED = ROOT / "src" / "fasttrain_engines" / "conf" / "daemons" / "showdown.yaml"
NEW = {"new": 1, "seed": [1, 2, 3, 4], "generation": 1, "opponent": "random"}
POKEMON, HP, GIVEN = 40, 3, 35  # numbers of one Pokémon, and where are its life, and what it gives and takes
TYPES, FASTER = slice(10, 28), 38
MOVES, MOVE, POWER, EFFECT = 14 * POKEMON + 2 * 28, 19, 2, 6  # where moves begin, numbers of one, and two of them
THEIRS = [1, *range(8, 14)]  # which of the Pokémon in a view are the opponent's


class Line:
    """A connection to the program, one JSON object a line."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), 30)
        self._file = self._socket.makefile("rb")

    def says(self, message: Any) -> Any:
        """What comes back, None where it hangs up. A str goes out as it is."""
        self._socket.sendall((message if isinstance(message, str) else json.dumps(message)).encode() + b"\n")
        line = self._file.readline()
        return json.loads(line) if line else None

    def close(self) -> None:
        self._file.close()
        self._socket.close()


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Where the program listens."""
    number = int(ports().split("-")[1])
    process = subprocess.Popen([str(NODE), str(BATTLES), "--port", str(number)], cwd=FOLDER, stderr=subprocess.PIPE)
    until = time.monotonic() + 30
    while True:
        try:
            Line(number).close()
            break
        except OSError:
            assert process.poll() is None, process.stderr
            assert time.monotonic() < until
            time.sleep(0.05)
    yield number
    assert process.poll() is None, "it outlives all that was said to it"
    process.kill()
    said = process.communicate()[1]
    assert said == b""


@pytest.fixture
def line(port: int) -> Iterator[Line]:
    with closing(Line(port)) as one:
        yield one


def node(script: str, given: Any = None) -> Any:
    """What a few lines of JavaScript in the folder of the simulator print as JSON."""
    head = f"const {{Game, simulator}} = require({json.dumps(str(BATTLES))}), sim = simulator();\n"
    done = subprocess.run([str(NODE), "-e", head + script], cwd=FOLDER, input=json.dumps(given), capture_output=True,
                          text=True, timeout=60)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def battle(line: Line, new: dict[str, Any], choose: Any) -> tuple[list[Any], Any]:
    """All decisions of one battle, and its end."""
    asks, told = [], line.says(new)
    while "over" not in told:
        assert "error" not in told, told
        assert told["legal"]
        if "ask" in told:
            asks.append(told)
        told = line.says({"answer": told.get("ask", told.get("refused")), "action": choose(told["legal"])})
    return asks, told


def view(message: Any) -> Any:
    seen = np.frombuffer(base64.b64decode(message["view"]), "<f4")
    assert seen.shape == (SIZE,)
    assert np.isfinite(seen).all()
    return seen


@pytest.mark.parametrize(
    "hostile",
    [
        "", "nothing", "{", "[]", "null", "7", '"new"', "{}", "[" * 60_000, ">eval process.exit(3)",
        ">p1 move 1", '{"answer":1,"action":0}', '{"new":1}', '{"__proto__":{"hello":1}}',
        {**NEW, "seed": ["1", "2", "3", "4"]}, {**NEW, "seed": [1, 2, 3]}, {**NEW, "seed": "1,2,3,4"},
        {**NEW, "seed": [1, 2, 3, 65536]}, {**NEW, "seed": [1, 2, 3, -1]}, {**NEW, "seed": [0.5, 2, 3, 4]},
        {**NEW, "generation": "1"}, {**NEW, "generation": [1]}, {**NEW, "generation": 6}, {**NEW, "generation": None},
        {**NEW, "opponent": "constructor"}, {**NEW, "opponent": "\n>eval process.exit(3)"}, {**NEW, "opponent": None},
    ],
)  # fmt: skip
def test_hostile_lines_are_answered_by_an_error_and_nothing_else(line: Line, hostile: Any):
    assert "error" in line.says(hostile)
    assert line.says({"hello": 1})["size"] == SIZE


@pytest.mark.parametrize("action", ["0", 99, -1, None, "move 1", "move 1\n>eval process.exit(3)", [0], {"toString": 1}])
def test_actions_are_looked_up_and_never_passed_on(line: Line, action: Any):
    assert line.says(NEW)["ask"] == 1
    assert "error" in line.says({"answer": 1, "action": action})
    assert "there is no battle" in line.says({"answer": 1, "action": 0})["error"]
    assert line.says(NEW)["ask"] == 1


def test_an_endless_line_ends_its_connection_alone(port: int, line: Line):
    first = line.says(NEW)
    with closing(Line(port)) as other, suppress(OSError):  # it may hang up while we are sending
        assert other.says("x" * 1_000_000) is None
    assert "ask" in line.says({"answer": 1, "action": first["legal"][0]})


def test_an_answer_to_what_is_no_longer_asked_is_none(line: Line):
    first = line.says(NEW)
    assert line.says({"answer": 1, "action": first["legal"][0]})["ask"] == 2
    assert "answer to 1, asked was 2" in line.says({"answer": 1, "action": first["legal"][0]})["error"]


@pytest.mark.parametrize("generation", [1, 4, 9])
def test_the_other_side_s_life_is_seen_in_hundredths(line: Line, generation: int):
    """As a player sees it: of the own Pokémon every point of life is known."""
    rng = np.random.default_rng(generation)
    new = {**NEW, "generation": generation, "opponent": "self"}
    asks, over = battle(line, new, lambda legal: int(rng.choice(legal)))
    seen = np.stack([view(one) for one in asks])[:, : 14 * POKEMON].reshape(len(asks), 14, POKEMON)[:, :, HP]
    hundredths = 100.0 * seen.astype(np.float64)
    off = np.abs(hundredths - hundredths.round()) > 1e-3
    assert not off[:, THEIRS].any()
    assert off[:, 2:8].any(), "our own is exact"
    assert {one["theirs"] for one in asks} == {True, False}
    assert over["over"] in (-1, 0, 1)
    assert (over["over"] > 0) == (over["left"][1] == 0)


def test_each_side_sees_with_its_own_eyes(line: Line):
    """What one has in play is what the other faces."""
    first = line.says({**NEW, "generation": 4, "opponent": "self"})
    second = line.says({"answer": 1, "action": first["legal"][0]})
    assert [first["theirs"], second["theirs"]] == [False, True]
    mine, theirs = (view(one)[: 14 * POKEMON].reshape(14, POKEMON) for one in (first, second))
    assert not (mine[2:8] == theirs[2:8]).all(axis=1).any(), "another team"
    assert mine[0, TYPES].tolist() == theirs[1, TYPES].tolist() != mine[1, TYPES].tolist() == theirs[0, TYPES].tolist()


def test_the_lead_falls_with_own_life_and_rises_as_the_other_side_loses_its(line: Line):
    asks, _ = battle(line, {**NEW, "opponent": "self"}, min)
    leads = np.array([one["lead"] for one in asks if not one["theirs"]])
    seen = np.stack([view(one) for one in asks if not one["theirs"]])[:, : 14 * POKEMON].reshape(-1, 14, POKEMON)
    lost = (seen[:, 2:, 0] - seen[:, 2:, HP]).reshape(-1, 2, 6).sum(axis=2)
    np.testing.assert_allclose(leads, (lost[:, 1] - lost[:, 0]) / 6, atol=1e-5)
    assert all(two["lead"] == one["lead"] for one, two in pairwise(asks) if two["theirs"] > one["theirs"])
    assert leads[0] == 0
    assert (leads < 0).any()
    assert (leads > 0).any()


DIRECT = """
const dex = sim.Dex.forFormat('gen2randombattle'), faced = [];
for (let seed = 0; seed < 10; seed++) {
  const game = new Game(sim, {seed: [1, 2, 3, seed], generation: 2, opponent: 'random'}), {view} = game.next();
  const [one, other] = game.battle.sides.map(({active}) => active[0]);
  const moves = one.moves.map((name) => dex.moves.get(name)).map(({type, basePower, category}) => {
    const hits = category === 'Status' || dex.getImmunity(type, other);
    return [basePower, category === 'Status' ? 1 : hits ? 2 ** dex.getEffectiveness(type, other) : 0];
  });
  const [types, speed] = [[one.getTypes(), other.getTypes()], [one.storedStats.spe, other.storedStats.spe]];
  faced.push({view, moves, types, speed});
}

let game = new Game(sim, {seed: [1, 2, 3, 4], generation: 1, opponent: 'max_damage'});
const first = game.next();
game.views.p1.choices.set(13, 'switch 1'); // the one that is there already
const before = game.views.p1.request, refused = game.answer({answer: 1, action: 13});
refused.same = before === game.views.p1.request;
const invalid = [first, refused, game.answer({answer: 1, action: first.legal[0]})];

game = new Game(sim, {seed: [1, 2, 3, 4], generation: 1, opponent: 'random'});
let tie = game.next();
game.battle.turn = 995; // of battles that random players play, hardly one comes so far
while (tie.over === undefined) tie = game.answer({answer: game.asks, action: tie.legal[0]});

const {told} = require(JSON.parse(require('fs').readFileSync(0, 'utf8')));
const {createRequire} = require('module'), own = createRequire(process.cwd() + '/any.js');
const {extractChannelMessages} = own('pokemon-showdown/dist/sim/battle');
const kept = (lines) => JSON.stringify(lines.filter(Boolean)), {log} = game.battle;
const same = [1, 2].map((side) =>
  kept(told(log, `p${side}`)) === kept(extractChannelMessages(log.join('\\n'), [side])[side]));
process.stdout.write(JSON.stringify({faced, invalid, tie, same}));
"""


@pytest.fixture(scope="module")
def direct() -> Any:
    """What the program's own classes do, without a connection."""
    return node(DIRECT, str(BATTLES.with_name("view.js")))


NAMES = ["Normal", "Fire", "Water", "Electric", "Grass", "Ice", "Fighting", "Poison", "Ground", "Flying", "Psychic",
         "Bug", "Rock", "Ghost", "Dragon", "Dark", "Steel", "Fairy"]  # fmt: skip


def test_types_power_effect_and_speed_are_the_simulator_s(direct: Any):
    """Generation 2, without abilities; all its random teams have the stats that one would guess."""
    effects, faster = set[float](), set[bool]()
    for one in direct["faced"]:
        seen, (own, other) = view(one), one["speed"]
        for block, types in enumerate(one["types"]):
            numbers = seen[block * POKEMON :][:POKEMON]
            assert {name for name, is_one in zip(NAMES, numbers[TYPES], strict=True) if is_one} == set(types)
            assert bool(numbers[FASTER]) == (own > other if block == 0 else other > own)
        for slot, (power, effect) in enumerate(one["moves"]):
            numbers = seen[MOVES + slot * MOVE :][:MOVE]
            assert numbers[POWER] == pytest.approx(power / 150)
            assert (0, 0.25, 0.5, 1, 2, 4)[round(5 * numbers[EFFECT])] == effect
            effects.add(effect)
        faster.add(own > other)
    assert effects >= {0.5, 1, 2}
    assert faster == {True, False}


@pytest.mark.parametrize(("generation", "opponent"), [(9, "max_damage"), (1, "self")])
def test_records_are_played_again_by_the_simulator_itself(tmp_path: Path, generation: int, opponent: str):
    """Games of a run, by the seam that training uses; each input log leads its BattleStream to the same end.

    In self-play the learner is asked in its own turns alone, and is paid for its own wins.
    """
    settings = {**yaml.safe_load(SHIPPED.read_text()), "cwd": str(FOLDER), "count": 1, "ports": ports()}
    both = opponent == "self"
    env: Any = DaemonVecEnv("fasttrain_engines.showdown:Showdown", {"generation": generation, "opponent": opponent}, 2,
                            build(DaemonsConfig, settings), 2, folder=tmp_path, two_sided=both)  # fmt: skip
    env, rng, rewards = SelfPlayVecEnv(env) if both else env, np.random.default_rng(0), list[float]()
    try:
        env.seed(3)
        env.reset()
        while not rewards:
            masks = env.slots.action_masks
            assert masks.any(axis=1).all()
            _, paid, dones, infos = env.step(np.array([rng.choice(np.flatnonzero(mask)) for mask in masks]))
            assert not any("lost" in info for info in infos)
            rewards += [float(paid[row]) for row in np.flatnonzero(dones)]
            assert not paid[~dones].any()
    finally:
        env.close()
    records = [json.loads(text)["record"] for text in (tmp_path / "games.jsonl").read_text().splitlines()]
    assert len({json.dumps(one) for one in records}) == len(records) == len(rewards)
    winners = [{"p1": 1.0, "p2": -1.0, "": 0.0}[winner] for winner in node(REPLAY, records)]
    assert sorted(winners) == sorted(rewards)
    assert all({line[:3] for line in record[3:]} == {">p1", ">p2"} for record in records)


REPLAY = """
const {createRequire} = require('module');
const {BattleStream} = createRequire(process.cwd() + '/any.js')('pokemon-showdown');
(async () => {
  const winners = [];
  for (const log of JSON.parse(require('fs').readFileSync(0, 'utf8'))) {
    const stream = new BattleStream();
    for (const text of log) stream.write(text);
    for await (const chunk of stream) if (chunk.startsWith('end\\n')) winners.push(JSON.parse(chunk.slice(4)).winner);
  }
  process.stdout.write(JSON.stringify(winners));
})();
"""


def test_an_invalid_choice_is_asked_again_though_the_simulator_sends_no_request(direct: Any):
    """Were one waited for, the battle would stand still for ever."""
    first, refused, then = direct["invalid"]
    assert refused["said"].startswith("[Invalid choice]")
    assert refused["same"], "no request came"
    assert refused["legal"] == [one for one in first["legal"] if one != 13]
    assert then["ask"] == 2


def test_the_battle_is_a_tie_after_turn_1000(direct: Any):
    over = direct["tie"]
    assert (over["over"], over["turns"]) == (0, 1001)
    assert all(over["left"])


def test_a_player_is_told_what_the_package_itself_tells_one(direct: Any):
    """Our splitting of lines against the simulator's own."""
    assert direct["same"] == [True, True]


def test_max_damage_beats_random_and_the_same_seed_is_the_same_battle(line: Line):
    ends = []
    for seed in (1, 2, 3, 1):
        rng = np.random.default_rng(seed)
        new = {**NEW, "opponent": "max_damage", "seed": [1, 1, 1, seed]}
        ends.append(battle(line, new, lambda legal, rng=rng: int(rng.choice(legal)))[1])
    assert ends[0]["log"] == ends[3]["log"] != ends[1]["log"]
    assert sum(one["over"] < 0 for one in ends) >= 3
