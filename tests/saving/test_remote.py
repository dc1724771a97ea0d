"""checkpoint.copy_to: a run that goes on from its copy, what is copied, and places that fail."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from conftest import RunCommand
from fasttrain.cli import main
from fasttrain.errors import ConfigError
from fasttrain.saving.checkpoints import CheckpointFolder, problem_of
from fasttrain.saving.remote import CopyError, RemoteFolder, fetch
from resume_cases import assert_equal

SMALL = ("+profile=speed", "num_envs=8", "algo.rollout_size=256", "batch_size=64", "algo.n_epochs=2", "checkup=off",
         "algo.net_arch=[8]", "eval.episodes=2", "checkpoint_every=256", "report=false", "seed=3")  # fmt: skip


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_a_run_goes_on_from_its_copy_and_is_the_same_run(fasttrain: RunCommand, trained: RunCommand, tmp_path: Path):
    place = tmp_path / "away"
    whole = trained(*SMALL, "total_timesteps=1024")
    typed = (*SMALL, "total_timesteps=1024", f"checkpoint.copy_to={place}")
    first = fasttrain(*typed).ok()
    assert {"plan.json", "summary.json", "episodes.csv", "model.zip"} <= files(place)
    assert files(place) == files(first.folder) - {".lock"}
    for step in ("step_000000001024", "step_000000000768"):  # as if the machine had been lost before
        shutil.rmtree(place / "checkpoints" / step)
    (place / "summary.json").unlink()
    shutil.rmtree(first.folder)
    fasttrain(*typed).refused(f"checkpoint.copy_to={place} holds a run")
    done = fasttrain(*typed, "on_existing=resume").ok()
    assert f"the run was copied from {place}" in done.out
    assert "going on from step_000000000512: 512 of 1,024 steps" in done.out
    assert_equal(whole.folder, done.folder)
    assert files(place) == files(done.folder) - {".lock"}
    assert all(problem_of(path) == "" for path in (place / "checkpoints").iterdir())
    assert "nothing is left to do" in fasttrain(*typed, "on_existing=resume").ok().out
    fasttrain(*typed, "total_timesteps=512", "on_existing=overwrite").ok()
    assert {path.name for path in (place / "checkpoints").iterdir()} == {f"step_{step:012d}" for step in (256, 512)}


def test_a_run_that_was_made_longer_and_then_killed_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "run" / "plan.json"
    typed = ("train", *SMALL, f"hydra.run.dir={file.parent}", "live=off", "on_existing=resume")
    assert main([*typed, "total_timesteps=512"]) == 0
    plan = json.loads(file.read_text())
    plan["config"]["total_timesteps"] = 768  # as a resume writes it; its summary.json comes at the end
    file.write_text(json.dumps(plan))
    assert main([*typed, "total_timesteps=768"]) == 0
    assert "going on from step_000000000512: 512 of 768 steps" in capsys.readouterr().out


def checkpoint(folder: Path, step: int, text: str = "x") -> None:
    CheckpointFolder(folder / "checkpoints").publish(step, {"arrays.npz": text.encode()})


def test_old_checkpoints_go_and_only_a_later_one_is_fetched(tmp_path: Path):
    here, there, other = (tmp_path / name for name in ("here", "there", "other"))
    checkpoint(here, 1)
    (here / "checkpoints" / ".staged-step_2").mkdir()
    (here / "checkpoints" / ".staged-step_2" / "half").write_text("")
    (here / ".lock").write_text("7")
    remote = RemoteFolder(str(there))
    remote.store(here)
    assert files(there) == {f"checkpoints/step_000000000001/{name}" for name in ("arrays.npz", "manifest.json")}
    shutil.rmtree(here / "checkpoints" / "step_000000000001")
    checkpoint(here, 2)
    checkpoint(here, 3, "old")
    checkpoint(here, 3, "another text")
    remote.store(here)
    assert {name.split("/")[1] for name in files(there)} == {"step_000000000002", "step_000000000003"}
    checkpoint(other, 3, "mine")
    assert not remote.fetch_newer(other)
    (other / "checkpoints" / "step_000000000003" / "manifest.json").unlink()  # it was not fetched whole
    assert remote.fetch_newer(other)
    assert (other / "checkpoints" / "step_000000000003" / "arrays.npz").read_text() == "another text"
    for folder, began in ((here, "today"), (other, "yesterday")):
        (folder / "plan.json").write_text(json.dumps({"provenance": {"began": began}}))
    remote.store(here)
    with pytest.raises(CopyError, match="ValueError: another run was copied there; use another place"):
        RemoteFolder(str(there)).store(other)
    with pytest.raises(ConfigError, match="holds another run than"):
        remote.fetch_newer(other)
    assert remote.has_run()
    remote.clear()
    assert files(there) == set()


def test_a_place_that_fails(fasttrain: RunCommand, tmp_path: Path):
    with pytest.raises(ConfigError, match="copy_to=none://x: Protocol not known: none"):
        RemoteFolder("none://x")
    with pytest.raises(ConfigError, match="lies in the run's own folder"):
        fetch(tmp_path, str(tmp_path / "checkpoints"), "refuse")
    blocked = tmp_path / "blocked"
    blocked.write_text("a file")
    checkpoint(tmp_path / "run", 1)
    with pytest.raises(CopyError, match=f"its copy at {blocked}: "):
        RemoteFolder(str(blocked)).store(tmp_path / "run")
    done = fasttrain(*SMALL, "total_timesteps=512", f"checkpoint.copy_to={blocked}")
    assert done.exit_code == 1
    assert f"the checkpoint of 256 steps could not be written (CopyError: its copy at {blocked}" in done.err + done.out
    assert f"not saved: the copy at {blocked}" in done.err
    assert (done.folder / "checkpoints" / "step_000000000512" / "manifest.json").is_file()
    fasttrain("-m", *SMALL, "seed=1,2", f"checkpoint.copy_to={blocked}").refused("checkpoint.copy_to is for one run")


def test_a_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With moto's server in place of S3. Both are in no extra of development: pip install s3fs 'moto[server]'."""
    pytest.importorskip("s3fs")
    server: Any = pytest.importorskip("moto.server").ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "a",
                        "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    try:
        remote = RemoteFolder("s3://runs/mine")
        remote.system.mkdir("runs")
        checkpoint(tmp_path / "run", 1)
        checkpoint(tmp_path / "run", 2)
        remote.store(tmp_path / "run")
        shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_000000000001")
        remote.store(tmp_path / "run")
        assert "copied from s3://runs/mine" in fetch(tmp_path / "back", "s3://runs/mine", "resume")
        assert files(tmp_path / "back") == files(tmp_path / "run")
        (tmp_path / "run" / "plan.json").write_text(json.dumps({"provenance": {"began": "today"}}))
        remote.store(tmp_path / "run")
        with pytest.raises(ConfigError, match="holds a run"):
            fetch(tmp_path / "new", "s3://runs/mine", "refuse")
        remote.clear()
        assert not remote.has_run()
    finally:
        server.stop()
