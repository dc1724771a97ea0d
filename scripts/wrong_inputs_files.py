"""Wrong inputs by hand: YAML files, and folders of runs and studies."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from wrong_inputs_settings import ENV, Case, Content, Prepare, with_files

SMALL_RUN = (*ENV, "algo=ppo", "algo.n_steps=8", "batch_size=4", "algo.n_epochs=1", "eval.episodes=2",
             "checkpoint_every=8")  # fmt: skip
Damage = Callable[[Path], object]


def with_run(damage: Damage) -> Prepare:
    """A finished run in `run`, damaged."""

    def prepare(folder: Path, trained: Callable[[], Path]) -> None:
        shutil.copytree(trained(), folder / "run")
        damage(folder / "run")

    return prepare


# --- YAML

YAMLS: dict[str, Content] = {
    "broken": "num_envs: [1, 2\nseed: 3\n",
    "a tab": "num_envs:\n\t- 3\n",
    "a tab before": "\tnum_envs: 3\n",
    "a key twice": "num_envs: 3\nnum_envs: 4\n",
    "a list": "- num_envs\n- 3\n",
    "a text": "num_envs\n",
    "a number": "5\n",
    "binary": bytes(range(256)),
    "nulls": b"\x00\x00\x00\x00",
    "not UTF-8": "num_envs: 3 # gr\xf6\xdfe\n".encode("latin-1"),
    "UTF-16": "num_envs: 3\n".encode("utf-16"),
    "a colon too many": "num_envs: 3: 4\n",
    "an open quote": "num_envs: '3\n",
    "an open brace": "env: {id: CartPole-v1\n",
    "an unknown tag": "num_envs: !!python/object/apply:os.getcwd []\n",
    "another unknown tag": "num_envs: !thing 3\n",
    "an unknown anchor": "num_envs: *nothing\n",
    "two documents": "num_envs: 3\n---\nnum_envs: 4\n",
    "a wrong type": "num_envs: abc\n",
    "a misspelt key": "num_evns: 4\n",
    "a misspelt key below": "env:\n  max_step: 4\n",
    "a list for a mapping": "env: [1, 2]\n",
    "a text for a mapping": "stop: now\n",
    "a mapping for a number": "num_envs: {a: 1}\n",
    "an unknown reference": "num_envs: ${nothing}\n",
    "a reference to itself": "num_envs: ${num_envs}\n",
    "a broken reference": "num_envs: ${seed\n",
    "an unknown resolver": "num_envs: ${nothing:3}\n",
    "an unknown default": "defaults:\n  - nothing\n",
    "defaults of a number": "defaults: 5\n",
    "a default that is itself": "defaults:\n  - mine\n",
    "null keys": "null: 3\n",
    "number keys": "3: 4\n",
    "out of range": "num_envs: -3\n",
    "a date": "num_envs: 2026-01-01\n",
    "deep": "num_envs: " + "[" * 2000 + "]" * 2000 + "\n",
    "a percent": "%\n",
    "an at": "num_envs: @3\n",
    "a question": "? [a]\n: 3\n",
}
KEYS = ("num_envs", "num_evns", "max_step", "stop", "env", "nothing")
PACKAGE = "# @package _global_\n"


def yamls() -> Iterator[Case]:
    def as_profile(content: Content) -> Content:
        return PACKAGE + content if isinstance(content, str) else content

    for what, content in YAMLS.items():
        keys = [word for word in ("num_envs", "num_evns", "max_step", "stop", "env", "nothing") if word in str(content)]
        named = ("mine.yaml", *keys, "mine", "key '3'", "'env.3'")
        for kind, path, arguments in (
            ("profile", "conf/profile/mine.yaml", ("--config-dir", "conf", "+profile=mine")),
            ("profile first", "conf/profile/mine.yaml", ("+profile=mine", "--config-dir=conf", "hydra.run.dir=out")),
            ("env group", "conf/env/mine.yaml", ("--config-dir", "conf", "env=mine")),
            ("algo group", "conf/algo/mine.yaml", ("--config-dir", "conf", "algo=mine")),
        ):
            text = as_profile(content) if "profile" in path else content
            start = tuple(key for key in ENV if key != "num_envs=1" and (key != ENV[0] or kind != "env group"))
            algo = () if kind == "algo group" else ("algo=ppo",)
            yield Case(f"YAML, {kind}: {what}", (*start, *algo, *arguments), named, prepare=with_files({path: text}))
    for what, content in {"broken": YAMLS["broken"], "a list": YAMLS["a list"], "binary": bytes(range(256))}.items():
        yield Case(f"YAML, config: {what}", (*ENV, "algo=ppo", "--config-dir", "conf", "--config-name", "mine"),
                   ("mine", "--config-name"), prepare=with_files({"conf/mine.yaml": content}))  # fmt: skip
    for command in ("eval", "doctor", "compare", "check", "tune", "ablate", "warmup"):
        arguments = (command, "--config-dir", "conf", "+profile=mine")
        yield Case("YAML, other commands", arguments, ("mine.yaml",),
                   prepare=with_files({"conf/profile/mine.yaml": PACKAGE + "num_envs: [1\n"}))  # fmt: skip
    yield Case("YAML, candidate", ("compare", "candidates=[baseline,mine]", "--config-dir", "conf"), ("mine.yaml",),
               prepare=with_files({"conf/profile/mine.yaml": PACKAGE + "num_envs: [1\n"}))  # fmt: skip
    yield Case("YAML, sweep", ("-m", "+profile=speed,mine", "--config-dir", "conf"), ("mine.yaml",),
               prepare=with_files({"conf/profile/mine.yaml": PACKAGE + "num_envs: [1\n"}))  # fmt: skip
    folder_for_file = with_files({"conf/profile/mine.yaml/x": ""})
    yield Case("YAML, a folder", (*ENV, "--config-dir", "conf", "+profile=mine"), ("mine",), prepare=folder_for_file)
    yield Case("YAML, a file as folder", (*ENV, "--config-dir", "conf"), ("conf",), prepare=with_files({"conf": "x"}))


# --- folders


def truncated(name: str, share: float) -> Damage:
    return lambda run: (run / name).write_bytes((run / name).read_bytes()[: int(share * (run / name).stat().st_size)])


def written(name: str, content: Content) -> Damage:
    return lambda run: (run / name).write_bytes(content.encode() if isinstance(content, str) else content)


def changed(**values: object) -> Damage:
    """Other values in plan.json's configuration."""

    def damage(run: Path) -> None:
        plan = json.loads((run / "plan.json").read_text(encoding="utf-8"))
        for key, value in values.items():
            node, *path = plan["config"], *key.split("__")
            for part in path[:-1]:
                node = node[part]
            node[path[-1]] = value
        (run / "plan.json").write_text(json.dumps(plan), encoding="utf-8")

    return damage


def folder_for(name: str) -> Damage:
    def damage(run: Path) -> None:
        (run / name).unlink()
        (run / name).mkdir()

    return damage


DAMAGES: dict[str, Damage] = {
    "no plan.json": lambda run: (run / "plan.json").unlink(),
    "an empty plan.json": written("plan.json", ""),
    "a broken plan.json": written("plan.json", '{"config": {'),
    "a list in plan.json": written("plan.json", "[]"),
    "a plan.json without configuration": written("plan.json", "{}"),
    "a null plan.json": written("plan.json", "null"),
    "a binary plan.json": written("plan.json", bytes(range(256))),
    "a plan.json of another kind": written("plan.json", '{"config": {"num_envs": 4}, "flags": []}'),
    "a deep plan.json": written("plan.json", "[" * 100_000 + "]" * 100_000),
    "a folder as plan.json": folder_for("plan.json"),
    "a wrong value in plan.json": changed(num_envs="abc"),
    "an unknown key in plan.json": changed(nothing=3),
    "an unknown env in plan.json": changed(env__id="NoSuch-v0"),
    "another algorithm in plan.json": changed(algo__name="dqn"),
    "an unknown algorithm in plan.json": changed(algo__name="a3c"),
}
ZIPS: dict[str, Damage] = {
    "no model.zip": lambda run: (run / "model.zip").unlink(),
    "an empty model.zip": written("model.zip", ""),
    "half a model.zip": truncated("model.zip", 0.5),
    "a model.zip cut at the end": truncated("model.zip", 0.98),
    "text as model.zip": written("model.zip", "no zip"),
    "an empty zip": written("model.zip", b"PK\x05\x06" + bytes(18)),
    "a folder as model.zip": folder_for("model.zip"),
    "another env in plan.json": changed(env__id="Acrobot-v1"),
    "another net in plan.json": changed(algo__net_arch=[8]),
}
CHECKPOINTS: dict[str, Damage] = {
    "no checkpoints": lambda run: shutil.rmtree(run / "checkpoints"),
    "empty checkpoints": lambda run: [(shutil.rmtree(at), at.mkdir()) for at in (run / "checkpoints").iterdir()],
    "checkpoints of a file": lambda run: [shutil.rmtree(run / "checkpoints"), written("checkpoints", "x")(run)],
    "cut checkpoints": lambda run: [truncated(str(at.relative_to(run)), 0.5)(run)
                                    for at in (run / "checkpoints").rglob("*") if at.is_file()],
}  # fmt: skip


RUNS = (
    "", "null", "[a]", "{a: 1}", "5", "a/../..", "/", "~",
    "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx",
    "'a\tb'", "run,run", "/dev/null", "/proc/self/mem",
)  # fmt: skip
NAMED = ("run=run", "run/", "model.zip", "env.id=NoSuch")


def folders() -> Iterator[Case]:
    way: dict[str, tuple[str, ...]] = {
        "eval": ("eval", "run=run", "eval.episodes=2"),
        "resume": ("resume", "run=run", "total_timesteps=32"),
        "export": ("export", "run=run", "format=torchscript"),
        "play": ("play", "run=run", "play.episodes=1"),
        "doctor": ("doctor", "run=run", "doctor.seconds=0.05", "doctor.tries=0"),
    }
    for command, arguments in way.items():
        damages = {**DAMAGES, **(CHECKPOINTS if command == "resume" else {} if command == "doctor" else ZIPS)}
        for what, damage in damages.items():
            yield Case(
                f"run folder: {what}",
                arguments,
                ("run=run", "run/", "model.zip", "env.id=NoSuch"),
                prepare=with_run(damage),
            )
    for command, arguments in {**way, "report": ("report", "run=run")}.items():
        for what, prepare in {
            "missing": None,
            "a file": with_files({"run": "x"}),
            "empty": lambda folder, _: (folder / "run").mkdir(),
            "other files": with_files({"run/x.txt": "x"}),
            "a link to itself": lambda folder, _: (folder / "run").symlink_to("run"),
        }.items():
            yield Case(f"run folder: {what}", arguments, ("run=run",), prepare=prepare)
        for value in RUNS:
            if (command, value) == ("doctor", "null"):
                continue
            yield Case("run folder", (command, f"run={value}", *arguments[2:]), ("run", command))
    for key, more in (("hydra.run.dir", ()), ("hydra.sweep.dir", ("-m", "seed=1,2"))):
        for value in ("/proc/nothing/x", "/dev/null/x", "a" * 300, "file/x", "file", "'x\x00y'", "/sys/x"):
            arguments = (*ENV, "algo=ppo", *more, f"{key}={value}")
            yield Case("output folder", arguments, (value, "output folder", key), prepare=with_files({"file": "x"}))
    for name in ("study.json", "plan.json", "sweep.json"):
        for content in ("", "{", "[]", '{"command": 5}', '{"command": "compare", "arguments": 5}', "null"):
            for arguments in (("compare", "study=out"), (*ENV, "algo=ppo", "hydra.run.dir=out")):
                yield Case("output folder with something", arguments, ("out", "study", "candidates"),
                           prepare=with_files({f"out/{name}": content}))  # fmt: skip
    for value in ("/proc/x.onnx", "no/such/folder/x.onnx", "out/", "/"):
        yield Case("export", ("export", "run=run", "format=torchscript", f"output={value}"), ("output",),
                   prepare=with_run(lambda run: (run.parent / "out").mkdir()))  # fmt: skip
