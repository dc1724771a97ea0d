from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import yaml

from conftest import RunCommand
from fasttrain.cli import main
from fasttrain_integrations.zoo import read_yaml
from fasttrain_integrations.zoo.entries import algorithm, configuration, taken
from messages import assert_says, wrong_inputs

ENTRY = """
default: &d
  n_timesteps: 1e5
  policy: MlpPolicy
  n_envs: 2
CartPole-v1:
  <<: *d
  n_timesteps: !!float 1e3
  n_steps: 16
  learning_rate: lin_0.001
  vec_env_wrapper: a.B
  env_wrapper:
    - gymnasium.wrappers.TimeLimit: {max_episode_steps: 50}
"""


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ppo.yml").write_text(ENTRY)


def told(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["zoo", *arguments])
    out, err = capfd.readouterr()
    return code, out, err


def test_the_command_it_prints_trains(fasttrain: RunCommand, capfd: pytest.CaptureFixture[str]):
    code, out, err = told(capfd, "import", "ppo.yml", "--env", "CartPole-v1", "--algo", "ppo")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "written to conf/profile/zoo_ppo_CartPole-v1.yaml"
    assert lines[1].split() == ["fasttrain", "--config-dir", "conf", "+profile=zoo_ppo_CartPole-v1"]
    assert lines[2].split()[4:] == ["engine=fast", "vec_env=auto", "fused_update=auto", "faster"]
    assert lines[3].startswith("not taken over: vec_env_wrapper: there is no place")
    assert lines[4].startswith("differs: env_wrapper: results are those")
    text = Path("conf/profile/zoo_ppo_CartPole-v1.yaml").read_text()
    assert "# Not taken over: vec_env_wrapper: there" in text
    done = fasttrain(*lines[1].split()[1:], "total_timesteps=32", "batch_size=32", "eval.episodes=2").ok()
    config = done.json("plan.json")["config"]
    assert (config["env"]["id"], config["algo"]["n_steps"], config["num_envs"]) == ("CartPole-v1", 16, 2)
    assert config["algo"]["learning_rate"] == "linear_0.001"
    sources = {row["flag"]: row["source"] for row in done.json("plan.json")["flags"]}
    assert sources["num_envs"] == "profile zoo_ppo_CartPole-v1"
    assert done.json("summary.json")["quality"]["mean_length"] <= 50


def test_what_is_typed_wins_and_importing_again_writes_over(fasttrain: RunCommand, capfd: pytest.CaptureFixture[str]):
    for _ in range(2):
        assert told(capfd, "import", "ppo.yml", "--env", "CartPole-v1", "--output", "mine/profile/cart.yaml")[0] == 0
    done = fasttrain("--config-dir", "mine", "+profile=cart", "num_envs=4", "total_timesteps=64", "batch_size=64",
                     "eval.episodes=2", "--cfg", "job")  # fmt: skip
    assert (done.exit_code, "num_envs: 4" in done.out) == (0, True)
    Path("mine/profile/own.yaml").write_text("num_envs: 3\n")
    code, _, err = told(capfd, "import", "ppo.yml", "--env", "CartPole-v1", "--output", "mine/profile/own.yaml")
    assert code == 2
    assert "this file exists and was not made by zoo import" in err


def test_an_env_without_an_entry_gets_the_default_one_and_it_is_said(capfd: pytest.CaptureFixture[str]):
    out = told(capfd, "import", "ppo.yml", "--env", "CartPole-v0")[1]
    assert "from the entry default: no entry is called CartPole-v0; did you mean 'CartPole-v1'?" in out


def test_atari_games_have_one_entry(capfd: pytest.CaptureFixture[str]):
    Path("ppo.yml").write_text("atari: {n_timesteps: 10, policy: CnnPolicy, frame_stack: 4}")
    for env in ("ALE/Pong-v5", "PongNoFrameskip-v4"):
        assert "from the entry atari" in told(capfd, "import", "ppo.yml", "--env", env)[1]
    assert Path("conf/profile/zoo_ppo_ALE-Pong-v5.yaml").is_file()
    code, _, err = told(capfd, "import", "ppo.yml", "--env", "CartPole-v1")
    assert (code, "no entry CartPole-v1, and none called default; it has atari" in err) == (2, True)


@pytest.mark.parametrize("typed", wrong_inputs("zoo"))
def test_wrong_input_is_one_line_and_exit_code_2(capfd: pytest.CaptureFixture[str], typed: str):
    code, out, err = told(capfd, *typed.split())
    assert (code, out) == (2, "")
    assert_says("zoo", typed, err)


def test_another_verb_and_a_file_that_is_not_there(capfd: pytest.CaptureFixture[str]):
    assert "invalid choice: 'export'" in told(capfd, "export", "ppo.yml", "--env", "A")[2]
    nothing = told(capfd, "import", "nothing", "--env", "A", "--algo", "ppo")
    assert (nothing[0], "zoo import nothing: no such file; name a FILE.yml" in nothing[2]) == (2, True)


def test_a_value_that_cannot_be_names_file_and_entry(capfd: pytest.CaptureFixture[str]):
    Path("dqn.yml").write_text("default: {n_timesteps: 10, policy: MlpPolicy, gradient_steps: 0}")
    code, _, err = told(capfd, "import", "dqn.yml", "--env", "A")
    assert code == 2
    assert "dqn.yml, entry default: updates_per_step=0: nothing would be learned" in err
    Path("dqn.yml").write_text("default: [")
    assert "dqn.yml: cannot be read as YAML: while parsing" in told(capfd, "import", "dqn.yml", "--env", "A")[2]


def test_texts_that_the_configuration_would_look_up_are_refused(capfd: pytest.CaptureFixture[str]):
    Path("ppo.yml").write_text("default: {n_timesteps: 10, policy: MlpPolicy, env_kwargs: {x: '${oc.env:HOME}'}}")
    code, _, err = told(capfd, "import", "ppo.yml", "--env", "A-v0")
    assert (code, "a text contains ${" in err) == (2, True)
    assert not Path("conf").exists()


def test_a_place_that_cannot_be_written_is_one_line(capfd: pytest.CaptureFixture[str]):
    Path("conf").write_text("")
    code, _, err = told(capfd, "import", "ppo.yml", "--env", "CartPole-v1")
    assert (code, "conf/profile/zoo_ppo_CartPole-v1.yaml: cannot be written: " in err) == (2, True)
    Path("mine/profile/a.yaml").mkdir(parents=True)
    assert told(capfd, "import", "ppo.yml", "--env", "CartPole-v1", "--output", "mine/profile/a.yaml")[0] == 2


# --- the files of rl_zoo3 itself


def hyperparams() -> list[Path]:
    package = importlib.util.find_spec("rl_zoo3")
    places = (package.submodule_search_locations if package else None) or []
    return sorted(file for place in places for file in Path(place, "hyperparams").glob("*.yml"))


@pytest.mark.skipif(not hyperparams(), reason="rl_zoo3 is not installed")
def test_every_entry_of_the_installed_package_is_taken_over_or_told():
    found: dict[str, set[str]] = {}
    for file in hyperparams():
        for env, entry in read_yaml(file).items():
            spec = algorithm(str(entry.get("model_class", file.stem)))  # of her.yml, which rl_zoo3 no longer reads
            made = taken(entry, "CartPole-v1" if env in ("atari", "default") else env, spec)
            configuration(made.settings, spec)
            for line in made.left:
                found.setdefault(line.split(":")[0], set()).add(file.stem)
    her = {name: names for name, names in found.items() if names == {"her"}}
    assert set(found) - set(her) == {"policy"}
    assert found["policy"] == {"ppo_lstm"}  # MlpPolicy, which RecurrentPPO has not


@pytest.mark.skipif(not hyperparams(), reason="rl_zoo3 is not installed")
def test_an_algorithms_name_is_the_packages_file(capfd: pytest.CaptureFixture[str]):
    code, out, _ = told(capfd, "import", "ppo_lstm", "--env", "PendulumNoVel-v1")
    assert (code, out.splitlines()[0]) == (0, "written to conf/profile/zoo_ppo_lstm_PendulumNoVel-v1.yaml")
    written: Any = yaml.safe_load(Path("conf/profile/zoo_ppo_lstm_PendulumNoVel-v1.yaml").read_text())
    assert written["algo"]["lstm_hidden_size"] == 64
    code, _, err = told(capfd, "import", "nothing", "--env", "A", "--algo", "ppo")
    assert (code, "rl_zoo3 has a2c, ars" in err) == (2, True)
