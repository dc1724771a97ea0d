"""What a training must cost on this machine, what it costs, and where the difference goes.

Needed, in microseconds per env step:

- env: one env alone, unwrapped, with random legal actions, divided by the cores that step envs;
- policy, update: the arithmetic of each layer, divided by the speed of PyTorch's own layer of that shape, with one
  thread or all, whichever is faster; an update also reads and writes parameters and Adam's moments;
- storage: each transition is written once and read once per epoch (DQN: once per draw), at the speed of a copy.

Spent: the phases of [PERF], of a whole training on compiled kernels. Kernels skip zeros in observations, so that an
update can take less than this account says.
"""

from __future__ import annotations

import datetime
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import machine, report, trainings
from fasttrain.machine import usable_cores

CARTPOLE = ("+profile=speed", "env.id=CartPole-v1", "algo=ppo", "algo.n_epochs=4", "vec_env=dummy")
JOBS: dict[str, tuple[str, ...]] = {
    "skullking": ("+profile=speed", "total_timesteps=2000000"),
    "cartpole-8": (*CARTPOLE, "num_envs=8", "batch_size=256", "algo.rollout_size=1024", "total_timesteps=160000"),
    "cartpole-64": (*CARTPOLE, "num_envs=64", "batch_size=2048", "algo.rollout_size=8192", "total_timesteps=400000"),
    "python-100us": (
        "+profile=speed", "env.entry_point=benchmarks.envs:Working", "num_envs=64", "batch_size=256",
        "algo.n_epochs=4", "algo.rollout_size=2048", "total_timesteps=60000",
    ),
    "dqn-cartpole": (
        "+profile=speed", "env.id=CartPole-v1", "algo=dqn", "num_envs=8", "updates_per_step=8", "batch_size=256",
        "total_timesteps=40000",
    ),
    "pictures": (
        "+profile=speed", "env.entry_point=benchmarks.envs:Pictures", "algo=ppo", "num_envs=8", "batch_size=256",
        "algo.n_epochs=4", "algo.rollout_size=1024", "total_timesteps=6144",
    ),
}  # fmt: skip
PARTS = {
    "env": ("env_step",),
    "policy": ("action",),
    "update": ("train_fwd", "train_bwd", "train", "optim"),
    "storage": ("buffer", "replay_sample"),
    "rest": ("log", "checkpoint", "eval", "other"),
}
ADAM = 7  # arrays of the parameters' size: an update reads weights, gradients and two moments, and writes three of them
QUIET = ("checkup=off", "eval.episodes=1", "checkpoint_every=0", "deterministic=true", "live=off", "report=false")


class Layer(NamedTuple):
    """One layer of a network."""

    row_s: float  # seconds that it takes for one row, forward
    first: bool  # no gradient of its input is needed


def best_of(call: Callable[[], Any], seconds: float = 0.2) -> float:
    """The shortest time of a call in seconds, after a first one."""
    call()
    found, until = [], time.perf_counter() + seconds
    while time.perf_counter() < until or len(found) < 5:
        begun = time.perf_counter()
        call()
        found.append(time.perf_counter() - begun)
    return min(found)


def layers_of(module: Any, rows: Any) -> list[Layer]:
    """The linear and convolutional layers that `module(rows)` goes through, each timed alone at that number of rows."""
    import torch
    from torch import nn

    inputs: dict[Any, Any] = {}

    def note(child: Any, given: Any, _: Any) -> None:  # what a hook returns would replace the layer's output
        inputs.setdefault(child, given[0].detach())

    kinds = (nn.Linear, nn.Conv2d)
    hooks = [child.register_forward_hook(note) for child in module.modules() if isinstance(child, kinds)]
    with torch.no_grad():
        module(rows)
    for hook in hooks:
        hook.remove()
    found = []
    for child, given in inputs.items():
        spent = []
        with torch.no_grad():
            for threads in {1, torch.get_num_threads(), usable_cores()}:
                torch.set_num_threads(threads)
                spent.append(best_of(lambda child=child, given=given: child(given)))
        found.append(Layer(min(spent) / len(given), first=given.shape[1:] == rows.shape[1:]))
    return found


def training_passes(layers: Sequence[Layer]) -> float:
    """Seconds of forward and backward for one row: products of the same size, without the first layers' gradients."""
    return sum(layer.row_s * (2 if layer.first else 3) for layer in layers)


def copy_speed() -> float:
    """Bytes per second that a copy of 64 MB reads."""
    import numpy as np

    source = np.ones(8_000_000)
    target = np.empty_like(source)
    return source.nbytes / best_of(lambda: np.copyto(target, source))


def env_alone_s(config: Any, model: Any) -> float:
    """Seconds of a step of one env without wrappers; of a native game, of a step of its batch per env."""
    import numpy as np

    from fasttrain.envs.make import core_env
    from fasttrain.runs.envs import env_spec

    rng = np.random.default_rng(0)
    if config.vec_env == "native":
        source = model.collector.source_of(model.env)

        def step_batch() -> None:
            masks = source.read_masks()
            source.step_slots((rng.random(masks.shape, np.float32) * masks).argmax(1))

        draw = best_of(lambda: (rng.random(source.read_masks().shape, np.float32) * source.read_masks()).argmax(1))
        return (best_of(step_batch) - draw) / config.num_envs
    env = core_env(env_spec(config)).unwrapped
    spent, steps, read = 0.0, 0, getattr(env, "action_masks", None)
    env.reset(seed=0)
    while spent < 0.5:
        action = rng.integers(env.action_space.n)
        begun = time.perf_counter()
        mask = None if read is None else read()
        spent += time.perf_counter() - begun
        action = action if mask is None else int(rng.choice(np.flatnonzero(mask)))
        begun = time.perf_counter()
        if any(env.step(action)[2:4]):
            env.reset()
        spent += time.perf_counter() - begun
        steps += 1
    return spent / steps


def needed(plan: Any, model: Any) -> dict[str, float]:
    """Microseconds per env step of each part."""
    import torch

    config, policy = plan.config, model.policy
    policy.set_training_mode(False)
    off_policy = config.algo.name == "dqn"
    batch = config.batch_size or model.batch_size
    seen = policy.obs_to_tensor(model.env.reset())[0].float()
    rows = seen.repeat(-(-batch // len(seen)), *[1] * (seen.dim() - 1))[:batch]
    acting = layers_of(policy.q_net if off_policy else policy, seen)
    layers = layers_of(policy.q_net if off_policy else policy, rows)
    parameters = sum(part.numel() for part in policy.parameters()) / (2 if off_policy else 1)
    bandwidth, row_bytes = copy_speed(), seen[0].numel() * model.env.observation_space.dtype.itemsize + 16
    if off_policy:
        learned = config.updates_per_step * batch / config.num_envs
        updates, extra = config.updates_per_step / config.num_envs, sum(layer.row_s for layer in layers)
        reads = 2 * learned
    else:
        learned, extra = float(model.n_epochs), 0.0
        updates, reads = model.n_epochs / batch, float(model.n_epochs)
    workers = model.env.num_workers if hasattr(model.env, "num_workers") else 1
    update_s = learned * (training_passes(layers) + extra) + updates * ADAM * 4 * parameters / bandwidth
    torch.set_num_threads(config.torch_threads or 1)
    return {
        "env": env_alone_s(config, model) / min(workers, usable_cores()) * 1e6,
        "policy": sum(layer.row_s for layer in acting) * 1e6,
        "update": update_s * 1e6,
        "storage": (1 + reads) * row_bytes / bandwidth * 1e6,
        "rest": 0.0,
    }


def spent(arguments: Sequence[str]) -> dict[str, float]:
    """Microseconds per env step of each part, in a training."""
    from fasttrain.cli import main

    with tempfile.TemporaryDirectory() as name:
        if main([*arguments, *QUIET, f"hydra.run.dir={name}/run"]):
            raise SystemExit(1)
        lines = json.loads((Path(name) / "run" / "perf.json").read_text(encoding="utf-8"))
    return parts_of(lines["total"])


def parts_of(figures: Mapping[str, Any]) -> dict[str, float]:
    """[PERF]'s phases (milliseconds per 1,000 env steps), as microseconds per env step of each part."""
    return {part: sum(figures.get(f"{phase}_ms", 0.0) for phase in phases) for part, phases in PARTS.items()}


def section(name: str, arguments: Sequence[str], need: Mapping[str, float], took: Mapping[str, float]) -> list[str]:
    """One job as Markdown."""
    total = sum(took.values())
    lines = [f"## {name}", "", f"`fasttrain {' '.join(arguments)}`", ""]
    lines += ["| part | needed, µs per env step | spent | difference | of the time |", "|---|---|---|---|---|"]
    for part in PARTS:
        gap = took[part] - need[part]
        lines.append(f"| {part} | {need[part]:.2f} | {took[part]:.2f} | {gap:+.2f} | {gap / total:+.0%} |")
    share = sum(need.values()) / total
    lines += [f"| all | {sum(need.values()):.2f} | {total:.2f} | {total - sum(need.values()):+.2f} | |", ""]
    return [*lines, f"{1e6 / total:,.0f} steps/s, needed ÷ spent {share:.0%}.", ""]


def write(names: Sequence[str], say: Callable[[str], None]) -> Path:
    """Measure the jobs and write `benchmarks/reports/DATE-account.md`.

    Raises SystemExit: there is such a page, which is a record.
    """
    place = report.REPORTS / f"{datetime.date.today()}-account.md"
    if place.exists():
        raise SystemExit(f"{place.name} is there already; move it away first")
    about = machine.about(["account", *names])
    text = (__doc__ or "").strip().split("\n\n", 1)[1]
    lines = [f"# Needed and spent, measured on {about['date']}", ""]
    lines += [f"{about['machine']}; commit {about['commit']}.", "", text, ""]
    for name in names or JOBS:
        say(f"{name}: a training")
        took = spent(JOBS[name])
        say(f"{name}: its parts alone")
        lines += section(name, JOBS[name], needed(*trainings.built(JOBS[name])), took)
    place.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
    return place
