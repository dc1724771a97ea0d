"""What cluster=ray cannot do, told before Ray is imported."""

from __future__ import annotations

import sys

import pytest

from conftest import RunCommand

CARTPOLE = ("+profile=speed", "env.id=CartPole-v1", "num_envs=3", "checkup=off")


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        (
            ("cluster=ray", "policies={a: {decides: 0}, b: {decides: 1}}"),
            "cluster=ray with policies: actors have one policy",
        ),
        (("cluster=ray", "cluster.actors=4"), "cluster.actors=4 is more than num_envs=3"),
        (("cluster=ray", "env.frame_stack=2"), "cluster=ray with env.frame_stack: frames are stacked in the process"),
        (("cluster=ray", "schedule=first_ready"), "cluster=ray with schedule=first_ready: actors step their envs"),
        (("cluster=ray", "algo=dqn", "schedule=continuous"), "schedule=continuous has no effect with algo=dqn"),
        (("cluster=ray", "algo=sac", "algo.her=future"), "cluster=ray with algo.her: the envs compute the rewards"),
        (("cluster=ray", "algo=sac", "env.normalize=[obs]"), "cluster=ray with env.normalize: actors merge its"),
        (("cluster=ray", "algo=td3"), "maskable_recurrent_ppo, dqn, sac only"),
        (("cluster=ray", "reward_debug=true"), "cluster=ray with reward_debug: actors send the infos of episode ends"),
        (("cluster.actors=4",), "cluster.actors has no effect without cluster=ray"),
        (("cluster=ray", "cluster.address=10.0.0.7:6379"), "start the cluster with RAY_AUTH_MODE=token"),
        (("cluster=slurm",), "cluster=slurm: not one of off, ray"),
        (("cluster=ray",), "cluster=ray needs Ray"),
    ],
)
def test_wrong_settings_are_told(
    typed: tuple[str, ...], told: str, fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    algo = () if any(each.startswith("algo=") for each in typed) else ("algo=ppo",)
    fasttrain(*CARTPOLE, *algo, *typed).refused(told)
