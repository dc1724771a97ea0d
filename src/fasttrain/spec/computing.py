"""Resolvers of the plan for computing: mixed precision, torch.compile, kernels, transfers and replay batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fasttrain.errors import ConfigError
from fasttrain.machine import auto_device
from fasttrain.spec.checks import Context, Resolved, train_frequency
from fasttrain.spec.config import AlgoConfig, Config
from fasttrain.terminal import value_text

# Limits for runs that runs/calibration.py does not measure: from trainings of two layers on two cores with AVX512-BF16.
# Other machines differ by a factor of 1.5. AMP: from this many units in the widest layer on (the second number: with
# minibatches of ≤ FEW_ROWS), bfloat16 is faster on CPUs with bf16 units. FUSED: up to this many, kernels beat torch.
AMP_PAYS_FROM_WIDTH, AMP_PAYS_FOR_FEW_ROWS_FROM, FEW_ROWS = 512, 1024, 256
FUSED_PAYS_UP_TO_WIDTH = 1024
MEASURED = "measured here"  # beginning of a reason that comes from runs/calibration.py
GRAPH_MODES = ("reduce-overhead", "max-autotune")  # modes of torch.compile with CUDA graphs
MEANT_BY_ON = {"use_amp": "bfloat16", "use_compile": "default"}


def mode_of(switch: str, value: str) -> str:
    """The dtype of `use_amp` or the mode of `use_compile` that a value means."""
    return MEANT_BY_ON[switch] if value == "on" else value


def device_of(context: Context) -> str:
    """The device of the run: `cpu`, `cuda` or `mps`. `runs.engine.pick_device` refuses a device that does not exist."""
    requested = context.config.device.split(":")[0]
    return auto_device(context.env.images, context.machine.cuda) if requested == "auto" else requested


def widest_layer(config: Config) -> int:
    """Width of the widest hidden layer of the policy's own MLP."""
    arch = config.algo.net_arch
    parts = arch.values() if isinstance(arch, dict) else [arch if arch is not None else (config.algo.spec.hidden,)]
    return max((width for part in parts for width in part), default=0)


def resolve_use_amp(requested: str, context: Context) -> Resolved:
    """A dtype, or off. `auto` uses bfloat16 on CUDA, and on a CPU with bf16 units if the network is wide enough."""
    device, dtype = device_of(context), mode_of("use_amp", requested)
    if device == "mps" and requested != "auto":
        raise ConfigError(f"use_amp={requested} with device=mps: it needs cpu or cuda; use use_amp=off")
    if device == "mps":
        return "off", "device=mps"
    if dtype == "float16" and device == "cpu":
        ways = "use use_amp=bfloat16, or device=cuda"
        error = f"use_amp=float16 on the CPU: only CUDA has float16 with gradient scaling; {ways}"
        return context.instead("use_amp", "off", "float16 needs CUDA", error)
    if context.config.fused_update == "on":  # the user typed it: profiles have only off and auto
        if requested != "auto":
            raise ConfigError(
                f"use_amp={requested} contradicts fused_update=on: the compiled kernels compute in float32; use "
                "fused_update=auto, or use_amp=off"
            )
        return "off", "fused_update=on computes in float32"
    if requested == "auto":
        return _amp_by_hardware(device, context)
    return dtype, "with gradient scaling" if dtype == "float16" else _why_slower(context) if device == "cpu" else ""


def _why_slower(context: Context) -> str:
    """Why mixed precision is slower on this CPU (by the measured limits); empty if it is faster."""
    width = widest_layer(context.config)
    causes = [] if context.machine.bf16_units else ["this CPU has no bf16 units"]
    causes += [f"layers of {width} units"] if width < AMP_PAYS_FROM_WIDTH else []
    return f"{', and '.join(causes)}: expect it to be slower" if causes else ""


def _amp_by_hardware(device: str, context: Context) -> Resolved:
    if device == "cuda":
        return "bfloat16", "CUDA has units for it"
    units, width = context.machine.bf16_units, widest_layer(context.config)
    if not units:
        return "off", "this CPU has no bf16 units"
    if context.env.images:  # NatureCNN on two cores: PPO 2.1 times as fast, DQN 1.2
        return "bfloat16", f"{units}, and convolutions"
    few = context.effective["batch_size"] <= FEW_ROWS and context.config.fused_update != "off"
    pays_from = AMP_PAYS_FOR_FEW_ROWS_FROM if few else AMP_PAYS_FROM_WIDTH
    if width < pays_from:
        return "off", f"the widest layer has {width} units; on a CPU bfloat16 is faster from {pays_from:,} units on"
    return "bfloat16", f"{units}, and layers of {width} units"


def resolve_use_compile(requested: str, context: Context) -> Resolved:
    """A mode of torch.compile, or off. `auto` uses CUDA graphs (`reduce-overhead`) on CUDA.

    On a CPU torch.compile makes a [64, 64] update of 256 rows 1.3 times as fast, and the compiled kernels 3 times.
    """
    if context.config.policies:
        why = "the number of rows for which a policy acts changes with every step"
        return context.instead("use_compile", "off", why, f"use_compile={requested} with policies: {why}; remove it")
    if context.config.fused_update == "on":
        if requested != "auto":
            raise ConfigError(
                f"use_compile={requested} contradicts fused_update=on: both compile the update; use fused_update=off, "
                "or use_compile=off"
            )
        return "off", "fused_update=on: the update is compiled already"
    cuda, graphs = device_of(context) == "cuda", "CUDA graphs of acting and of the loss"
    if cuda and context.config.gradient_accumulation > 1 and requested in ("auto", "reduce-overhead"):
        return "default", "no CUDA graphs: the gradients of a minibatch's parts are added up"
    if requested == "auto" and cuda:
        return "reduce-overhead", f"launching kernels is the bottleneck: {graphs}"
    if requested == "auto":
        return "off", "on a CPU compiling takes longer than it saves"
    if requested == "reduce-overhead" and not cuda:
        what = f"use_compile=reduce-overhead with device={context.config.device}"
        error = f"{what}: this mode uses CUDA graphs, which need CUDA; use use_compile=default"
        return context.instead("use_compile", "default", "CUDA graphs need CUDA", error)
    mode = mode_of("use_compile", requested)
    return mode, graphs if cuda and mode in GRAPH_MODES else ""


def resolve_pin_memory(requested: str, context: Context) -> Resolved:
    """`auto` is on if the networks are on a CUDA device."""
    if device_of(context) == "cuda":
        return "on", "observations, masks and actions are copied without waiting"
    return "off", "no CUDA device in use"


def resolve_gradient_accumulation(requested: int, context: Context) -> Resolved:
    if requested > context.effective["batch_size"]:
        raise ConfigError(
            f"gradient_accumulation={requested} is more than batch_size={context.effective['batch_size']}: a "
            "micro-batch has at least one row; use a smaller gradient_accumulation"
        )
    if context.effective["fused_update"] == "on":
        why, ways = "the compiled kernels work in blocks and do not need it", "remove it, or use fused_update=off"
        error = f"gradient_accumulation={requested} with fused_update=on: {why}; {ways}"
        return context.instead("gradient_accumulation", 1, "compiled kernels work in blocks and do not need it", error)
    return requested, f"each minibatch is computed in {requested} parts, with one optimizer step"


def why_no_fused_kernels(context: Context) -> str:
    """Which setting the compiled CPU kernels do not support; empty if there is none."""
    effective = context.effective
    if effective["use_amp"] != "off":
        return f"use_amp is {effective['use_amp']}: the compiled kernels compute in float32"
    if effective["use_compile"] != "off":
        return "use_compile is on"
    if (width := widest_layer(context.config)) > FUSED_PAYS_UP_TO_WIDTH:
        return f"layers of {width:,} units: torch is faster above {FUSED_PAYS_UP_TO_WIDTH:,}"
    if context.config.gradient_accumulation > 1:
        return f"gradient_accumulation={context.config.gradient_accumulation} needs PyTorch"
    return ""


def steps_back(algo: AlgoConfig, effective: Mapping[str, Any], exact: bool) -> Resolved:
    """How many steps back in time gradients of a recurrent policy go. The reason names the sequences per minibatch.

    Raises ConfigError if the last minibatch of an epoch would be one row, whose normalized advantage is NaN.
    """
    num_envs, size = effective["num_envs"], effective["batch_size"]
    num_steps = algo.num_steps(num_envs)
    total = num_steps * num_envs
    if algo.normalize_advantage:
        check_last_minibatch(size, num_envs, num_steps, "algo.")
    padding = (
        "padded to the longest, as in stock" if exact else "without padding in kernels, else in groups of equal length"
    )
    least = -(-min(size or total, total) // num_steps)
    return num_steps, f"steps at most; {least} sequences per minibatch and one more for each episode's end, {padding}"


def check_last_minibatch(batch_size: int | None, num_envs: int, num_steps: int, prefix: str = "") -> None:
    """Raises ConfigError if a minibatch would have one row. Its normalized advantage and all weights would be NaN."""
    if batch_size and (batch_size == 1 or num_envs * num_steps % batch_size == 1):
        raise ConfigError(
            f"batch_size={batch_size} with a rollout of {num_envs} × {num_steps} steps: the last minibatch has one "
            f"row, whose advantage cannot be normalized; use another batch_size, or {prefix}normalize_advantage=false"
        )


def memory_rows(algo: AlgoConfig, engine: str, sources: Mapping[str, str]) -> Iterator[tuple[Any, ...]]:
    """Rows of the plan about `algo.cell` and `algo.memory_inputs`, if they differ from stock.

    Raises ConfigError if the cell does not exist in stock, but the stock class or stock's numbers are requested; and if
    there are arguments of an LSTM for another cell.
    """
    if algo.cell != "lstm":
        exact = "profile exact" in sources.values()  # this profile promises stock's numbers
        if engine == "stock" or exact:
            raise ConfigError(
                f"algo.cell={algo.cell} with {'profile=exact' if exact else 'engine=stock'}: stock has the LSTM alone; "
                f"use {'+profile=balance' if exact else 'engine=fast'}, or algo.cell=lstm"
            )
        if lstm := algo.policy_kwargs.get("lstm_kwargs"):
            key = f"algo.policy_kwargs.lstm_kwargs={value_text(lstm)}"
            raise ConfigError(f"{key} has no effect with algo.cell={algo.cell}, which is no LSTM: remove one of them")
        source = sources.get("algo.cell", "default")
        yield "algo.cell", algo.cell, algo.cell, source, "trade-off", "another network than stock's"
    if algo.memory_inputs:
        inputs, source = list(algo.memory_inputs), sources.get("algo.memory_inputs", "default")
        yield "algo.memory_inputs", inputs, inputs, source, "trade-off", "observations have these inputs too"


PROFILE_ENVS = {"profile balance": 8, "profile speed": 12}  # num_envs of profiles that set updates_per_step
BASELINE_RATIO = 1 / 8  # updates per transition in the baseline: one update per vector step of 8 envs


def resolve_prefetch(requested: str, context: Context) -> Resolved:
    """`auto` is on for images if a core is free, and on CUDA.

    Drawing 8 batches of vectors takes 0.04 to 0.3 ms of an update of 0.4 to 5 ms. With prefetching, updates were 0.91
    to 1.08 times as fast on 2 cores. Drawing 8 batches of 64 stacked images takes 42 ms.
    """
    config = context.config
    if config.env.normalize or config.algo.her != "off":
        why = "env.normalize: batches are normalized with the statistics of the moment when they are used"
        if not config.env.normalize:
            why = "algo.her: the env computes the rewards of each batch when it is used"
        if requested == "on":
            raise ConfigError(f"prefetch=on: {why}; use prefetch=off")
        return "off", why
    if requested == "on":
        return "on", "deterministic=true: batches are drawn only when they are needed" if config.deterministic else ""
    if config.deterministic:
        return "off", "with deterministic=true no batch can be drawn ahead"
    if device_of(context) == "cuda":
        return "on", "batches are drawn and copied to CUDA in the background"
    if context.env.images and context.machine.cores > 2:
        return "on", "drawing images takes long, and a core is free"
    return "off", "drawing batches takes almost no time"


def resolve_updates_per_step(requested: int, context: Context) -> Resolved:
    """-1 becomes one update per new transition, if `train_freq` counts steps. A profile's value grows with num_envs."""
    (count, unit), num_envs = train_frequency(context.config.algo.train_freq), context.effective["num_envs"]
    usual = PROFILE_ENVS.get(context.sources.get("updates_per_step", ""))
    if requested > 1 and unit == "step" and usual:
        scaled = max(1, round(requested * num_envs / usual))
        why = f"the profile's {requested} are for {usual} envs; scaled to {num_envs} envs"
        return scaled, why if scaled != requested else ""
    if requested >= 0 or unit == "episode":
        return requested, ""
    return count * num_envs, "one update per transition"


def replay_ratio(config: Config, effective: Mapping[str, Any]) -> Resolved:
    """Gradient updates per transition, with a warning if they are fewer than in the baseline."""
    updates, num_envs = effective["updates_per_step"], effective["num_envs"]
    count, unit = train_frequency(config.algo.train_freq)
    if unit == "episode":
        after = f"after every {count} episodes" if count > 1 else "after every episode"
        return (1.0, f"{after}, one update per transition") if updates < 0 else (None, f"{updates} updates {after}")
    ratio = round(updates / (count * num_envs), 4)
    reason = f"{updates} updates per {'vector step' if count == 1 else f'{count} vector steps'} of {num_envs} envs"
    if ratio < BASELINE_RATIO:
        reason += (
            f": FEWER than the baseline's {BASELINE_RATIO:g}, so it learns less per env step; "
            f"use updates_per_step={-(-count * num_envs // 8)} or more"
        )
    return ratio, reason
