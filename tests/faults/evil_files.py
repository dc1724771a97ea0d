"""Malicious files, each against the command that would open it: does any run code, write elsewhere or eat memory?

`python tests/faults/evil_files.py FOLDER` tries all of them and prints a row each as JSON.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import io
import json
import os
import pickle
import shutil
import stat
import struct
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np

MOST_GROWTH_MB = 100  # the bombs here would take 300 MB to 8 TB
BOMB_BYTES = 300 << 20
RUN = (
    "env.entry_point=evil_files:Corridor", "algo=ppo",
    "num_envs=1", "vec_env=dummy", "algo.rollout_size=64", "batch_size=32",
    "algo.n_epochs=1", "total_timesteps=128", "checkpoint_every=64", "eval.episodes=2", "env.normalize=[obs,reward]",
    "report=false", "live=off",
)  # fmt: skip
MODEL, STATISTICS, PICKLED, NEWEST = "model.zip", "vecnormalize.npz", "vecnormalize.pkl", "step_000000000128"


class Corridor(gymnasium.Env[Any, Any]):
    """Ten steps; an env that is quick, shows itself as text and can be normalised."""

    metadata = {"render_modes": ["ansi"]}  # noqa: RUF012 - as Gymnasium has it
    observation_space = gymnasium.spaces.Box(-10.0, 10.0, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        return self._observation(), float(action), self.steps >= 10, False, {}

    def render(self) -> str:  # type: ignore[override]
        return f"step {self.steps}"

    def _observation(self) -> Any:
        return self.np_random.normal(size=4).astype(np.float32)


class Bomb:
    """Its pickle makes a folder when it is loaded."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.canary),)


class Evil(NamedTuple):
    """A way to spoil a run's folder. `spoil(folder, canary)`; `canary` lies outside of the folder."""

    name: str
    command: str
    spoil: Callable[[Path, Path], None]
    refused: bool = True  # False: nobody looks at the spoilt part, or an older checkpoint serves


class Row(NamedTuple):
    """What came of one file."""

    name: str
    command: str
    exit_code: int
    executed: bool
    outside: list[str]  # files that came to be, or changed, outside of the run's folder
    growth_mb: float  # of the process's memory while it was opened, at its highest; 0 where it cannot be measured
    seconds: float
    said: str
    expected: int


# --- archives


def rezip(
    path: Path, changes: dict[str, bytes | None], extra: list[tuple[zipfile.ZipInfo, bytes]] = (), deflate: bool = False
) -> None:
    """The zip with members replaced (None: left out) and others added as they are."""
    with zipfile.ZipFile(path) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    content |= changes  # type: ignore[arg-type]
    kind = zipfile.ZIP_DEFLATED if deflate else zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", kind) as archive:
        for name, data in content.items():
            if data is not None:
                archive.writestr(name, data)
        for info, data in extra:
            archive.writestr(info, data)


def pickled_key(name: str) -> Callable[[Path, Path], None]:
    """A bomb in an entry of the zip's `data`."""

    def spoil(folder: Path, canary: Path) -> None:
        bomb = base64.b64encode(pickle.dumps(Bomb(canary))).decode()
        data(folder, lambda facts: facts.update({name: {":type:": "<class 'dict'>", ":serialized:": bomb}}))

    return spoil


def data(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    with zipfile.ZipFile(folder / MODEL) as archive:
        facts = json.loads(archive.read("data"))
    change(facts)
    rezip(folder / MODEL, {"data": json.dumps(facts).encode()})


def fact(key: str, value: Any) -> Callable[[Path, Path], None]:
    return lambda folder, canary: data(folder, lambda facts: facts.update({key: value}))


def every_key(folder: Path, canary: Path) -> None:
    """A bomb in every entry that SB3 pickles, but for the policy's class, which is looked at."""
    with zipfile.ZipFile(folder / MODEL) as archive:
        facts = json.loads(archive.read("data"))
    for name, value in facts.items():
        if isinstance(value, dict) and ":serialized:" in value and name not in LOOKED_AT:
            pickled_key(name)(folder, canary)


def raw_data(text: bytes) -> Callable[[Path, Path], None]:
    return lambda folder, canary: rezip(folder / MODEL, {"data": text})


def named(name: str, attributes: int = 0o600 | stat.S_IFREG) -> Callable[[Path, Path], None]:
    """A further member of that name, with the canary as content."""

    def spoil(folder: Path, canary: Path) -> None:
        info = zipfile.ZipInfo(name.replace("CANARY", canary.as_posix()))
        info.external_attr = attributes << 16
        rezip(folder / MODEL, {}, [(info, b"written")])

    return spoil


def twice(folder: Path, canary: Path) -> None:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rezip(folder / MODEL, {}, [(zipfile.ZipInfo("policy.pth"), b"another")])


def patched(path: str, name: str, offset: int, value: bytes) -> Callable[[Path, Path], None]:
    """Bytes of a member's entry in the list of names replaced."""

    def spoil(folder: Path, canary: Path) -> None:
        content = bytearray((folder / path).read_bytes())
        place = content.rfind(b"PK\x01\x02")
        while content[place + 46 : place + 46 + len(name)] != name.encode():
            place = content.rfind(b"PK\x01\x02", 0, place)
        content[place + offset : place + offset + len(value)] = value
        (folder / path).write_bytes(bytes(content))

    return spoil


def overlapping(folder: Path, canary: Path) -> None:
    """Every entry of the list of names points at the first member, as the bombs of D. Fifield do."""
    with zipfile.ZipFile(folder / MODEL) as archive:
        names = archive.namelist()
    for name in names:
        patched(MODEL, name, 42, struct.pack("<I", 0))(folder, canary)


def cut(path: str, share: float) -> Callable[[Path, Path], None]:
    def spoil(folder: Path, canary: Path) -> None:
        content = (folder / path).read_bytes()
        (folder / path).write_bytes(content[: int(share * len(content))])

    return spoil


# --- tensors


def torch_file(instructions: bytes, storage: bytes = b"\0" * 16) -> bytes:
    """A file of torch.save with this pickle."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", instructions)
        archive.writestr("archive/byteorder", b"little")
        archive.writestr("archive/data/0", storage)
    return file.getvalue()


def tensor(size: tuple[int, ...], stride: tuple[int, ...], count: int = 4, offset: int = 0) -> bytes:
    """{"log_std": a tensor of these claims}, as torch writes it."""

    def numbers(values: tuple[int, ...]) -> bytes:
        return b"(" + b"".join(b"\x8a\x08" + struct.pack("<q", value) for value in values) + b"t"

    return (
        b"\x80\x02}(X\x07\x00\x00\x00log_stdctorch._utils\n_rebuild_tensor_v2\n(("
        b"X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu\x8a\x08"
        + struct.pack("<q", count) + b"tQ\x8a\x08" + struct.pack("<q", offset)
        + numbers(size) + numbers(stride) + b"\x89ccollections\nOrderedDict\n)RtRu."
    )  # fmt: skip


def weights(content: Callable[[Path], bytes], member: str = "policy.pth") -> Callable[[Path, Path], None]:
    return lambda folder, canary: rezip(folder / MODEL, {member: content(canary)})


def poisoned(folder: Path, canary: Path) -> None:
    """Weights of the right shapes, all NaN."""
    import torch

    with zipfile.ZipFile(folder / MODEL) as archive:
        state = torch.load(io.BytesIO(archive.read("policy.pth")), weights_only=True)
    file = io.BytesIO()
    torch.save({name: torch.full_like(value, float("nan")) for name, value in state.items()}, file)
    rezip(folder / MODEL, {"policy.pth": file.getvalue()})


def deflated_weights(canary: Path) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr("archive/data.pkl", tensor((4,), (1,)))
        archive.writestr("archive/data/0", bytes(BOMB_BYTES))
    return file.getvalue()


# --- arrays


def npz(path: str, members: Callable[[Path], dict[str, bytes]]) -> Callable[[Path, Path], None]:
    def spoil(folder: Path, canary: Path) -> None:
        rezip(folder / path, members(canary))  # type: ignore[arg-type]

    return spoil


def npy(header: str, content: bytes = b"") -> bytes:
    text = header.encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + content


def objects(canary: Path) -> bytes:
    file = io.BytesIO()
    np.save(file, np.array([Bomb(canary)], object), allow_pickle=True)
    return file.getvalue()


HUGE = "{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000,), }"
TRICK = "{'descr': '<f8', 'fortran_order': False, 'shape': (__import__('os').open('CANARY', 64),), }"
WIDE = "{'descr': '|V2000000000', 'fortran_order': False, 'shape': (500,), }"


# --- checkpoints


def checkpoint(change: Callable[[dict[str, bytes], Path], Any]) -> Callable[[Path, Path], None]:
    """The newest one with other files, its manifest made to agree."""
    from fasttrain.saving.checkpoints import MANIFEST, CheckpointFolder

    def spoil(folder: Path, canary: Path) -> None:
        newest = folder / "checkpoints" / NEWEST
        files = {path.name: path.read_bytes() for path in newest.iterdir() if path.name != MANIFEST}
        change(files, canary)
        CheckpointFolder(folder / "checkpoints").publish(128, files)

    return spoil


def in_checkpoint(name: str, content: Callable[[Path], bytes]) -> Callable[[Path, Path], None]:
    return checkpoint(lambda files, canary: files.update({name: content(canary)}))


def state(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path, Path], None]:
    def changed(files: dict[str, bytes], canary: Path) -> None:
        content = json.loads(files["state.json"])
        change(content)
        files["state.json"] = json.dumps(content).encode()

    return checkpoint(changed)


def arrays_with(member: Callable[[Path], bytes]) -> Callable[[dict[str, bytes], Path], None]:
    def changed(files: dict[str, bytes], canary: Path) -> None:
        file = io.BytesIO(files["arrays.npz"])
        with zipfile.ZipFile(file, "a") as archive:
            archive.writestr("evil.npy", member(canary))
        files["arrays.npz"] = file.getvalue()

    return changed


def manifest_names(name: str) -> Callable[[Path, Path], None]:
    """A manifest that has a file elsewhere checked, and with it read."""

    def spoil(folder: Path, canary: Path) -> None:
        path = folder / "checkpoints" / NEWEST / "manifest.json"
        content = json.loads(path.read_text())
        content["files"][name] = content["files"].pop("state.json")
        path.write_text(json.dumps(content, indent=1))

    return spoil


def linked(place: str) -> Callable[[Path, Path], None]:
    """A file or folder of the run moved out of it, a link in its place."""

    def spoil(folder: Path, canary: Path) -> None:
        elsewhere = canary.with_name("elsewhere") / place.replace("/", "_")
        elsewhere.parent.mkdir(exist_ok=True)
        path = folder / place
        if path.exists():
            os.replace(path, elsewhere)
        else:
            elsewhere.write_text("mine")
        path.symlink_to(elsewhere)

    return spoil


# --- the list

PICKLED_KEYS = ("policy_class", "policy_kwargs", "observation_space", "lr_schedule", "_last_obs", "n_steps")
LOOKED_AT = ("policy_class",)


def evil_files() -> Iterator[Evil]:
    """All of them."""
    for key in PICKLED_KEYS:
        yield Evil(f"pickle bomb as {key} of a model", "eval", pickled_key(key), key in LOOKED_AT)
    yield Evil("pickle bombs as everything else that SB3 pickles", "eval", every_key, refused=False)
    yield from _models()
    yield from _weights()
    yield from _statistics()
    yield from _checkpoints()


def _models() -> Iterator[Evil]:
    yield Evil("policy_class is the text os.system", "eval", fact("policy_class", "os.system"))
    yield Evil("policy_class is of another package", "play", fact("policy_class", {"__module__": "os"}))
    kwargs = {"features_extractor_class": "<class 'os.system'>"}
    yield Evil("policy_kwargs name a class", "export", fact("policy_kwargs", kwargs))
    yield Evil("policy_kwargs of another activation", "eval", fact("policy_kwargs", {"activation_fn": "torch.nn.ReLU"}))
    yield Evil(
        "a network of a terabyte in policy_kwargs", "eval", fact("policy_kwargs", {"net_arch": [10**6] * 2}), False
    )
    yield Evil("a replay buffer of a terabyte", "eval", fact("n_steps", 10**12), False)
    for name in ("../CANARY", "CANARY", "..\\..\\evil", "C:\\evil", "__init__.py"):
        yield Evil(f"a member named {name}", "eval", named(name))
    yield Evil("a member that is a link", "eval", named("system_info.txt2", 0o777 | stat.S_IFLNK))
    yield Evil("policy.pth twice", "eval", twice)
    yield Evil("an encrypted member", "eval", patched(MODEL, "data", 8, b"\x01\x00"))
    yield Evil(
        "a member that says it has 4 GB", "eval", patched(MODEL, "data", 20, b"\xfe\xff\xff\xff\xfe\xff\xff\xff")
    )
    yield Evil("a member that needs zip64 and lacks it", "eval", patched(MODEL, "data", 24, b"\xff\xff\xff\xff"))
    yield Evil("members that overlap", "eval", overlapping)
    bomb = b'{"a": "' + b" " * BOMB_BYTES + b'"}'
    yield Evil("a deflate bomb", "eval", lambda folder, canary: rezip(folder / MODEL, {"data": bomb}, deflate=True))
    yield Evil("JSON 100,000 deep", "eval", raw_data(b"[" * 100_000 + b"]" * 100_000))
    yield Evil("JSON of 8 million lists", "eval", raw_data(b"[" + b"[]," * 8_000_000 + b"[]]"))
    yield Evil("JSON with a number of a million digits", "eval", raw_data(b'{"a": ' + b"9" * 10**6 + b"}"))
    yield Evil("data is no JSON", "eval", raw_data(b"\xff\xfe"))
    yield Evil("NaN as num_timesteps", "play", fact("num_timesteps", float("nan")), False)
    yield Evil("a zip cut off in the middle", "play", cut(MODEL, 0.5))
    yield Evil("a zip without its last bytes", "export", cut(MODEL, 0.99))
    yield Evil(
        "a pickle named model.zip", "eval", lambda folder, canary: _write(folder / MODEL, pickle.dumps(Bomb(canary)))
    )


def _weights() -> Iterator[Evil]:
    yield Evil("policy.pth is a plain pickle", "eval", weights(lambda canary: pickle.dumps(Bomb(canary))))
    reduced = b"\x80\x02cbuiltins\nopen\n(X%bX\x01\x00\x00\x00wtR."

    def calls_open(canary: Path) -> bytes:
        path = str(canary).encode()
        return torch_file(reduced.replace(b"%b", struct.pack("<I", len(path)) + path))

    yield Evil("a pickle in policy.pth that calls open", "eval", weights(calls_open))
    yield Evil("the same in a model to export", "export", weights(calls_open))
    yield Evil(
        "a pickle bomb as pytorch_variables.pth", "eval", weights(calls_open, "pytorch_variables.pth"), refused=False
    )
    allocates = b"\x80\x02cbuiltins\nbytearray\n\x8a\x06\x00\x00\x00\x00\x00\x01\x85R."
    yield Evil("a bytearray of a terabyte, which weights_only allows", "eval", weights(lambda _: torch_file(allocates)))
    yield Evil("a memo place of 4 billion", "eval", weights(lambda _: torch_file(b"\x80\x02}r\xff\xff\xff\xff.")), True)
    deep = b")" + b"\x85" * 300_000
    yield Evil(
        "a tuple 300,000 deep as a key", "eval", weights(lambda _: torch_file(b"\x80\x02}" + deep + b"Ns.")), True
    )
    yield Evil("INST, an old way to call", "eval", weights(lambda _: torch_file(b"(S'true'\nios\nsystem\n.")))
    yield Evil(
        "STACK_GLOBAL, a new way", "eval", weights(lambda _: torch_file(b"\x80\x04\x8c\x02os\x8c\x06system\x93."))
    )
    yield Evil("a tensor of 4 TB by strides of 0", "eval", weights(lambda _: torch_file(tensor((10**12,), (0,)))))
    yield Evil("a tensor beyond its storage", "eval", weights(lambda _: torch_file(tensor((4,), (1,), offset=10**6))))
    yield Evil("a storage that says it is longer", "eval", weights(lambda _: torch_file(tensor((9999,), (1,), 9999))))
    yield Evil("a deflate bomb in policy.pth", "eval", weights(deflated_weights))
    yield Evil("weights that are NaN", "eval", poisoned)


def _statistics() -> Iterator[Evil]:
    def only_pickled(folder: Path, canary: Path) -> None:
        (folder / STATISTICS).unlink()
        _write(folder / PICKLED, pickle.dumps(Bomb(canary)))

    for command in ("eval", "play", "export"):
        yield Evil(f"a pickle bomb as vecnormalize.pkl, for {command}", command, only_pickled)
    first = "observations.mean.npy"
    yield Evil("objects in vecnormalize.npz", "eval", npz(STATISTICS, lambda canary: {first: objects(canary)}))
    yield Evil("an array of 8 TB in vecnormalize.npz", "eval", npz(STATISTICS, lambda _: {first: npy(HUGE)}))
    nan = npy("{'descr': '<f8', 'fortran_order': False, 'shape': (4,), }", struct.pack("<4d", *[float("nan")] * 4))
    yield Evil("statistics that are NaN", "eval", npz(STATISTICS, lambda _: {first: nan}))


def _checkpoints() -> Iterator[Evil]:
    def resume(name: str, spoil: Callable[[Path, Path], None], refused: bool = False) -> Evil:
        return Evil(f"checkpoint: {name}", "resume", spoil, refused)

    yield resume("objects in arrays.npz", checkpoint(arrays_with(objects)))
    yield resume("an array of 8 TB", checkpoint(arrays_with(lambda _: npy(HUGE))))
    yield resume("a type of 1 TB", checkpoint(arrays_with(lambda _: npy(WIDE))))
    yield resume(
        "code as an array's shape", checkpoint(arrays_with(lambda canary: npy(TRICK.replace("CANARY", str(canary)))))
    )
    yield resume("state.json 100,000 deep", in_checkpoint("state.json", lambda _: b"[" * 100_000))
    yield resume(
        "state.json of 8 million lists", in_checkpoint("state.json", lambda _: b"[" + b"[]," * 8_000_000 + b"[]]")
    )
    yield resume("a pickle as state.json", in_checkpoint("state.json", lambda canary: pickle.dumps(Bomb(canary))))
    yield resume("NaN as env_steps", state(lambda content: content.update(env_steps=float("nan"))))
    yield resume(
        "a length of -5 of episodes.csv", state(lambda content: content["run"]["episodes_file"].update(bytes=-5)), True
    )
    yield resume("no lists of evaluations", state(lambda content: content["run"].update(evaluations=7)), True)
    yield resume(
        "a counter that is a text", state(lambda content: content["model"]["counters"].update(num_timesteps="x")), True
    )
    yield resume("a pickle bomb in its model.zip", in_checkpoint(MODEL, lambda canary: pickle.dumps(Bomb(canary))))
    yield resume(
        "a pickle bomb in its vecnormalize.pkl", in_checkpoint(PICKLED, lambda canary: pickle.dumps(Bomb(canary)))
    )
    for name in ("../../plan.json", "/etc/passwd"):
        yield resume(f"a manifest that names {name}", manifest_names(name))
    for place in (f"checkpoints/{NEWEST}", f"checkpoints/{NEWEST}/manifest.json",
                  "checkpoints", "episodes.csv", "summary.json.tmp"):  # fmt: skip
        yield resume(f"{place} is a link to another place", linked(place), True)


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


# --- trying them


# What is typed to have a run opened, beside run=FOLDER.
TYPED = {
    "eval": (),
    "export": ("format=torchscript",),
    "play": ("play.speed=1e9", "play.episodes=1", "play.seed=0"),
    "resume": ("total_timesteps=192",),
}


class Opener:
    """The commands without the command line before them, which takes longer than they do (Hydra composes)."""

    def __init__(self) -> None:
        from fasttrain.cli.compose import configured

        self.configs = {command: configured(typed) for command, typed in TYPED.items()}

    def open(self, command: str, run: Path) -> tuple[int, str]:
        """Exit code and message, as the command line gives them; -1 for what it would call a crash."""
        from fasttrain.cli.commands import implementation
        from fasttrain.errors import FastTrainError

        config = dataclasses.replace(self.configs[command], run=str(run))
        typed = dict.fromkeys(("run", *(text.partition("=")[0] for text in TYPED[command])), "command line")
        written = run / "opened"
        written.mkdir(exist_ok=True)

        def call() -> int:
            try:
                code: int = implementation(command)(config, typed, written, [f"run={run}"])
            except (FastTrainError, MemoryError) as error:
                sys.stderr.write(f"fasttrain: error: {error}\n")
                return getattr(error, "exit_code", 2)
            return code

        return quietly(call)


def make_run(folder: Path) -> None:
    """The run that is spoilt: trained in a second, with a checkpoint before the last."""
    from fasttrain.cli import main

    code, said = quietly(lambda: main([*RUN, f"hydra.run.dir={folder}"]))
    if code:
        raise RuntimeError(f"the run itself ended with {code}: {said}")


def quietly(call: Callable[[], int]) -> tuple[int, str]:
    """The exit code, -1 for an exception, and what was written to stderr."""
    said = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
        try:
            code = call()
        except Exception as error:
            return -1, repr(error)
    return code, said.getvalue()


def check(evil: Evil, run: Path, folder: Path, opener: Opener) -> Row:
    """Spoil a copy of `run` below `folder` and open it."""
    folder.mkdir(parents=True)
    victim, canary = folder / "run", folder / "executed"
    shutil.copytree(run, victim)
    evil.spoil(victim, canary)
    before, began = _outside(folder), time.perf_counter()
    at_first = _new_peak_mb()
    code, said = opener.open(evil.command, victim)
    took, after = time.perf_counter() - began, _outside(folder)
    changed = sorted(name for name in after.keys() | before.keys() if after.get(name) != before.get(name))
    return Row(
        evil.name, evil.command, code, canary.exists(), changed, round(_peak_mb() - at_first, 1), round(took, 2),
        said.strip()[:400], 2 if evil.refused else 0,
    )  # fmt: skip


def check_all(folder: Path) -> list[Row]:
    """Every file, in this process; each of the commands has been run once before, so that its imports are counted."""
    run, opener = folder / "trained", Opener()
    make_run(run)
    for command in TYPED:
        shutil.copytree(run, folder / command)
        code, said = opener.open(command, folder / command)
        if code:
            raise RuntimeError(f"{command} of a good run ended with {code}: {said}")
    return [check(evil, run, folder / str(number), opener) for number, evil in enumerate(evil_files())]


def _outside(folder: Path) -> dict[str, bytes]:
    """Everything below `folder` but the run, links not followed into it."""
    found = {}
    for path in folder.rglob("*"):
        if path.relative_to(folder).parts[0] != "run" and path.is_file():
            found[path.relative_to(folder).as_posix()] = path.read_bytes()
    return found


def _new_peak_mb() -> float:
    """Forget the process's highest use of memory so far (of making the file, say); what it uses now."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _peak_mb()


def _peak_mb() -> float:
    """The highest since then, of Linux's own count (VmHWM)."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM")), 0.0)


if __name__ == "__main__":
    rows = check_all(Path(sys.argv[1]).resolve())
    sys.stdout.write(json.dumps([row._asdict() for row in rows]))
