"""What is said about errors of users' code, and that looking at it changes nothing (imports: test_make.py)."""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Callable
from pathlib import Path

import gymnasium
import pytest

import fasttrain
from fasttrain.envs.retrace import Retrace
from fasttrain.envs.user_code import BUILDING, CLOSING, LOOKING, MASKING, Place, attribute_of, blame, import_user_module
from fasttrain.errors import EnvSpecError
from plain_env import PlainEnv


def raises_with_text() -> None:
    raise ValueError("bad deck")


def raises_without_text() -> None:
    raise KeyboardInterrupt


def test_an_error_that_cannot_be_shown_is_named_by_its_type() -> None:
    class OddError(Exception):
        def __str__(self) -> str:
            raise ValueError("no words")

    assert blame(OddError()) == "OddError"
    assert blame(ValueError("never raised")) == "ValueError: never raised"
    assert blame(ValueError("one\n\n  two\n")) == "ValueError: one two"


def test_what_is_to_be_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pygame", None)
    with pytest.raises(gymnasium.error.DependencyNotInstalled) as caught:
        gymnasium.make("CartPole-v1", render_mode="human").reset()
    text = 'it needs a package that is not installed: pygame is not installed, run `pip install "gymnasium[classic'
    assert blame(caught.value).startswith(text)
    monkeypatch.setitem(sys.modules, "ale_py", None)
    with pytest.raises(EnvSpecError, match=r"no module named 'ale_py'.*; pip install 'fasttrain\[atari\]' adds it"):
        import_user_module("ale_py", "here", "env.id=ALE/Pong-v5")


@pytest.mark.parametrize("error", [KeyError, RuntimeError, AttributeError])
def test_an_attribute_that_cannot_be_read_is_none(error: type[Exception]) -> None:
    class Odd(PlainEnv):
        def __getattr__(self, name: str) -> None:
            raise error(name)

    assert attribute_of(gymnasium.wrappers.TimeLimit(Odd(), 9), "action_masks") is None
    assert attribute_of(Odd(), "length") == Odd.length
    with pytest.raises(AttributeError, match="action_masks"):
        Retrace(Odd()).get_wrapper_attr("action_masks")  # SB3's `has_attr` expects this


@pytest.mark.parametrize(
    ("function", "text"),
    [(raises_with_text, "ValueError: bad deck (tests"), (raises_without_text, "KeyboardInterrupt (")],
)
def test_blame_names_type_text_file_and_function(
    function: Callable[[], None], text: str, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    monkeypatch.chdir(pytestconfig.rootpath)
    with pytest.raises((ValueError, KeyboardInterrupt)) as caught:
        function()
    assert blame(caught.value).startswith(text)
    assert f"test_user_code.py:{function.__code__.co_firstlineno + 1}, in {function.__name__})" in blame(caught.value)


def test_blame_of_a_librarys_error_points_at_the_users_call() -> None:
    def calls_gymnasium() -> None:
        gymnasium.spaces.Discrete(-1)

    with pytest.raises(Exception) as caught:  # noqa: PT011 - whichever Gymnasium raises
        calls_gymnasium()
    assert ", in calls_gymnasium)" in blame(caught.value)


def test_an_import_of_a_module_that_was_moved_finds_it(tmp_path: Path):
    (tmp_path / "found_game.py").write_text("from fasttrain.daemons import RequestEngine\n", encoding="utf-8")
    found = import_user_module("found_game", str(tmp_path), "env.entry_point")
    assert found.RequestEngine.__module__ == "fasttrain_engines.game"


def test_a_package_of_a_name_that_begins_like_ours_is_the_users():
    ours = os.path.dirname(str(fasttrain.__file__))
    for folder, is_users in ((f"{ours}/envs", False), (f"{ours}_games", False), (f"{ours}_of_mine", True)):
        with pytest.raises(ValueError, match="broken") as caught:
            exec(compile("raise ValueError('broken')", os.path.join(folder, "made.py"), "exec"))
        assert ("made.py:1, in" in blame(caught.value)) is is_users


def test_another_look_at_the_same_memory_says_where_the_play_is():
    memory = mmap.mmap(-1, 4096)
    here, there = Place(memory), Place(memory)
    assert not there.started
    assert str(there) == "the start of its process"
    said = []
    for move in (
        lambda: here.enter(BUILDING), lambda: here.enter(LOOKING), lambda: here.reset(5), lambda: here.step(37),
        lambda: here.enter(MASKING), lambda: here.reset(None), lambda: here.step(2), lambda: here.reset(7),
        lambda: here.enter(CLOSING),
    ):  # fmt: skip
        beats = there.beats
        move()
        assert there.beats > beats
        said.append(str(there))
    assert there.started
    assert said == [
        "its constructor", "its first reset", "reset of seed 5", "step 37 of seed 5",
        "action_masks() after step 37 of seed 5", "reset of episode 2 after seed 5", "step 2 of episode 2 after seed 5",
        "reset of seed 7", "close()",
    ]  # fmt: skip
