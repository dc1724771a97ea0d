"""Faults in actors of cluster=ray: each is survived, and nothing is lost but counted rollouts."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from threading import Timer
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback

from conftest import RunCommand
from fasttrain import PPO as PPO_CLASS
from fasttrain import ReplaceEnv
from fasttrain.errors import EnvError
from fasttrain_integrations import ray_actors
from fasttrain_vec.replacing import ASKED, FAILED, Replacements
from plain_env import DrawnEnv

ray = pytest.importorskip("ray")
ENDED, HUNG = ray_actors.ENDED, ray_actors.NO_ANSWER
BASE = ("+profile=speed", "report=false", "checkup=off", "eval.episodes=2", "torch_threads=1", "fused_update=off",
         "env.entry_point=test_ray_actors_faults:Faulty", "num_envs=4", "batch_size=64",
         "algo.rollout_size=128", "algo.n_epochs=1", "env.step_timeout_s=1", "cluster=ray",
         "total_timesteps=100000")  # fmt: skip
PPO = (*BASE, "algo=ppo", "vec_env=dummy")
AT = 40  # the step in which the first env of a process takes a fault; the next one in its step 80, and so on


def do(fault: str) -> None:
    """What a fault does to the process of an actor."""
    if fault == "ask":
        raise ReplaceEnv("a leak")
    if fault == "raise":
        raise ValueError("the board fell off the table")
    if fault == "full":  # as Ray does when it stores an actor's results
        raise ray.exceptions.ObjectStoreFullError
    if fault == "exit":
        os._exit(7)
    if fault == "hang":
        time.sleep(3600)
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[fault])


class Faulty(DrawnEnv):
    """Takes faults from the folder `faults`: files named PLACE-FAULT-NUMBER. The one who can remove a file takes it."""

    made = 0  # in this process

    def __init__(self, faults: str = "") -> None:
        Faulty.made += 1
        self.at = AT * Faulty.made
        in_actor = sys.argv[0].endswith("default_worker.py")  # not in evaluations
        self.faults, self.total = Path(faults) if faults and in_actor else None, 0
        if self.faults is not None:
            (self.faults / f"pid-{os.getpid()}").touch()
        self._take("start")

    def _take(self, place: str) -> None:
        for file in [] if self.faults is None else sorted(self.faults.glob(f"{place}-*")):
            with suppress(FileNotFoundError):
                file.unlink()
                do(file.name.split("-")[1])
                return

    def reset(self, **given: Any) -> Any:
        if self.total == self.at:
            self._take("reset")
        return super().reset(**given)

    def step(self, action: Any) -> Any:
        self.total += 1
        if self.total == self.at - 1:
            self._take("step")
        return super().step(action)


class Stuck(Faulty):
    """Has no legal action in the last state of an episode."""

    def action_masks(self) -> Any:
        return np.full(2, self.time < 9)


class OwnLoop(PPO_CLASS):
    def collect_rollouts(self, *args: Any, **more: Any) -> bool:
        return super().collect_rollouts(*args, **more)


class OwnBuffer(PPO_CLASS):
    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more, rollout_buffer_class=Buffer)


class Buffer(RolloutBuffer):
    """A buffer of the user's own."""


class Learner(BaseCallback):
    """Kills actors while the learner updates, and ends the training two rollouts after the last fault."""

    def __init__(self, faults: str) -> None:
        super().__init__()
        self.faults, self.after = Path(faults), 0

    def _on_step(self) -> bool:
        return self.after < 3

    def _on_rollout_start(self) -> None:
        self.after += not [*self.faults.glob("*-*-*")]

        for file in sorted(self.faults.glob("cluster-*"))[:1]:
            file.unlink()
            getattr(CLUSTERS[-1], file.name.split("-")[1])()

    def _on_rollout_end(self) -> None:
        for file in sorted(self.faults.glob("learner-*"))[:1]:
            file.unlink()
            pids = [file.name[4:] for file in self.faults.glob("pid-*")]
            running = [int(pid) for pid in pids if Path("/proc", pid).exists()]
            os.kill(running[0], {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[file.name.split("-")[1]])


class Machines:
    """A cluster of two nodes with a small object store that spills nothing to the disk."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        config = {"automatic_object_spilling_enabled": False, "object_store_full_delay_ms": 100}
        head = {"num_cpus": 1, "object_store_memory": 2**27, "_system_config": config, "include_dashboard": False}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.second, self.held = self._new(), list[Any]()

    def _new(self) -> Any:
        return self.cluster.add_node(num_cpus=1, object_store_memory=2**27)

    def node(self) -> None:
        """The second node leaves, and another one joins."""
        self.cluster.remove_node(self.second, allow_graceful=False)
        self.second = self._new()

    def store(self) -> None:
        """Fill the object store, and free it seconds later."""
        with suppress(ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError):
            for _ in range(40):
                self.held.append(ray.put(np.ones(2**22, np.uint8)))
        Timer(3.0, self.held.clear).start()


CLUSTERS: list[Machines] = []


def lay_out(folder: Path, faults: list[str]) -> tuple[str, ...]:
    """Write the files of the faults. Returns what to type."""
    folder.mkdir()
    for number, fault in enumerate(faults):
        (folder / f"{fault}-{number:03}").touch()
    callback = f'callbacks=[{{callback: "test_ray_actors_faults:Learner", faults: "{folder}"}}]'
    return f"env.kwargs.faults={folder}", callback


def replaced(done: Any) -> dict[str, int]:
    """Causes of replacements and their numbers, of a training that ended well and told what was lost in one place."""
    done.ok()
    assert "Traceback" not in done.out + done.err
    total = done.json("perf.json")["total"]
    assert f"{sum(total['replaced'].values())} envs or actors were replaced" in done.out
    return total["replaced"]


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setattr(ray_actors, "Replacements", lambda most: Replacements(1000))


def test_actors_that_die_or_hang_in_any_place_are_replaced(fasttrain: RunCommand, tmp_path: Path):
    faults = ["start-kill", "start-exit", "step-kill", "step-exit", "step-stop", "step-hang", "reset-kill",
              "reset-stop", "learner-kill", "learner-stop", "step-full"]  # fmt: skip
    done = fasttrain(*PPO, *lay_out(tmp_path / "faults", faults))
    assert replaced(done) == {ENDED: 6, HUNG: 4, ray_actors.FULL: 1}
    assert [*(tmp_path / "faults").glob("*-*-*")] == []


@pytest.mark.parametrize(
    ("typed", "faults", "causes"),
    [
        (("algo=recurrent_ppo", "vec_env=dummy", "env.normalize=[obs,reward]"), ["step-kill", "step-ask", "reset-ask"],
         {ENDED: 1, ASKED: 2}),
        (("algo=ppo", "vec_env=shared", "workers=2", "env.on_env_error=restart", "env.step_timeout_s=20"),
         ["step-raise", "step-exit", "step-ask"], {FAILED: 2, ASKED: 1}),
    ],
    ids=["recurrent and normalised", "workers of actors"],
)  # fmt: skip
def test_envs_that_are_replaced_in_actors_are_counted(
    typed: tuple[str, ...], faults: list[str], causes: dict[str, int], fasttrain: RunCommand, tmp_path: Path
):
    typed = (*(text for text in BASE if text.split("=")[0] not in [each.split("=")[0] for each in typed]), *typed)
    done = fasttrain(*typed, *lay_out(tmp_path / "faults", faults))
    assert replaced(done) == causes


def test_empty_masks_of_actors_are_counted(fasttrain: RunCommand):
    typed = [text for text in BASE if not text.startswith(("env.entry_point", "total_timesteps"))]
    stuck = "env.entry_point=test_ray_actors_faults:Stuck"
    done = fasttrain(*typed, "algo=maskable_ppo", "vec_env=dummy", stuck, "total_timesteps=128").ok()
    assert "actor 0 (envs 0 to 1): no legal action in env 0" in done.out + done.err
    assert done.json("summary.json")["empty_masks"] == 12  # three episodes of each env end within 32 steps


def test_too_many_lost_actors_end_the_run(fasttrain: RunCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ray_actors, "Replacements", lambda most: Replacements(2))
    done = fasttrain(*PPO, *lay_out(tmp_path / "faults", ["start-kill"] * 4))
    assert done.exit_code == 1
    assert "3 restarts within 10 minutes, 2 allowed; the last: actor " in done.err


def test_an_error_in_the_constructor_of_an_env_ends_the_run_in_one_line(fasttrain: RunCommand, tmp_path: Path):
    done = fasttrain(*PPO, *lay_out(tmp_path / "faults", ["start-raise"]))
    assert done.exit_code in (1, 2)
    assert re.search(r"error: actor \d \(envs \d to \d\): .*ValueError: the board fell off the table", done.err)
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("own", "told"),
    [("OwnLoop", "cluster=ray with OwnLoop.collect_rollouts: actors"),
     ("OwnBuffer", "cluster=ray with rollout_buffer_class=Buffer: actors")],
)  # fmt: skip
def test_what_actors_would_not_do_is_refused(own: str, told: str, fasttrain: RunCommand):
    fasttrain(*PPO, f"algo.entry_point=test_ray_actors_faults:{own}").refused(told)


def test_weights_wait_for_room_in_the_object_store(monkeypatch: pytest.MonkeyPatch):
    answers = [ray.exceptions.ObjectStoreFullError, None, *[ray.exceptions.OutOfDiskError] * ray_actors.PUTS]

    def put(weights: str) -> str:
        if (error := answers.pop(0)) is not None:
            raise error
        return weights

    monkeypatch.setattr(ray_actors, "PUT_AGAIN_S", 0.0)
    env = object.__new__(ray_actors.ActorVecEnv)
    env.ray = SimpleNamespace(put=put, exceptions=ray.exceptions)
    assert env.shared("weights") == "weights"
    with pytest.raises(EnvError, match="object store is full: give it more memory"):
        env.shared("weights")
    assert answers == []


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """What to type so that actors run on two nodes, which the faults `cluster-…` act on."""
    CLUSTERS.append(Machines())
    address = CLUSTERS[-1].cluster.address
    monkeypatch.setattr(ray_actors, "LOOPBACK", (address.partition(":")[0],))  # else Ray needs a token
    yield f"cluster.address={address}"
    CLUSTERS.pop().cluster.shutdown()


def test_a_machine_that_leaves_and_a_full_object_store_are_survived(
    fasttrain: RunCommand, tmp_path: Path, machines: str
):
    causes = replaced(fasttrain(*PPO, *lay_out(tmp_path / "faults", ["cluster-node", "cluster-store"]), machines))
    assert {*causes} <= {ENDED, HUNG}, "an actor of a lost machine is gone, or does not answer"
    assert 1 <= sum(causes.values()) <= 3


KINDS = ["start-kill", "start-exit", "step-kill", "step-exit", "step-stop", "step-hang", "step-ask", "step-full",
         "reset-kill", "reset-stop", "reset-ask", "learner-kill", "learner-stop", "cluster-node",
         "cluster-store"]  # fmt: skip


@pytest.mark.campaign
@pytest.mark.timeout(0)
def test_random_faults(fasttrain: RunCommand, tmp_path: Path, machines: str):
    """As many faults as FASTTRAIN_FAULTS says, in one training: it ends by itself, and counts all that was lost."""
    faults = Random(0).choices(KINDS, k=int(os.environ.get("FASTTRAIN_FAULTS", "200")))
    done = fasttrain(*PPO, *lay_out(tmp_path / "faults", faults), machines, "total_timesteps=1e7")
    causes = replaced(done)
    sys.stdout.write(f"{len(faults)} faults: {causes}\n")
    assert [*(tmp_path / "faults").glob("*-*-*")] == []
    assert {*causes} <= {ENDED, HUNG, ASKED, ray_actors.FULL}
    summary, lost = done.json("summary.json"), re.search(r"([\d,]+) env steps were lost", done.out)
    assert summary["status"] == "done"
    assert lost is not None
