"""When precision, compilation, pinned memory and micro-batches are chosen, refused or left out, and what is said."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from conftest import configured
from fasttrain.cli.compose import conf_dir
from fasttrain.errors import ConfigError
from fasttrain.spec.checks import EnvFacts, Machine
from fasttrain.spec.computing import AMP_PAYS_FROM_WIDTH, PROFILE_ENVS
from fasttrain.spec.plan import Row, RunSpec, resolve

CARTPOLE = ("env.id=CartPole-v1", "algo=ppo")
OLD = Machine(2, False, False)
BF16 = Machine(2, False, False, "AVX512-BF16")
CUDA = Machine(16, False, True)
TYPED = "command line"


def plan_of(*arguments: str, machine: Machine = OLD, images: bool = False, **sources: str) -> RunSpec:
    facts = EnvFacts(native=False, step_s=20e-6, images=images)
    return resolve(configured(*CARTPOLE, *arguments), sources, facts, machine)


def row_of(plan: RunSpec, flag: str) -> Row:
    return plan.row(flag)


def outcome(plan: RunSpec, flag: str) -> tuple[object, str]:
    row = row_of(plan, flag)
    return row.effective, row.reason


@pytest.mark.parametrize(
    ("machine", "arguments", "expected"),
    [
        (OLD, ("algo.net_arch=[512]",), ("off", "this CPU has no bf16 units")),
        (BF16, (), ("off", f"the widest layer has 64 units; on a CPU it pays from {AMP_PAYS_FROM_WIDTH}")),
        (BF16, ("algo.net_arch={pi: [64], vf: [512, 32]}",), ("bfloat16", "AVX512-BF16, and layers of 512 units")),
        (CUDA, ("device=cuda",), ("bfloat16", "CUDA has units for it")),
        (CUDA, (), ("off", "this CPU has no bf16 units")),
    ],
)
def test_auto_precision_is_by_hardware_and_width(machine: Machine, arguments: tuple[str, ...], expected: object):
    plan = plan_of("engine=fast", "use_amp=auto", *arguments, machine=machine)
    assert outcome(plan, "use_amp") == expected


def test_convolutions_take_bfloat16_where_the_cpu_has_units():
    assert outcome(plan_of("+profile=speed", machine=BF16, images=True), "use_amp")[0] == "bfloat16"
    assert outcome(plan_of("+profile=speed", machine=OLD, images=True), "use_amp")[0] == "off"


@pytest.mark.parametrize(
    ("width", "rows", "fused", "expected"),
    [
        (512, 256, "auto", ("off", "on")),  # few rows: the compiled kernels are faster
        (1024, 256, "auto", ("bfloat16", "off")),
        (512, 2048, "auto", ("bfloat16", "off")),
        (256, 2048, "auto", ("off", "on")),
        (512, 256, "off", ("bfloat16", "off")),
        (256, 256, "off", ("off", "off")),
    ],
)
def test_precision_and_kernels_by_width_and_rows(width: int, rows: int, fused: str, expected: tuple[str, str]):
    arguments = ("+profile=speed", f"algo.net_arch=[{width}]", f"batch_size={rows}", f"fused_update={fused}")
    plan = plan_of(*arguments, machine=BF16)
    assert tuple(row_of(plan, flag).effective for flag in ("use_amp", "fused_update")) == expected


def test_images_go_to_cuda_by_themselves():
    plan = plan_of("+profile=speed", machine=CUDA, images=True)
    found = [row_of(plan, flag).effective for flag in ("use_amp", "use_compile", "pin_memory")]
    assert found == ["bfloat16", "reduce-overhead", "on"]
    assert row_of(plan, "fused_update").effective == "off"
    assert plan_of("+profile=speed", machine=CUDA).config.use_compile == "off", "a small MLP stays on the CPU"


@pytest.mark.parametrize("flag", ["use_amp", "use_compile", "pin_memory"])
@pytest.mark.parametrize("algo", ["dqn", "ppo"])
def test_only_our_algorithms_can(flag: str, algo: str):
    stock = (f"algo={algo}", "engine=stock", "device=cuda")
    assert outcome(plan_of(*stock, f"{flag}=auto", machine=CUDA), flag) == ("off", "the stock classes cannot do that")
    with pytest.raises(ConfigError, match=f"{flag}=on with engine=stock: "):
        plan_of(*stock, f"{flag}=on", machine=CUDA)
    ours = plan_of(f"algo={algo}", "engine=fast", "device=cuda", f"{flag}=auto", machine=CUDA)
    assert outcome(ours, flag)[0] == {"use_amp": "bfloat16", "use_compile": "reduce-overhead"}.get(flag, "on")


def test_numbers_need_our_engine_too():
    with pytest.raises(ConfigError, match="gradient_accumulation=2 with engine=stock: .*take engine=fast"):
        plan_of("engine=stock", "gradient_accumulation=2")


def test_float16_needs_cuda():
    with pytest.raises(ConfigError, match="use_amp=float16 on the CPU: .*take use_amp=bfloat16, or device=cuda"):
        plan_of("engine=fast", "use_amp=float16", use_amp=TYPED)
    of_profile = plan_of("engine=fast", "use_amp=float16", use_amp="profile mine")
    assert outcome(of_profile, "use_amp") == ("off", "float16 needs CUDA")
    plan = plan_of("engine=fast", "use_amp=float16", "device=cuda", machine=CUDA)
    assert outcome(plan, "use_amp") == ("float16", "with gradient scaling")


@pytest.mark.parametrize(
    ("machine", "width", "reason"),
    [
        (OLD, 512, "this CPU has no bf16 units: expect it to be slower"),
        (OLD, 64, "this CPU has no bf16 units, and layers of 64 units: expect it to be slower"),
        (BF16, 64, "layers of 64 units: expect it to be slower"),
        (BF16, AMP_PAYS_FROM_WIDTH, ""),
    ],
)
def test_precision_where_it_does_not_pay_is_done_with_a_warning(machine: Machine, width: int, reason: str):
    plan = plan_of("engine=fast", "use_amp=on", f"algo.net_arch=[{width}]", machine=machine)
    assert outcome(plan, "use_amp") == ("bfloat16", reason)


def test_auto_compiles_on_cuda_with_graphs():
    graphs = "CUDA graphs of acting and of the loss"
    plan = plan_of("engine=fast", "use_compile=auto", "device=cuda", machine=CUDA)
    assert outcome(plan, "use_compile") == ("reduce-overhead", f"launching kernels is the wall: {graphs}")
    assert plan.config.use_compile == "reduce-overhead"
    chosen = [plan_of("engine=fast", f"use_compile={mode}", "device=cuda", machine=CUDA) for mode in ("on", "default")]
    assert [outcome(plan, "use_compile") for plan in chosen] == [("default", "")] * 2
    most = plan_of("engine=fast", "use_compile=max-autotune", "device=cuda", machine=CUDA)
    assert outcome(most, "use_compile") == ("max-autotune", graphs)
    parts = plan_of("engine=fast", "use_compile=auto", "device=cuda", "gradient_accumulation=2", machine=CUDA)
    added_up = "no CUDA graphs: the gradients of a minibatch's parts are added up"
    assert outcome(parts, "use_compile") == ("default", added_up)
    on_cpu = plan_of("engine=fast", "use_compile=auto")
    assert outcome(on_cpu, "use_compile") == ("off", "on a CPU it takes longer to compile than it brings")


def test_graphs_need_cuda():
    arguments = ("engine=fast", "use_compile=reduce-overhead")
    assert outcome(plan_of(*arguments), "use_compile") == ("default", "CUDA graphs need CUDA")
    with pytest.raises(ConfigError, match="use_compile=reduce-overhead with device=auto: .*take use_compile=default"):
        plan_of(*arguments, use_compile=TYPED)


@pytest.mark.parametrize("argument", ["use_amp=on", "use_compile=on", "gradient_accumulation=2"])
def test_what_the_kernels_lack_is_done_eagerly_unless_they_were_asked_for(argument: str):
    flag = argument.split("=")[0]
    plan = plan_of("engine=fast", "fused_update=auto", argument)
    assert row_of(plan, "fused_update").effective == "off"
    assert flag in row_of(plan, "fused_update").reason
    meant = {"use_amp": "bfloat16", "use_compile": "default"}.get(flag, "2")
    assert str(row_of(plan, flag).effective) == meant
    with pytest.raises(ConfigError, match=f"{argument} .*fused_update=on"):
        plan_of("engine=fast", "fused_update=on", argument, **{flag: TYPED})


def test_kernels_asked_for_win_over_auto_and_over_a_profile():
    plan = plan_of(
        "engine=fast", "fused_update=on", "use_amp=auto", "use_compile=auto", "gradient_accumulation=4",
        "algo.net_arch=[512]", machine=BF16,
    )  # fmt: skip
    assert outcome(plan, "use_amp") == ("off", "fused_update=on computes in float32")
    assert outcome(plan, "use_compile") == ("off", "fused_update=on is compiled already")
    assert outcome(plan, "gradient_accumulation") == (1, "not needed: compiled kernels work in blocks")
    assert plan.config.gradient_accumulation == 1


def test_wide_nets_leave_the_kernels_for_bfloat16():
    plan = plan_of("+profile=speed", "algo.net_arch=[1024, 512]", machine=BF16)
    assert outcome(plan, "use_amp")[0] == "bfloat16"
    assert outcome(plan, "fused_update") == ("off", "use_amp is bfloat16: the compiled kernels compute in float32")


def test_a_micro_batch_has_a_row():
    with pytest.raises(ConfigError, match="gradient_accumulation=65 is more than batch_size=64"):
        plan_of("engine=fast", "gradient_accumulation=65")


def test_pinned_memory_is_for_cuda():
    assert outcome(plan_of("engine=fast", "pin_memory=auto"), "pin_memory") == ("off", "no CUDA device in use")
    plan = plan_of("engine=fast", "pin_memory=on", "device=cpu", machine=CUDA)
    assert outcome(plan, "pin_memory") == ("off", "no CUDA device in use")
    plan = plan_of("engine=fast", "pin_memory=on", "device=cuda", machine=OLD)  # building the model refuses the device
    assert row_of(plan, "pin_memory").effective == "on"
    plan = plan_of("engine=fast", "pin_memory=on", "device=cuda", machine=CUDA)
    assert row_of(plan, "pin_memory").effective == "on"


def test_profiles_keep_the_ratio_of_their_own_number_of_envs():
    profiles = {f"profile {file.stem}": OmegaConf.load(file) for file in (conf_dir() / "profile").glob("*.yaml")}
    ratios = {name: profile.num_envs for name, profile in profiles.items() if profile.updates_per_step > 1}
    assert ratios == PROFILE_ENVS


def test_other_devices():
    assert outcome(plan_of("engine=fast", "use_amp=auto", "device=mps"), "use_amp") == ("off", "device=mps")
    with pytest.raises(ConfigError, match="use_amp=on with device=mps"):
        plan_of("engine=fast", "use_amp=on", "device=mps")
