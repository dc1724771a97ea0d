from __future__ import annotations

from pathlib import Path

import pytest

from conftest import RunCommand
from fasttrain.cli.commands import read_options
from fasttrain.cli.compose import conf_dir, configured
from fasttrain.errors import ConfigError
from messages import assert_says, wrong_inputs

PACKAGE = "# @package _global_\n"


def own_file(tmp_path: Path, name: str, content: bytes) -> list[str]:
    path = tmp_path / "mine" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return ["--config-dir", str(tmp_path / "mine")]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"num_envs: [1, 2\n", ", line 3: no valid YAML: expected ',' or ']', but got '<stream end>'"),
        (b"num_envs: 3\nnum_envs: 4\n", ", line 3: no valid YAML: found duplicate key num_envs"),
        (b"\n\xff\xfe\n", ", line 3: not in UTF-8; save it in this encoding"),
        (b"- num_envs\n", ": has no keys; write key: value, one per line"),
        (b"5\n", ": cannot be read: Invalid loaded object type: int"),
    ],
)
@pytest.mark.parametrize("command", ["train", "compare"])
def test_a_broken_profile_is_named(fasttrain: RunCommand, tmp_path: Path, command: str, content: bytes, told: str):
    options = own_file(tmp_path, "profile/broken.yaml", PACKAGE.encode() + content)
    path = tmp_path / "mine" / "profile" / "broken.yaml"
    fasttrain(*command.split(), "+profile=broken", *options).refused(f"error: {path}{told}\n")


def test_the_file_that_is_asked_for_or_has_a_former_setting_is_named(fasttrain: RunCommand, tmp_path: Path):
    for name in ("a", "broken", "z"):
        options = own_file(tmp_path, f"profile/{name}.yaml", b"x: [\n")
    assert "/profile/broken.yaml, line 2: " in fasttrain("+profile=broken", *options).err
    for name in ("also", "mine"):
        options = own_file(tmp_path, f"env/{name}.yaml", b"name: mine\nid: CartPole-v1\nkwargs: {a: '${oc.env:N,1}'}\n")
    done = fasttrain("env=mine", "algo=ppo", *options)
    assert f"{tmp_path / 'mine' / 'env' / 'mine.yaml'}: env.name is no setting any more: " in done.err
    assert "error: env.name is no" in fasttrain("env=mine", "algo=ppo", "env.name=x", *options).err


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("num_envs: 3", "error: profile mine: its file needs the first line `# @package _global_`"),
        (f"{PACKAGE}defaults: [speeed]", "profile/mine.yaml: its defaults name profile/speeed, and there is no such"),
        (f"{PACKAGE}num_envs: ${{oc.env:NO_SUCH}}", "error: num_envs: the environment variable NO_SUCH is not set"),
    ],
)
def test_a_file_that_hydra_cannot_place_is_named(fasttrain: RunCommand, tmp_path: Path, content: str, told: str):
    options = own_file(tmp_path, "profile/mine.yaml", content.encode())
    fasttrain("+profile=mine", "env.id=CartPole-v1", *options).refused(told)


@pytest.mark.parametrize(
    ("content", "told"),
    [("num_env: 4", "unknown key 'num_env'; did you mean 'num_envs'"), ("num_envs: four", "num_envs=four: expected a")],
)
def test_a_wrong_setting_is_told_with_its_file_unless_it_was_typed(
    fasttrain: RunCommand, tmp_path: Path, content: str, told: str
):
    options = own_file(tmp_path, "profile/mine.yaml", f"{PACKAGE}{content}\n".encode())
    fasttrain("+profile=mine", *options).refused(f"{tmp_path / 'mine' / 'profile' / 'mine.yaml'}: {told}")
    fasttrain("+profile=speed", "num_envs=five").refused("fasttrain: error: num_envs=five: ")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--nothing"], "unrecognized arguments: --nothing"),
        (["--cfg", "x"], r"argument --cfg/-c: invalid choice: 'x'"),
        (["--config-dir"], "argument --config-dir/-cd: expected one argument"),
        (["--config-dir="], "--config-dir=: no such folder"),
        (["--config-dir", "/no/such"], "--config-dir=/no/such: no such folder"),
        (["--config-path", "x"], "--config-path has no effect"),
        (["--resolve"], "--resolve has no effect without --cfg"),
        (["-m", "--cfg", "job"], "--multirun --cfg: remove all but one of them"),
    ],
)
def test_options_are_checked_before_hydras_parser_ends_the_process(arguments: list[str], told: str):
    with pytest.raises(ConfigError, match=f"^{told}"):
        read_options(arguments)
    read_options(["-m", "--config-dir", str(conf_dir()), "num_envs=4"])


def test_a_file_whose_anchors_would_fill_memory_is_refused(tmp_path: Path):
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 8)}]" for n in range(1, 9)]
    with pytest.raises(ConfigError, match=r"bomb\.yaml: its anchors .* more than 100,000 values"):
        configured([*own_file(tmp_path, "profile/bomb.yaml", "\n".join(lines).encode()), "+profile=bomb"])
    harmless = own_file(tmp_path, "profile/bomb.yaml", "\n".join(lines[:4]).encode())
    with pytest.raises(ConfigError, match="profile bomb: its file needs the first line"):
        configured([*harmless, "+profile=bomb"])


def test_a_main_file_that_names_an_env_or_overrides_too_early_is_told_what_to_write(
    fasttrain: RunCommand, tmp_path: Path
):
    own_file(tmp_path, "net/small.yaml", PACKAGE.encode() + b"algo: {net_arch: [8]}\n")
    env, override = "env: {id: CartPole-v1}\n", "- override /env: gym\n"
    entries = {"none": "", "early": f"{override}- net: small\n", "late": f"- net: small\n{override}"}
    for name, between in entries.items():
        text = f"defaults:\n- config\n- _self_\n{between}{env}"
        options = [*own_file(tmp_path, f"{name}.yaml", text.encode()), "--config-name", name]
        if name == "late":
            assert configured(options).env.id == "CartPole-v1"
            continue
        told = {
            "none": "add env=gym (in a YAML file: `- override /env: gym` at the end of its defaults)",
            "early": "early: in its defaults, `override env: gym` must stand below all without override",
        }[name]
        fasttrain(*options).refused(told)
    fasttrain("--config-name", "x", *options[:2]).refused("error: --config-name=x: no such YAML file in --config-dir")


def test_an_algorithms_own_file_holds_choices_and_must_name_the_algorithm(fasttrain: RunCommand, tmp_path: Path):
    options = own_file(tmp_path, "algo/mine.yaml", b"gamma: 0.9\n")
    told = "its YAML file has no key `name`; set it to one of"
    fasttrain("env.id=CartPole-v1", "algo=mine", *options).refused(told)
    own_file(tmp_path, "algo/mine.yaml", b"name: ppo\ngamma: 0.9\nrollout_size: 64\n")
    few = ("total_timesteps=64", "batch_size=32", "num_envs=2", "vec_env=dummy", "report=false", "eval.episodes=2")
    done = fasttrain("env.id=CartPole-v1", "algo=mine", *options, *few).ok()
    assert done.json("plan.json")["config"]["algo"]["gamma"] == 0.9
    assert done.json("plan.json")["config"]["algo"]["learning_rate"] == 3e-4, "the tier's own"


@pytest.mark.parametrize("override", wrong_inputs("arguments that cannot be composed"))
def test_what_does_not_say_its_argument_is_told_with_it(fasttrain: RunCommand, override: str):
    done = fasttrain("env.id=CartPole-v1", "algo=ppo", override)
    done.refused()
    assert_says("arguments that cannot be composed", override, done.err)


def test_a_key_of_a_yaml_file_that_is_no_text(fasttrain: RunCommand, tmp_path: Path):
    (tmp_path / "mine" / "profile").mkdir(parents=True)
    (tmp_path / "mine" / "profile" / "odd.yaml").write_text("# @package _global_\n3: 4\n")
    told = "unknown key '3': in a YAML file, keys of settings are texts"
    fasttrain("--config-dir", "mine", "+profile=odd", "env.id=CartPole-v1", "algo=ppo").refused(told)
