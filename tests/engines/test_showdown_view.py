"""What a player knows of a battle, and what it can choose, from recorded lines of pokemon-showdown 0.11.11."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import fasttrain_engines

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="node is not installed (apt install nodejs)")
HERE, VIEW = Path(__file__).parent, Path(fasttrain_engines.__file__).parent / "node" / "view.js"


def recorded(name: str) -> list[str]:
    return (HERE / "recorded" / f"{name}.txt").read_text().strip("\n").split("\n\n")


def program(name: str, given: list[str]) -> Any:
    return subprocess.run([str(NODE), str(HERE / name), str(VIEW)], input=json.dumps(given), capture_output=True,
                          text=True, timeout=60)  # fmt: skip


@functools.cache
def told(*chunks: str) -> list[Any]:
    """The states after each chunk; what was answered is left out."""
    given = [chunk for chunk in chunks if not chunk.startswith(">")]
    done = program("showdown_views.js", given)
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


def only(name: str) -> Any:
    return told(*recorded(name))[-1]["p1"]


def request_of(chunk: str) -> Any:
    return json.loads(chunk.split("|request|")[1])


def test_private_lines_reach_their_own_player_alone():
    """`|split|p2` is followed by what p2 may know, 108/229, and by what p1 is told, 48/100."""
    traffic = recorded("split")
    assert any("-damage|p2a: Jynx|108/229" in chunk for chunk in traffic), (
        "the private line is in what the battle sends"
    )
    last = told(*traffic)[-1]
    jynx = {name: last[side][whose]["Jynx"] for name, side, whose in (("p1", "p1", "theirs"), ("p2", "p2", "mine"))}
    assert (jynx["p1"]["hp"], jynx["p1"]["most"]) == (0.48, 100)
    assert (jynx["p2"]["hp"], jynx["p2"]["most"]) == (108 / 229, 229)
    ours = last["p1"]["mine"]["Bellsprout"], last["p2"]["theirs"]["Bellsprout"]
    assert [one["most"] for one in ours] == [267, 100]
    assert {one["most"] for one in last["p1"]["theirs"].values()} == {100}
    assert set(last["p1"]["theirs"]) == {"Magnemite", "Jynx"}, "of six, two have been seen"
    assert all(not one["moves"] for one in last["p1"]["theirs"].values()), "they have used none"


@pytest.mark.parametrize(
    ("name", "action", "flag", "said"),
    [("trapped", None, "maybeTrapped", "is trapped"), ("disabled", 0, "maybeDisabled", "Psychic is disabled")],
)
def test_an_unavailable_choice_leaves_the_same_decision_with_fewer_choices(
    name: str, action: int | None, flag: str, said: str
):
    """The mask allowed it, the simulator did not, and sent the request anew."""
    traffic = recorded(name)
    first, *_, complaint, second = told(*traffic)
    assert request_of(traffic[0])["active"][0][flag], "it may be so"
    assert complaint["said"].startswith("[Unavailable choice]")
    assert said in complaint["said"]
    gone = set(first["p1"]["legal"]) - set(second["p1"]["legal"])
    assert gone == ({action} if action is not None else {one for one in first["p1"]["legal"] if one >= 8})
    assert second["p1"]["legal"]
    assert second["p1"]["team"] == first["p1"]["team"]


def test_an_invalid_choice_brings_no_request_and_is_not_offered_again():
    request, complaint = recorded("invalid")[0], recorded("invalid")[-1]
    before, after, *rest = told(
        request, complaint, *(f"refused p1 {action}" for action in (9, 0, 1, 2, 3, 10, 11, 12, 13))
    )
    assert after["said"].startswith("[Invalid choice]")
    assert after["p1"] == before["p1"], "nothing but the complaint came"
    assert 9 in before["p1"]["legal"]
    assert 9 not in rest[0]["p1"]["legal"]
    assert all(one["p1"]["legal"] for one in rest), "there is always something to answer"
    assert rest[-1]["p1"]["choices"] == {"0": "default"}, "at last the simulator chooses"


def test_actions_stand_for_the_same_pokemon_after_a_switch_has_reordered_them():
    traffic = recorded("switch")
    before, after = request_of(traffic[0])["side"]["pokemon"], request_of(traffic[-1])["side"]["pokemon"]
    names = [one["ident"] for one in before]
    assert [one["ident"] for one in after] != names, "another order"
    first, *_, last = told(*traffic)
    assert first["p1"]["team"] == last["p1"]["team"] == names
    places = {8 + names.index(one["ident"]): f"switch {place}" for place, one in enumerate(after, 1)}
    chosen = {int(action): text for action, text in last["p1"]["choices"].items() if int(action) >= 8}
    assert chosen
    assert chosen.items() <= places.items()
    assert first["p1"]["choices"] != last["p1"]["choices"]


@pytest.mark.parametrize("name", ["fight", "recharge", "struggle"])
def test_moves_that_are_none_of_its_own_stand_first(name: str):
    (move,) = request_of(recorded(name)[0])["active"][0]["moves"]
    assert move["id"] == name
    moves = {action: text for action, text in only(name)["choices"].items() if int(action) < 8}
    assert moves == {"0": "move 1"}


def test_a_pokemon_that_may_be_locked_in_can_choose_all_it_is_told():
    """Generation 1: which of them it will use shows later, and none of them is refused."""
    assert request_of(recorded("locked")[0])["active"][0]["maybeLocked"]
    assert only("locked")["legal"] == [0, 1, 2, 9]


def test_a_move_with_terastallization_is_an_action_while_it_may_be():
    asked = [one["p1"]["choices"] for one in told(*recorded("sandstorm"))]
    before, after = next(one for one in asked if one), asked[-1]
    assert {action: before[action] for action in "4567"} == {
        str(3 + move): f"move {move} terastallize" for move in range(1, 5)
    }
    assert {action: text for action, text in after.items() if int(action) < 8} == {
        str(move - 1): f"move {move}" for move in range(1, 5)
    }, "once in a battle"


def test_what_is_raised_lowered_and_lies_on_a_side_is_known_to_both():
    """Sand Stream, Stealth Rock and Swords Dance; then Screech and Bulk Up."""
    last = told(*recorded("sandstorm"))[-1]
    raised = {name: value for name, value in last["p1"]["boosts"].items() if value}
    assert raised == {"atk": 3, "def": -1}
    assert last["p1"]["boosts"] == last["p2"]["theirBoosts"]
    assert not any(last["p1"]["theirBoosts"].values())
    assert last["p1"]["conditions"] == last["p2"]["theirConditions"] == {"stealthrock": 1}
    assert last["p2"]["conditions"] == {}
    assert last["p1"]["weather"] == last["p2"]["weather"] == "sandstorm"


@pytest.mark.parametrize("line", ["|turn|soon", "|-damage|p2a: Jynx|lots", "|-boost|p1a: Bellsprout|atk|"])
def test_a_line_that_makes_no_sense_is_an_error(line: str):
    start = recorded("split")[0]
    done = program("showdown_views.js", [start, f"update\n{line}".replace("Jynx", "Magnemite")])
    assert done.returncode == 1
    assert "Error" in done.stderr


@pytest.mark.parametrize(
    ("version", "says"), [(None, "it is not there"), ("0.11.9", "it is 0.11.9"), ("0.11.11", "whole")]
)
def test_a_missing_or_wrong_simulator_is_told_in_a_line_that_names_the_command(
    version: str | None, says: str, tmp_path: Path
):
    if version is not None:
        (tmp_path / "node_modules" / "pokemon-showdown").mkdir(parents=True)
        (tmp_path / "node_modules" / "pokemon-showdown" / "package.json").write_text(json.dumps({"version": version}))
    done = subprocess.run([str(NODE), str(VIEW.with_name("battles.js")), "--port", "0"], cwd=tmp_path, timeout=60,
                          capture_output=True, text=True, env={"PATH": ""})  # fmt: skip
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert says in line
    assert line.endswith(": npm install --omit=optional --ignore-scripts pokemon-showdown@0.11.11")
