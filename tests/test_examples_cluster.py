"""examples/cluster/: the recipes are valid files, their trainings are possible, and their scripts start what they say.

No cluster is needed: the programs that the scripts call are stand-ins, which write down how they were called.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from conftest import composed
from fasttrain.spec.cluster import check_cluster
from fasttrain.spec.precedence import UserInput, effective_values
from fasttrain.spec.reading import from_mapping

RECIPES = Path(__file__).resolve().parent.parent / "examples" / "cluster"
NODES = {"SLURM_JOB_ID": "41", "SLURM_JOB_NODELIST": "node[1-3]", "SLURM_JOB_NUM_NODES": "3", "SLURM_JOB_NAME": "mine",
         "SLURM_CPUS_PER_TASK": "8"}  # fmt: skip


def read(name: str) -> Any:
    return yaml.safe_load((RECIPES / name).read_text(encoding="utf-8"))


@pytest.fixture
def called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a script in bash. Returns its exit code and the calls of the stand-ins, each a line."""
    log, programs = tmp_path / "log", tmp_path / "programs"
    programs.mkdir()
    own = {"scontrol": "printf 'node1\\nnode2\\nnode3\\n'", "nproc": "echo 8", "sleep": "/bin/sleep 0.3",
           "fasttrain": "exit ${CODE:-0}", "ray": "",
           "srun": 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"'}  # fmt: skip
    for name, text in own.items():
        path = programs / name
        path.write_text(f'#!/bin/bash\necho "{name} $*" >> {log}\n{text}\n')
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))

    def call(script: str, *arguments: str, **environment: str) -> tuple[int, list[str]]:
        log.write_text("")
        done = subprocess.run(["bash", "-c", script, "script", *arguments], env={**os.environ, **environment},
                              capture_output=True, text=True, timeout=60, check=False)  # fmt: skip
        assert done.stderr == ""
        return done.returncode, log.read_text().splitlines()

    return call


def trains(words: str) -> Any:
    """The configuration of a command line of a recipe."""
    overrides = [word for word in words.split() if not word.startswith(("hydra.", "fasttrain"))]
    values = composed(*[re.sub("^cluster=", "cluster.engine=", word) for word in overrides])
    config = from_mapping(effective_values(values, (), UserInput([], {}))[0])
    check_cluster(config)
    return config


def test_slurm_starts_ray_on_all_nodes_and_one_training_on_the_first(called: Any):
    script = (RECIPES / "slurm.sh").read_text(encoding="utf-8")
    code, lines = called(script, "+profile=speed", "num_envs=512", CODE="4", **NODES)
    assert code == 4
    assert lines.count("ray start --head --node-ip-address=node1 --port=20041 --num-cpus=8") == 1
    assert lines.count("ray start --address=node1:20041 --num-cpus=8 --block") == 1  # one srun for two nodes
    assert any(line.startswith("srun --nodes=2 --ntasks=2 --exclude=node1 ray start") for line in lines)
    (training,) = [line for line in lines if line.startswith("fasttrain ")]
    config = trains(training)
    assert (config.cluster.address, config.cluster.actors, config.num_envs) == ("node1:20041", 23, 512)
    assert config.on_existing == "resume"
    _, alone = called(script, "+profile=speed", **{**NODES, "SLURM_JOB_NUM_NODES": "1"})
    assert not any("--exclude" in line for line in alone)
    assert [line for line in alone if "cluster.actors=7 " in line and line.startswith("fasttrain ")]


def test_slurm_passes_the_signal_on_and_waits_for_the_training(called: Any, tmp_path: Path):
    script = (RECIPES / "slurm.sh").read_text(encoding="utf-8")
    fake = tmp_path / "programs" / "fasttrain"
    fake.write_text(f"#!/bin/bash\ntrap 'echo saved > {tmp_path}/saved; exit 4' TERM\n"
                    "/bin/sleep 0.5; kill -TERM $PPID\nfor i in {1..100}; do /bin/sleep 0.05; done\n")  # fmt: skip
    code, _ = called(script, "+profile=speed", **NODES)
    assert (code, (tmp_path / "saved").read_text()) == (4, "saved\n")


@pytest.mark.parametrize("rank", ["0", "2"])
def test_skypilot_starts_the_training_on_the_first_node_only(rank: str, called: Any):
    task = read("sky.yaml")
    assert {*task} <= {"name", "num_nodes", "resources", "secrets", "envs", "setup", "run"}
    nodes = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NODE_RANK": rank, "SKYPILOT_NUM_NODES": "2"}
    code, lines = called(task["run"], TOKEN="x", PLACE=task["envs"]["PLACE"], **nodes)
    assert code == 0
    training = [line for line in lines if line.startswith("fasttrain ")]
    if rank == "2":
        assert training == []
        assert "ray start --address=10.0.0.1:6385 --num-cpus=8 --block" in lines
        return
    config = trains(training[0])
    assert (config.cluster.address, config.cluster.actors) == ("10.0.0.1:6385", 15)
    assert (config.checkpoint.copy_to, config.on_existing) == ("s3://my-bucket/my_run", "resume")
    assert "ray start --head --port=6385 --num-cpus=8" in lines


def test_kuberay_has_a_core_for_each_actor():
    job = read("kuberay.yaml")
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    spec = job["spec"]["rayClusterSpec"]
    config = trains(job["spec"]["entrypoint"])
    groups = [(1, spec["headGroupSpec"]), *[(group["replicas"], group) for group in spec["workerGroupSpecs"]]]
    assert config.cluster.actors == sum(count * int(group["rayStartParams"]["num-cpus"]) for count, group in groups)
    assert spec["authOptions"] == {"mode": "token"}


def test_compose_has_a_core_for_each_actor():
    services = read("compose.yaml")["services"]
    config = trains(" ".join(services["train"]["command"]))
    assert config.cluster.actors == 2 * 2  # two containers of two cores
    assert "--num-cpus=2" in services["actors"]["entrypoint"]
    for service in services.values():
        assert service["environment"]["RAY_AUTH_MODE"] == "token"
