from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import configured
from fasttrain.errors import ConfigError
from fasttrain.spec.plain import from_dict, plain, to_dict
from fasttrain.spec.reading import from_mapping

KEPT: list[Any] = [
    {0: 1.0, 1: 2.0}, {True: "a", None: "b", 0.5: "c", -1: {}}, {(0, 1): [2, (3, "x")]}, {"$float": "inf"}, {"$x": 1},
    [math.inf, -math.inf, 1e308, 5e-324, -0.0], 2**200, "Zoë ☃ \n", [], {}, [[], [{}]], (1, (2,)), None, True,
]  # fmt: skip


def test_what_goes_into_a_plan_comes_out_again_to_the_type():
    kwargs = {f"k{index}": value for index, value in enumerate(KEPT)}
    typed = plain(kwargs, "env.kwargs")
    assert repr(typed) == repr(kwargs)
    text = json.dumps(to_dict(typed), allow_nan=False)
    assert repr(from_dict(json.loads(text))) == repr(kwargs)
    assert math.isnan(from_dict(json.loads(json.dumps(to_dict(math.nan)))))


def test_a_whole_configuration_comes_back_with_what_its_env_is_made_with():
    values = to_dict(configured("env.id=CartPole-v1", "algo=ppo", "algo.net_arch={pi: [8], vf: [4]}"))
    values["env"]["kwargs"] = {"prices": {0: (1, math.inf)}}
    config = from_mapping(values)
    assert to_dict(config)["algo"]["net_arch"] == {"pi": [8], "vf": [4]}
    assert from_mapping(from_dict(json.loads(json.dumps(to_dict(config))))) == config


def test_a_plan_that_nobody_wrote_is_refused():
    for stored in ({"$pairs": 5}, {"$pairs": [[1]]}, {"$pairs": [[[1], 2]]}, {"$float": "x"}, {"$tuple": 3}):
        with pytest.raises(ConfigError, match="did not write"):
            from_dict({"env": stored})


def test_numbers_of_numpy_are_numbers_and_names_stand_for_classes_and_functions():
    given = {"a": np.int64(3), "b": np.float32(0.5), "c": np.bool_(True), np.int32(4): np.str_("x"), "f": json.dumps}
    assert repr(plain({**given, "k": Path}, "k")) == repr(
        {"a": 3, "b": 0.5, "c": True, 4: "x", "f": "json:dumps", "k": f"{Path.__module__}:Path"}
    )


class Odd(str):
    pass


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (np.zeros(2), r"k.x: plan.json cannot store it \(numpy.ndarray.*tolist"),
        (Path("levels"), r"k.x: plan.json cannot store it \(.*Path.*give its str"),
        ({1, 2}, r"k.x: plan.json cannot store it \(set.* give a list"),
        ([b"x"], r"k.x\[0\]: plan.json cannot store it \(bytes"),
        (lambda: 1, "k.x: eval and resume cannot import .*<lambda>; define it at the top of a module"),
        (Odd("y"), r"k.x: plan.json cannot store it \(.*Odd"),
        (object(), r"k.x: plan.json cannot store it \(object.* name a function"),
        (10**4000, "k.x: a number of 13,288 bits"),
        ("\ud800", "k.x=.*not valid as UTF-8"),
    ],
)
def test_what_no_plan_can_hold_is_refused_by_name(value: Any, told: str):
    with pytest.raises(ConfigError, match=told):
        plain({"x": value}, "k")
