from __future__ import annotations

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from fasttrain.errors import ConfigError
from fasttrain.spec.checks import FLAGS
from fasttrain.spec.precedence import ALIASES, BARE, TYPED, key_of, read, split_options, with_names_as_typed
from messages import assert_says, wrong_inputs

VEC = "vec_env=dummy"


def normalise(typed: list[str], environment: dict[str, str], swept: bool = False) -> list[str]:
    return read(typed, environment, swept).overrides


@pytest.mark.parametrize(
    ("typed", "environment", "meant"),
    [
        (["profile=speed"], {}, ["+profile=speed"]),
        (["+profile=speed"], {}, ["+profile=speed"]),
        (["env.id=A-v0"], {}, ["env=gym", "env.id=A-v0"]),
        (["env.entry_point=a.b:Go"], {}, ["env=gym", "env.entry_point=a.b:Go"]),
        (["env=skullking", "env.id=A-v0"], {}, ["env=skullking", "env.id=A-v0"]),
        (["env.kwargs.size=5", "+env.kwargs.k=1"], {}, ["++env.kwargs.size=5", "++env.kwargs.k=1"]),
        (["~env.kwargs.size"], {}, ["~env.kwargs.size"]),
        (["output=ü,~,a", "seed=range(1,3)"], {}, ["output='ü','~',a", "seed=range(1,3)"]),
        (["seed=1"], {"NUM_ENVS": "16"}, ["num_envs=16", "seed=1"]),
        (["num_envs=4"], {"NUM_ENVS": "16"}, ["num_envs=4"]),
        ([], {"NUM_ENVS": "", "HOME": "x", "FASTTRAIN_LEAN_INFO": "1"}, ["lean_info=1"]),
        ([], {"NUM_ENVS": "3", "FASTTRAIN_NUM_ENVS": "4"}, ["num_envs=4"]),
        ([], {"FASTTRAIN_CHECKPOINT_EVERY_MINUTES": "4"}, ["checkpoint_every_minutes=4"]),  # what does its work is told
        ([], {"FASTTRAIN_TRACEBACK": "1", "FASTTRAIN_COMMAND": "x", "FASTTRAIN_GROUP": "y"}, []),
        (["amp_dtype=float16", "use_amp=auto"], {}, ["use_amp=float16"]),
        (["use_compile=on", "compile_mode=max-autotune"], {}, ["use_compile=max-autotune"]),
        (["compile_mode=max-autotune"], {}, ["use_compile=max-autotune"]),
        (["use_amp=auto", "amp_dtype=bfloat16", "compile_mode=default"], {}, ["use_amp=auto"]),
        ([], {"FASTTRAIN_AMP_DTYPE": "float16", "USE_AMP": "on"}, ["use_amp=float16"]),
        ([], {"FASTTRAIN_COMPILE_MODE": "max-autotune"}, ["use_compile=max-autotune"]),
        (["use_subproc_envs=true"], {"USE_SUBPROC_ENVS": "0", "NUM_ENVS": "4"}, ["num_envs=4"]),
        ([VEC, VEC, "force_dummy_vec_env=1"], {}, [VEC, VEC]),
        (["num_workers=2", "num_workers=3"], {}, ["workers=2", "workers=3"]),
    ],
)
def test_what_is_typed_and_exported_is_read(typed: list[str], environment: dict[str, str], meant: list[str]):
    assert normalise(typed, environment) == meant


@pytest.mark.parametrize("typed", wrong_inputs("names that contradict each other"))
def test_what_cannot_be_meant_is_refused(typed: str):
    exported = dict(word.split("=") for word in typed.split() if word[0].isupper())
    with pytest.raises(ConfigError) as told:
        normalise([word for word in typed.split() if word[0].islower()], exported)
    assert_says("names that contradict each other", typed, str(told.value))


def test_general_names_of_the_environment_say_nothing_of_a_run():
    names = {flag.name.upper() for flag in FLAGS} | {name.upper() for name in ALIASES}
    assert normalise([], dict.fromkeys(names - {name.upper() for name in BARE}, "docker")) == []
    assert {"NUM_ENVS", "USE_SUBPROC_ENVS", "PREFETCH", "REWARD_DEBUG"} <= {name.upper() for name in BARE}


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        ("env.kwargs.path=~/data", "~/data"),
        ("env.kwargs.url=http://localhost/x?y=1", "http://localhost/x?y=1"),
        ("env.kwargs.place={path: ~/data, of: [ü,'x, y']}", {"path": "~/data", "of": ["ü", "x, y"]}),
        ("env.kwargs={size: 5, name: ü}", {"size": 5, "name": "ü"}),
        ("run=C:\\läufe\\", "C:\\läufe\\"),
        ("env.kwargs.x=a\\=b", "a=b"),
    ],
)
def test_texts_that_hydra_reads_in_quotes_alone(typed: str, read: object):
    (wanted,) = normalise([typed], {})
    assert OverridesParser.create().parse_override(wanted).value() == read
    assert with_names_as_typed(f"no such thing: {wanted}", [typed], {}) == f"no such thing: {typed}"


def test_a_key_that_each_swept_algorithm_has():
    assert "++algo.buffer_size=9" in normalise(["algo=dqn,qrdqn", "algo.buffer_size=9"], {}, swept=True)
    assert "algo.buffer_size=9" in normalise(["algo=dqn,ppo", "algo.buffer_size=9"], {}, swept=True)
    assert "algo.buffer_size=9" in normalise(["algo=dqn", "algo.buffer_size=9"], {})


def test_keys_options_and_who_says_a_setting():
    assert [key_of(text) for text in ("a.b=1", "+profile=x", "~env.kwargs.k", "-m", "++c=2")] == [
        "a.b", "profile", "env.kwargs.k", "", "c",
    ]  # fmt: skip
    assert split_options(["a=1", "-m", "--config-dir", "d", "b=2"]) == (["-m", "--config-dir", "d"], ["a=1", "b=2"])
    typed = ["+profile=speed", "num_envs=4", "env.id=A-v0", "hydra.run.dir=x"]
    told = {"env": TYPED, "profile": TYPED, "num_envs": TYPED, "env.id": TYPED, "use_amp": "environment"}
    assert read(typed, {"NUM_ENVS": "16", "USE_AMP": "on"}).sources == told
    assert read([], {"USE_SUBPROC_ENVS": "0"}).sources == {"workers": "environment"}


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("num_workers=4", ["workers=4"]), ("use_subproc_envs=false", ["workers=0"]), ("use_subproc_envs=True", []),
     ("use_subproc_vec_env=false", ["workers=0"]), ("use_torch_compile=on", ["use_compile=on"]),
     ("use_pinned_memory=true", ["pin_memory=true"]), ("batch_inference=true", []), ("force_dummy_vec_env=1", [VEC]),
     ("force_dummy_vec_env=0", []), ("algo.learning_starts=9", ["warmup_steps=9"])],
)  # fmt: skip
def test_other_names_of_a_setting(typed: str, meant: list[str]):
    assert normalise([typed], {}) == meant
    name, _, value = typed.partition("=")
    if "." not in name:
        assert normalise([], {f"FASTTRAIN_{name.upper()}": value}) == meant
        key = meant[0].partition("=")[0] if meant else "seed"
        assert normalise([f"{key}=9"], {f"FASTTRAIN_{name.upper()}": value}) == [f"{key}=9"], "what is typed wins"


TOLD, OTHER = "workers=9 is more than num_envs=8", "/data/here/model/a.zip: gone"
CRASH = "the board fell; fasttrain resume run=/here/a goes on"


@pytest.mark.parametrize(
    ("message", "typed", "said"),
    [
        (TOLD, ["num_workers=9", "seed=1"], f"{TOLD} (typed: num_workers=9)"),
        ("num_workers=9 contradicts workers=2", ["num_workers=9"], "num_workers=9 contradicts workers=2"),
        ("seed=1: no", ["seed=1"], "seed=1: no"),
        (TOLD, ["workers=9", "$NUM_ENVS=8"], f"{TOLD} (environment: NUM_ENVS=8)"),
        ("num_envs=4: no", ["num_envs=4", "$NUM_ENVS=8"], "num_envs=4: no"),
        ("run=/here/runs/a: no plan.json there", ["run=runs/a/"], "run=runs/a: no plan.json there"),
        ("/here/runs/a/plan.json is too large", ["run='runs/a'"], "runs/a/plan.json is too large"),
        ("run=/here/runs/ab: gone", ["run=runs/a"], "run=/here/runs/ab: gone"),
        ("output=/here/../x.mp4: no room", ["output=../x.mp4"], "output=../x.mp4: no room"),
        ("run=/here: no plan.json; /here/my/p.yaml", ["run=."], "run=.: no plan.json; /here/my/p.yaml"),
        (OTHER, ["run=model"], OTHER),  # a folder that has the same end
        (CRASH, ["hydra.run.dir=a"], CRASH),  # a command that can be typed anywhere
    ],
)
def test_a_message_says_names_and_paths_as_they_were_typed(message: str, typed: list[str], said: str):
    exported = dict(text[1:].split("=") for text in typed if text.startswith("$"))
    assert with_names_as_typed(message, [text for text in typed if text[0] != "$"], exported, "/here") == said
