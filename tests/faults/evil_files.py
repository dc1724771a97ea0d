"""Malicious files, each with the command that would open it: test_evil_files.py tries them."""

from __future__ import annotations

import base64
import io
import json
import os
import pickle
import stat
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch

from fasttrain.saving.checkpoints import MANIFEST, CheckpointFolder
from plain_env import PlainEnv

BOMB_BYTES = 150 << 20
RUN = (
    "env.entry_point=evil_files:Corridor", "algo=ppo",
    "num_envs=1", "vec_env=dummy", "algo.rollout_size=64", "batch_size=32",
    "algo.n_epochs=1", "total_timesteps=128", "checkpoint_every=64", "eval.episodes=2", "env.normalize=[obs,reward]",
)  # fmt: skip
MODEL, STATISTICS, PICKLED, NEWEST = "model.zip", "vecnormalize.npz", "vecnormalize.pkl", "step_000000000128"
Spoil = Callable[[Path, Path], Any]  # of a run's folder; a canary lies outside of it


class Corridor(PlainEnv):
    """Ten steps; an env that is quick, shows itself as text and can be normalised."""

    metadata = {"render_modes": ["ansi"]}  # noqa: RUF012 - as Gymnasium has it
    observation_space = gymnasium.spaces.Box(-10.0, 10.0, (4,), np.float32)

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode

    def render(self) -> str:  # type: ignore[override]
        return f"step {self.time}"

    def seen(self) -> Any:
        return self.np_random.normal(size=4).astype(np.float32)


class Bomb:
    """Its pickle makes a folder when it is loaded."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.canary),)


class Evil(NamedTuple):
    """A way to spoil a run's folder."""

    name: str
    command: str
    spoil: Spoil
    refused: bool = True  # False: nobody looks at the spoilt part, or an older checkpoint serves


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


def pickled_key(name: str) -> Spoil:
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


def fact(key: str, value: Any) -> Spoil:
    return lambda folder, canary: data(folder, lambda facts: facts.update({key: value}))


def every_key(folder: Path, canary: Path) -> None:
    """A bomb in every entry that SB3 pickles, but for the policy's class, which is looked at."""
    with zipfile.ZipFile(folder / MODEL) as archive:
        facts = json.loads(archive.read("data"))
    for name, value in facts.items():
        if isinstance(value, dict) and ":serialized:" in value and name != "policy_class":
            pickled_key(name)(folder, canary)


def member(path: str, name: str, content: Callable[[Path], bytes], deflate: bool = False) -> Spoil:
    """Other content of a member of the zip; of it the canary is known."""
    return lambda folder, canary: rezip(folder / path, {name: content(canary)}, deflate=deflate)


def raw_data(text: bytes) -> Spoil:
    return member(MODEL, "data", lambda _: text)


def named(name: str, attributes: int = 0o600 | stat.S_IFREG) -> Spoil:
    """A further member of that name, with the canary as content."""

    def spoil(folder: Path, canary: Path) -> None:
        info = zipfile.ZipInfo(name.replace("CANARY", canary.as_posix()))
        info.external_attr = attributes << 16
        rezip(folder / MODEL, {}, [(info, b"written")])

    return spoil


def twice(folder: Path, canary: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rezip(folder / MODEL, {}, [(zipfile.ZipInfo("policy.pth"), b"another")])


def patched(path: str, name: str, offset: int, value: bytes) -> Spoil:
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


def cut(path: str, share: float) -> Spoil:
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


def tensor(size: tuple[int, ...], stride: tuple[int, ...], count: int = 4) -> bytes:
    """{"log_std": a tensor of these claims}, as torch writes it."""

    def numbers(values: tuple[int, ...]) -> bytes:
        return b"(" + b"".join(b"\x8a\x08" + struct.pack("<q", value) for value in values) + b"t"

    return (
        b"\x80\x02}(X\x07\x00\x00\x00log_stdctorch._utils\n_rebuild_tensor_v2\n(("
        b"X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu\x8a\x08"
        + struct.pack("<q", count) + b"tQK\x00"
        + numbers(size) + numbers(stride) + b"\x89ccollections\nOrderedDict\n)RtRu."
    )  # fmt: skip


def weights(content: Callable[[Path], bytes]) -> Spoil:
    return member(MODEL, "policy.pth", content)


def poisoned(folder: Path, canary: Path) -> None:
    """Weights of the right shapes, all NaN."""
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


def checkpoint(change: Callable[[dict[str, bytes], Path], Any]) -> Spoil:
    """The newest one with other files, its manifest made to agree."""

    def spoil(folder: Path, canary: Path) -> None:
        newest = folder / "checkpoints" / NEWEST
        files = {path.name: path.read_bytes() for path in newest.iterdir() if path.name != MANIFEST}
        change(files, canary)
        CheckpointFolder(folder / "checkpoints").publish(128, files)

    return spoil


def in_checkpoint(name: str, content: Callable[[Path], bytes]) -> Spoil:
    return checkpoint(lambda files, canary: files.update({name: content(canary)}))


def state(change: Callable[[dict[str, Any]], Any]) -> Spoil:
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


def manifest_names(name: str) -> Spoil:
    """A manifest that has a file elsewhere checked, and with it read."""

    def spoil(folder: Path, canary: Path) -> None:
        path = folder / "checkpoints" / NEWEST / "manifest.json"
        content = json.loads(path.read_text())
        content["files"][name] = content["files"].pop("state.json")
        path.write_text(json.dumps(content, indent=1))

    return spoil


def linked(place: str) -> Spoil:
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


def evil_files() -> Iterator[Evil]:
    """All of them."""
    yield Evil("pickle bomb as policy_class of a model", "eval", pickled_key("policy_class"))
    yield Evil("pickle bombs as everything else that SB3 pickles", "eval", every_key, refused=False)
    for make in (_models, _weights, _statistics, _checkpoints):
        yield from make()


def _models() -> Iterator[Evil]:
    kwargs = {"features_extractor_class": "<class 'os.system'>"}
    members: dict[str, Spoil] = {
        "policy_class is the text os.system": fact("policy_class", "os.system"),
        "policy_class is of another package": fact("policy_class", {"__module__": "os"}),
        "policy_kwargs name a class": fact("policy_kwargs", kwargs),
        "policy_kwargs of another activation": fact("policy_kwargs", {"activation_fn": "torch.nn.ReLU"}),
        **{f"a member named {name}": named(name) for name in ("../CANARY", "CANARY", "C:\\evil")},
        "a member named __init__.py": named("__init__.py"),
        "a member that is a link": named("system_info.txt2", 0o777 | stat.S_IFLNK),
        "policy.pth twice": twice,
        "an encrypted member": patched(MODEL, "data", 8, b"\x01\x00"),
        "a member that says it has 4 GB": patched(MODEL, "data", 20, b"\xfe\xff\xff\xff\xfe\xff\xff\xff"),
        "a member that needs zip64 and lacks it": patched(MODEL, "data", 24, b"\xff\xff\xff\xff"),
        "members that overlap": overlapping,
        "a deflate bomb": member(MODEL, "data", lambda _: b'{"a": "' + b" " * BOMB_BYTES + b'"}', deflate=True),
        "JSON 100,000 deep": raw_data(b"[" * 100_000 + b"]" * 100_000),
        "JSON of 4 million lists": raw_data(b"[" + b"[]," * 4_000_000 + b"[]]"),
        "JSON with a number of a million digits": raw_data(b'{"a": ' + b"9" * 10**6 + b"}"),
        "data is no JSON": raw_data(b"\xff\xfe"),
        "a zip cut off in the middle": cut(MODEL, 0.5),
        "a pickle named model.zip": lambda folder, canary: (folder / MODEL).write_bytes(pickle.dumps(Bomb(canary))),
    }
    for name, spoil in members.items():
        yield Evil(name, "eval", spoil)
    yield Evil(
        "a network of a terabyte in policy_kwargs", "eval", fact("policy_kwargs", {"net_arch": [10**6] * 2}), False
    )
    yield Evil("a replay buffer of a terabyte", "eval", fact("n_steps", 10**12), False)
    yield Evil("NaN as num_timesteps", "play", fact("num_timesteps", float("nan")), False)
    yield Evil("a zip without its last bytes", "export", cut(MODEL, 0.99))


def calls_open(canary: Path) -> bytes:
    path = str(canary).encode()
    reduced = b"\x80\x02cbuiltins\nopen\n(X%bX\x01\x00\x00\x00wtR."
    return torch_file(reduced.replace(b"%b", struct.pack("<I", len(path)) + path))


def _weights() -> Iterator[Evil]:
    yield Evil("policy.pth is a plain pickle", "eval", weights(lambda canary: pickle.dumps(Bomb(canary))))
    yield Evil("a pickle in policy.pth that calls open", "export", weights(calls_open))
    yield Evil(
        "a pickle bomb as pytorch_variables.pth", "eval", member(MODEL, "pytorch_variables.pth", calls_open), False
    )
    yield Evil("a deflate bomb in policy.pth", "eval", weights(deflated_weights))
    yield Evil("weights that are NaN", "eval", poisoned)
    instructions = {
        "a bytearray of a terabyte, which weights_only allows":
            b"\x80\x02cbuiltins\nbytearray\n\x8a\x06\x00\x00\x00\x00\x00\x01\x85R.",
        "a memo place of 4 billion": b"\x80\x02}r\xff\xff\xff\xff.",
        "a tuple 300,000 deep as a key": b"\x80\x02}" + b")" + b"\x85" * 300_000 + b"Ns.",
        "INST, an old way to call": b"(S'true'\nios\nsystem\n.",
        "STACK_GLOBAL, a new way": b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
        "a tensor of 4 TB by strides of 0": tensor((10**12,), (0,)),
        "a storage that says it is longer": tensor((9999,), (1,), 9999),
    }  # fmt: skip
    for name, pickled in instructions.items():
        yield Evil(name, "eval", weights(lambda _, pickled=pickled: torch_file(pickled)))  # type: ignore[misc]


def _statistics() -> Iterator[Evil]:
    def only_pickled(folder: Path, canary: Path) -> None:
        (folder / STATISTICS).unlink()
        (folder / PICKLED).write_bytes(pickle.dumps(Bomb(canary)))

    for command in ("eval", "play", "export"):
        yield Evil(f"a pickle bomb as vecnormalize.pkl, for {command}", command, only_pickled)
    nan = npy("{'descr': '<f8', 'fortran_order': False, 'shape': (4,), }", struct.pack("<4d", *[float("nan")] * 4))
    contents: dict[str, Callable[[Path], bytes]] = {
        "objects in vecnormalize.npz": objects,
        "an array of 8 TB in vecnormalize.npz": lambda _: npy(HUGE),
        "statistics that are NaN": lambda _: nan,
    }
    for name, content in contents.items():
        yield Evil(name, "eval", member(STATISTICS, "observations.mean.npy", content))


def _checkpoints() -> Iterator[Evil]:
    older: dict[str, Spoil] = {  # one from before serves
        "objects in arrays.npz": checkpoint(arrays_with(objects)),
        "an array of 8 TB": checkpoint(arrays_with(lambda _: npy(HUGE))),
        "a type of 1 TB": checkpoint(arrays_with(lambda _: npy(WIDE))),
        "code as an array's shape": checkpoint(arrays_with(lambda at: npy(TRICK.replace("CANARY", str(at))))),
        "state.json 100,000 deep": in_checkpoint("state.json", lambda _: b"[" * 100_000),
        "state.json of 4 million lists": in_checkpoint("state.json", lambda _: b"[" + b"[]," * 4_000_000 + b"[]]"),
        "a pickle as state.json": in_checkpoint("state.json", lambda canary: pickle.dumps(Bomb(canary))),
        "NaN as env_steps": state(lambda content: content.update(env_steps=float("nan"))),
        "a pickle bomb in its model.zip": in_checkpoint(MODEL, lambda canary: pickle.dumps(Bomb(canary))),
        "a pickle bomb in its vecnormalize.pkl": in_checkpoint(PICKLED, lambda canary: pickle.dumps(Bomb(canary))),
        **{f"a manifest that names {name}": manifest_names(name) for name in ("../../plan.json", "/etc/passwd")},
    }
    links = (f"checkpoints/{NEWEST}", f"checkpoints/{NEWEST}/manifest.json", "checkpoints", "episodes.csv",
             "summary.json.tmp")  # fmt: skip
    refused: dict[str, Spoil] = {
        "a length of -5 of episodes.csv": state(lambda content: content["run"]["episodes_file"].update(bytes=-5)),
        "no lists of evaluations": state(lambda content: content["run"].update(evaluations=7)),
        "a counter that is a text": state(lambda content: content["model"]["counters"].update(num_timesteps="x")),
        **{f"{place} is a link to another place": linked(place) for place in links},
    }
    for name, spoil in {**older, **refused}.items():
        yield Evil(f"checkpoint: {name}", "resume", spoil, name in refused)
