"""`fasttrain export run=FOLDER format=onnx|torchscript`: a policy as one file that needs neither SB3 nor fasttrain.
`acting.py` describes its inputs and outputs. The file is compared with the policy on random inputs, and deleted
if it disagrees.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from gymnasium import spaces
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.preprocessing import is_image_space
from stable_baselines3.common.vec_env import VecNormalize

from fasttrain.errors import ConfigError, FastTrainError
from fasttrain.runs.evaluate import Finished, load_run, named_run
from fasttrain.runs.models import one_env
from fasttrain.runs.view import activity, make_console, say
from fasttrain.saving.files import write_json
from fasttrain.spec.policies import member_file
from fasttrain.spec.reading import uses_masks
from fasttrain_deploy.acting import ActingPath, Arrays, RecurrentPath, largest_difference, random_inputs
from fasttrain_deploy.settings import Config

STEMS = {"final": "model", "best": "best_model"}
SUFFIXES = {"onnx": ".onnx", "torchscript": ".torchscript.pt"}
ONNX_PACKAGES = ("onnx", "onnxscript")
BATCH_SIZES = (1, 2, 33)
TOLERANCE = 1e-5  # allowed difference: a few roundings of float32


def main(config: Config, sources: Mapping[str, str], folder: Path, overrides: Sequence[str]) -> int:
    """Export the model of a finished run and print the largest difference from the policy."""
    where = named_run("export", config, sources, "format", "model", "output")
    path, stem = _target(config, where), STEMS[config.model]
    console = make_console()
    with activity(console, f"exporting to {path.name}") as doing:
        doing.now("loading the model")
        trained = load_run(where, f"{stem}.zip", config.trust)
        spec = trained.config.algo.spec
        if trained.config.policies:
            files = " and ".join(member_file(stem, name) for name in trained.config.policies)
            raise ConfigError(f"a model of several policies cannot be exported as one; SB3 loads {files} of this run")
        if spec.exports == "no":
            way_out = f"load model.zip by {spec.stock.replace(':', '.')}"
            raise ConfigError(f"{spec.name} cannot be exported: this kind of network is not supported; {way_out}")
        shown, statistics, masked = _shown(trained, where)
        doing.now("writing the file, and comparing it with the policy")
        kind = RecurrentPath if spec.recurrent else ActingPath
        acting = kind(trained.model, shown, statistics).eval()
        acting.masked |= masked
        report = export(acting, trained.model, statistics, str(config.format), path)
    write_json(folder / "export.json", {"run": config.run, **report})
    for what in ("inputs", "outputs"):
        text = ", ".join(f"{name} {kind}" for name, kind in report[what].items())
        say(console, f"{what:<8} {text}")
    difference = f"{report['max_difference']:.1e} ({report['checked_with']})"
    say(console, f"{config.output or Path(str(config.run), path.name)}: max difference from the policy {difference}")
    return 0


def export(
    acting: ActingPath, model: BaseAlgorithm, statistics: VecNormalize | None, kind: str, path: Path
) -> dict[str, Any]:
    """Write and check `path`; returns its entries for export.json. FastTrainError: the file differs from the policy."""
    write, load = (_write_onnx, _load_onnx) if kind == "onnx" else (_write_torchscript, _load_torchscript)
    draft, other = _draft(path), "torchscript" if kind == "onnx" else "onnx"
    draft.unlink(missing_ok=True)  # the draft may be a link to another file
    difference, outputs = 0.0, {}
    try:
        try:
            write(acting, draft)
        except RuntimeError as error:  # torch.onnx's errors are RuntimeErrors too
            reason = str(error).strip().split("\n")[0]
            raise FastTrainError(f"cannot write {path.name}: {reason}; use format={other}") from error
        run, checked_with = load(draft, acting)
        for size in BATCH_SIZES:
            inputs = random_inputs(acting, size, seed=size)
            outputs = run(inputs)
            difference = max(difference, largest_difference(acting, model, statistics, inputs, outputs))
        if not difference <= TOLERANCE:
            raise FastTrainError(
                f"{path.name} disagrees with the policy by {difference:.1e} ({TOLERANCE:g} allowed) and was deleted: "
                f"the policy does something that this format cannot store; use format={other}"
            )
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    return {
        "file": str(path),
        "format": kind,
        "inputs": _kinds(inputs),
        "outputs": _kinds(outputs),
        "max_difference": difference,
        "checked_with": f"{checked_with}, batches of {', '.join(map(str, BATCH_SIZES))}",
    }


def _kinds(arrays: Arrays) -> dict[str, str]:
    """Types and shapes as texts: `{"actions": "int64 (batch, 2)"}`."""
    return {name: f"{one.dtype} ({', '.join(['batch', *map(str, one.shape[1:])])})" for name, one in arrays.items()}


def _target(config: Config, where: Path) -> Path:
    """The file to write. Raises ConfigError if it cannot be written, or the format is missing or not available."""
    if config.format is None:
        raise ConfigError("export needs format=onnx or format=torchscript")
    missing = [name for name in ONNX_PACKAGES if find_spec(name) is None] if config.format == "onnx" else []
    if missing:
        way_out = "pip install 'fasttrain[onnx]'; format=torchscript needs nothing"
        raise ConfigError(f"format=onnx needs {' and '.join(missing)}: {way_out}")
    if config.output is None:
        return where / (STEMS[config.model] + SUFFIXES[config.format])
    path = Path(config.output)
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError(f"output={path}: name a file in a folder that exists")
    draft = _draft(path)
    try:
        draft.unlink(missing_ok=True)
        draft.touch(exist_ok=False)
        draft.unlink()
    except OSError as error:
        raise ConfigError(f"output={path}: {error.strerror}; name a file in a folder that can be written") from error
    return path.absolute()  # an env may change the working directory


def _draft(path: Path) -> Path:
    return path.with_name(path.name + ".unchecked")


def _shown(trained: Finished, where: Path) -> tuple[spaces.Space[Any], VecNormalize | None, bool]:
    """The env's observation space (SB3 may transpose images), statistics, and whether a DQN was trained with masks."""
    config, space = trained.config, trained.model.observation_space
    normalized, may_mask = "obs" in config.env.normalize, config.algo.spec.masks == "may" and uses_masks(config)
    is_image = any(is_image_space(part) for part in (space.values() if isinstance(space, spaces.Dict) else [space]))
    if not (normalized or may_mask or is_image):
        return space, None, False
    env = one_env(config, trained.statistics)
    env.close()
    if normalized and not isinstance(env, VecNormalize):
        raise ConfigError(f"run={where}: the run was self-play, in which observations cannot be normalised")
    statistics = env if normalized and isinstance(env, VecNormalize) else None
    return env.observation_space if is_image else space, statistics, may_mask and env.has_attr("action_masks")


Run = Callable[[Arrays], Arrays]


def _example(acting: ActingPath) -> tuple[torch.Tensor, ...]:
    """Inputs for tracing: three rows, because torch may take a batch size of one or two for a constant."""
    return tuple(torch.from_numpy(array) for array in random_inputs(acting, 3, seed=3).values())


def _write_torchscript(acting: ActingPath, path: Path) -> None:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # `export` checks what tracing warns about
        torch.jit.save(torch.jit.trace(acting, _example(acting), check_trace=False), str(path))  # type: ignore[no-untyped-call]


def _load_torchscript(path: Path, acting: ActingPath) -> tuple[Run, str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        module: torch.jit.ScriptModule = torch.jit.load(str(path))  # type: ignore[no-untyped-call]

    def run(inputs: Arrays) -> Arrays:
        with torch.no_grad():
            outputs = module(*(torch.from_numpy(array) for array in inputs.values()))
        return {name: output.numpy() for name, output in zip(acting.output_names, outputs, strict=True)}

    return run, "torch.jit"


def _write_onnx(acting: ActingPath, path: Path) -> None:
    example = _example(acting)
    logger = logging.getLogger("torch.onnx._internal.exporter._registration")  # this logger warns about torchvision
    level = logger.level
    logger.setLevel(logging.ERROR)
    batch = torch.export.Dim("batch")
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # deprecations inside the exporter
            torch.onnx.export(
                acting,
                example,
                str(path),
                input_names=acting.input_names,
                output_names=acting.output_names,
                dynamic_shapes=(tuple({0: batch} for _ in example),),
                external_data=False,  # write a single file
                dynamo=True,
                verbose=False,
            )
    finally:
        logger.setLevel(level)


def _load_onnx(path: Path, acting: ActingPath) -> tuple[Run, str]:
    """A function that runs the file in onnxruntime if it is installed, else in onnx's reference evaluator."""
    session: Any
    if find_spec("onnxruntime") is not None:
        import onnxruntime

        session, checked_with = onnxruntime.InferenceSession(str(path)), f"onnxruntime {onnxruntime.__version__}"
    else:
        import onnx
        from onnx.reference import ReferenceEvaluator

        session, checked_with = ReferenceEvaluator(str(path)), f"reference evaluator of onnx {onnx.__version__}"

    def run(inputs: Arrays) -> Arrays:
        return dict(zip(acting.output_names, session.run(None, dict(inputs)), strict=True))

    return run, checked_with
