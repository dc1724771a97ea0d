from __future__ import annotations

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from fasttrain.errors import ConfigError
from fasttrain.spec.checks import FLAGS
from fasttrain.spec.precedence import ALIASES, BARE, TYPED, key_of, read, split_options, with_names_as_typed


def normalise(typed: list[str], environment: dict[str, str], swept: bool = False) -> list[str]:
    return read(typed, environment, swept).overrides


def from_environment(environment: dict[str, str]) -> list[str]:
    return read([], environment).overrides


def test_key_of():
    assert [key_of(t) for t in ("a.b=1", "+profile=x", "~env.kwargs.k", "-m", "++c=2")] == [
        "a.b",
        "profile",
        "env.kwargs.k",
        "",
        "c",
    ]


def test_profile_is_accepted_with_and_without_plus():
    assert normalise(["profile=speed"], {}) == ["+profile=speed"]
    assert normalise(["+profile=speed"], {}) == ["+profile=speed"]


def test_naming_an_env_selects_the_plain_group():
    assert normalise(["env.id=A-v0"], {}) == ["env=gym", "env.id=A-v0"]
    assert normalise(["env.entry_point=a.b:Go"], {}) == ["env=gym", "env.entry_point=a.b:Go"]
    assert normalise(["env=skullking", "env.id=A-v0"], {}) == ["env=skullking", "env.id=A-v0"]


def test_constructor_arguments_need_no_plus():
    assert normalise(["env.kwargs.size=5", "+env.kwargs.k=1"], {}) == ["++env.kwargs.size=5", "++env.kwargs.k=1"]
    assert normalise(["~env.kwargs.size"], {}) == ["~env.kwargs.size"]


def test_environment_stands_before_the_command_line_and_yields_to_it():
    assert normalise(["seed=1"], {"NUM_ENVS": "16"}) == ["num_envs=16", "seed=1"]
    assert normalise(["num_envs=4"], {"NUM_ENVS": "16"}) == ["num_envs=4"]
    assert from_environment({"NUM_ENVS": "", "HOME": "x", "FASTTRAIN_LEAN_INFO": "1"}) == ["lean_info=1"]
    assert from_environment({"NUM_ENVS": "3", "FASTTRAIN_NUM_ENVS": "4"}) == ["num_envs=4"]
    removed = from_environment({"FASTTRAIN_CHECKPOINT_EVERY_MINUTES": "4"})
    assert removed == ["checkpoint_every_minutes=4"], "to be told what does its work now"


def test_general_names_of_the_environment_say_nothing_of_a_run():
    names = {flag.name.upper() for flag in FLAGS} | {name.upper() for name in ALIASES}
    assert from_environment(dict.fromkeys(names - {name.upper() for name in BARE}, "docker")) == []
    assert {"NUM_ENVS", "USE_SUBPROC_ENVS", "PREFETCH", "REWARD_DEBUG"} <= {name.upper() for name in BARE}


@pytest.mark.parametrize(
    ("variable", "message"),
    [("NUM_ENV", "did you mean 'FASTTRAIN_NUM_ENVS'"), ("SEED", "only flags have one; type seed=3")],
)
def test_a_variable_with_the_prefix_that_would_do_nothing(variable: str, message: str):
    with pytest.raises(ConfigError, match=message):
        from_environment({f"FASTTRAIN_{variable}": "3"})
    assert from_environment({"FASTTRAIN_TRACEBACK": "1", "FASTTRAIN_COMMAND": "x", "FASTTRAIN_GROUP": "y"}) == []


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        ("env.kwargs.path=~/data", "~/data"),
        ("env.kwargs.name=Zoë", "Zoë"),
        ("env.kwargs.url=http://localhost/x?y=1", "http://localhost/x?y=1"),
        ("env.kwargs.place={path: ~/data, of: [ü,'x, y']}", {"path": "~/data", "of": ["ü", "x, y"]}),
        ("env.kwargs={size: 5, name: ü}", {"size": 5, "name": "ü"}),
        ("run=C:\\läufe\\", "C:\\läufe\\"),
        ("env.kwargs.x=a\\=b", "a=b"),
    ],
)
def test_texts_that_hydra_reads_in_quotes_alone(typed: str, read: object):
    wanted = OverridesParser.create().parse_override(normalise([typed], {})[0])
    assert wanted.value() == read
    message = with_names_as_typed(f"no such thing: {normalise([typed], {})[0]}", [typed], {})
    assert message == f"no such thing: {typed}"


def test_swept_texts_stay_apart():
    assert normalise(["output=ü,~,a", "seed=range(1,3)"], {}) == ["output='ü','~',a", "seed=range(1,3)"]


def test_a_key_that_each_swept_algorithm_has():
    assert "++algo.buffer_size=9" in normalise(["algo=dqn,qrdqn", "algo.buffer_size=9"], {}, swept=True)
    assert "algo.buffer_size=9" in normalise(["algo=dqn,ppo", "algo.buffer_size=9"], {}, swept=True)
    assert "algo.buffer_size=9" in normalise(["algo=dqn", "algo.buffer_size=9"], {})


def test_options_come_first_with_their_values():
    assert split_options(["a=1", "-m", "--config-dir", "d", "b=2"]) == (["-m", "--config-dir", "d"], ["a=1", "b=2"])


def test_who_says_a_setting_is_its_source():
    given = read(
        ["+profile=speed", "num_envs=4", "env.id=A-v0", "hydra.run.dir=x"], {"NUM_ENVS": "16", "USE_AMP": "on"}
    )
    told = {"env": TYPED, "profile": TYPED, "num_envs": TYPED, "env.id": TYPED, "use_amp": "environment"}
    assert given.sources == told
    assert read([], {"USE_SUBPROC_ENVS": "0"}).sources == {"workers": "environment"}


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("num_workers=4", ["workers=4"]),
        ("use_subproc_envs=false", ["workers=0"]),
        ("use_subproc_envs=True", []),
        ("use_subproc_vec_env=false", ["workers=0"]),
        ("use_torch_compile=on", ["use_compile=on"]),
        ("use_pinned_memory=true", ["pin_memory=true"]),
        ("batch_inference=true", []),
        ("force_dummy_vec_env=1", ["vec_env=dummy"]),
        ("force_dummy_vec_env=0", []),
        ("algo.learning_starts=9", ["warmup_steps=9"]),
    ],
)
def test_other_names_of_a_setting(typed: str, meant: list[str]):
    assert normalise([typed], {}) == meant
    name, _, value = typed.partition("=")
    if "." not in name:
        assert normalise([], {f"FASTTRAIN_{name.upper()}": value}) == meant
        key = meant[0].partition("=")[0] if meant else "seed"
        assert normalise([f"{key}=9"], {f"FASTTRAIN_{name.upper()}": value}) == [f"{key}=9"], "what is typed wins"


def test_other_names_say_how_a_switch_is_on():
    assert normalise(["amp_dtype=float16", "use_amp=auto"], {}) == ["use_amp=float16"]
    assert normalise(["use_compile=on", "compile_mode=max-autotune"], {}) == ["use_compile=max-autotune"]
    assert normalise(["compile_mode=max-autotune"], {}) == ["use_compile=max-autotune"]
    assert normalise(["use_amp=auto", "amp_dtype=bfloat16", "compile_mode=default"], {}) == ["use_amp=auto"]
    assert normalise([], {"FASTTRAIN_AMP_DTYPE": "float16", "USE_AMP": "on"}) == ["use_amp=float16"]
    assert normalise([], {"FASTTRAIN_COMPILE_MODE": "max-autotune"}) == ["use_compile=max-autotune"]
    with pytest.raises(ConfigError, match="amp_dtype=float16 contradicts use_amp=off: they are one setting"):
        normalise(["use_amp=off", "amp_dtype=float16"], {})


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["use_subproc_envs=maybe"], "use_subproc_envs=maybe: another name for workers .false: 0.; take workers=…"),
        (["use_subproc_envs=false,true"], "use_subproc_envs=false,true: another name for workers"),
        (["use_subproc_envs=0", "num_workers=2"], "num_workers=2 contradicts use_subproc_envs=0"),
        (["workers=2", "num_workers=3"], "num_workers=3 contradicts workers=2"),
    ],
)
def test_other_names_that_say_something_else(typed: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        normalise(typed, {})


def test_the_environment_gives_way_to_what_was_typed_by_any_name():
    assert normalise(["use_subproc_envs=true"], {"USE_SUBPROC_ENVS": "0", "NUM_ENVS": "4"}) == ["num_envs=4"]
    with pytest.raises(ConfigError, match="force_dummy_vec_env=1 contradicts vec_env=shared"):
        normalise([], {"FASTTRAIN_VEC_ENV": "shared", "FORCE_DUMMY_VEC_ENV": "1"})


def test_a_message_says_what_was_typed():
    typed = ["num_workers=9", "compile_mode=default", "seed=1"]
    assert with_names_as_typed("workers=9 is more than num_envs=8", typed, {}) == (
        "workers=9 is more than num_envs=8 (typed: num_workers=9)"
    )
    assert (
        with_names_as_typed("num_workers=9 contradicts workers=2", typed, {}) == "num_workers=9 contradicts workers=2"
    )
    assert with_names_as_typed("seed=1: no", typed, {}) == "seed=1: no"
    exported = {"NUM_ENVS": "8", "USE_AMP": "on"}
    told = with_names_as_typed("workers=9 is more than num_envs=8", ["workers=9"], exported)
    assert told == "workers=9 is more than num_envs=8 (environment: NUM_ENVS=8)"
    assert with_names_as_typed("num_envs=4: no", ["num_envs=4"], exported) == "num_envs=4: no"


def test_the_last_value_of_a_setting_counts():
    assert normalise(["vec_env=dummy", "vec_env=dummy", "force_dummy_vec_env=1"], {}) == ["vec_env=dummy"] * 2
    with pytest.raises(ConfigError, match="force_dummy_vec_env=true contradicts vec_env=shared"):
        normalise(["vec_env=dummy", "force_dummy_vec_env=true", "vec_env=shared"], {})
    assert normalise(["num_workers=2", "num_workers=3"], {}) == ["workers=2", "workers=3"]


def test_a_message_names_paths_as_they_were_typed():
    def told(message: str, *typed: str) -> str:
        return with_names_as_typed(message, typed, {}, "/here")

    assert told("run=/here/runs/a: no plan.json there", "run=runs/a/") == "run=runs/a: no plan.json there"
    assert told("/here/runs/a/plan.json is too large", "run='runs/a'") == "runs/a/plan.json is too large"
    assert told("run=/here/runs/ab: gone", "run=runs/a") == "run=/here/runs/ab: gone"
    assert told("output=/here/../x.mp4: no room", "output=../x.mp4") == "output=../x.mp4: no room"
    assert told("run=/here: no plan.json; /here/my/p.yaml", "run=.") == "run=.: no plan.json; /here/my/p.yaml"
    assert told("run=/there/a: gone", "run=/there/a") == "run=/there/a: gone"
    other = "/data/here/model/a.zip: gone"
    assert told(other, "run=model") == other, "a folder that has the same end"
    crash = "the board fell; fasttrain resume run=/here/a goes on"
    assert told(crash, "hydra.run.dir=a") == crash, "a command that can be typed anywhere"
