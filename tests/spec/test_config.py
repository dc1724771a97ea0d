"""The declarations: each says what it is, and what is read off them is whole."""

from __future__ import annotations

from dataclasses import MISSING

from fasttrain.spec.algorithms import ALGORITHMS
from fasttrain.spec.config import ALGO_CLASSES, Config
from fasttrain.spec.setting import declared, defaults_of, settings_of

SETTINGS = dict(settings_of(Config))


def test_every_setting_has_a_text_and_a_default_within_its_range():
    for key, one in SETTINGS.items():
        assert declared(one).text or key == "algo.name", key
        declared(one).check(key, one.default)


def test_only_what_a_game_or_its_name_decides_has_no_default():
    without = [key for key, one in SETTINGS.items() if one.default is MISSING and one.default_factory is MISSING]
    assert without == ["total_timesteps", "algo.name", "eval.episodes"]
    evaluation = {"episodes": None, "seed": 1_000_003, "num_envs": None, "env_kwargs": {}, "max_steps": 27_000}
    assert defaults_of(Config)["eval"] == evaluation


def test_an_algorithm_has_a_class_with_its_keys():
    for name, cls in ALGO_CLASSES.items():
        assert {key for key, _ in settings_of(cls)} >= set(ALGORITHMS[name].keys())
