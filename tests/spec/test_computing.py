"""When precision, compilation, pinned memory and micro-batches are chosen, refused or left out, and what is said."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from conftest import configured
from fasttrain.cli.compose import conf_dir
from fasttrain.errors import ConfigError
from fasttrain.spec.checks import EnvFacts, Machine
from fasttrain.spec.computing import AMP_PAYS_FROM_WIDTH, PROFILE_ENVS
from fasttrain.spec.plan import RunSpec, resolve
from messages import assert_says, wrong_inputs

CARTPOLE = ("env.id=CartPole-v1", "algo=ppo")
OLD = Machine(2, False, False)
BF16 = Machine(2, False, False, "AVX512-BF16")
CUDA = Machine(16, False, True)
TYPED, ON_CUDA, MINE = "command line", "device=cuda", "profile mine"
NO_UNITS, NO_CUDA = ("off", "this CPU has no bf16 units"), ("off", "no CUDA device in use")
PINNED = ("on", "observations, masks and actions are copied without waiting")
GRAPHS = "CUDA graphs of acting and of the loss"
NONE_BY_PARTS = ("default", "no CUDA graphs: the gradients of a minibatch's parts are added up")


def plan_of(*arguments: str, machine: Machine = OLD, images: bool = False, **sources: str) -> RunSpec:
    facts = EnvFacts(native=False, step_s=20e-6, images=images)
    return resolve(configured(*CARTPOLE, *arguments), sources, facts, machine)


def outcome(plan: RunSpec, flag: str) -> tuple[object, str]:
    row = plan.row(flag)
    return row.effective, row.reason


@pytest.mark.parametrize(
    ("machine", "arguments", "flag", "expected"),
    [
        (OLD, ("use_amp=auto", "algo.net_arch=[512]"), "use_amp", NO_UNITS),
        (BF16, ("use_amp=auto",), "use_amp",
         ("off", f"the widest layer has 64 units; on a CPU bfloat16 is faster from {AMP_PAYS_FROM_WIDTH} units on")),
        (BF16, ("use_amp=auto", "algo.net_arch={pi: [64], vf: [512, 32]}"), "use_amp",
         ("bfloat16", "AVX512-BF16, and layers of 512 units")),
        (CUDA, ("use_amp=auto", ON_CUDA), "use_amp", ("bfloat16", "CUDA has units for it")),
        (CUDA, ("use_amp=auto",), "use_amp", NO_UNITS),
        (CUDA, ("use_amp=float16", ON_CUDA), "use_amp", ("float16", "with gradient scaling")),
        (OLD, ("use_amp=auto", "device=mps"), "use_amp", ("off", "device=mps")),
        (OLD, ("use_amp=on", "algo.net_arch=[512]"), "use_amp",
         ("bfloat16", "this CPU has no bf16 units: expect it to be slower")),
        (OLD, ("use_amp=on",), "use_amp",
         ("bfloat16", "this CPU has no bf16 units, and layers of 64 units: expect it to be slower")),
        (BF16, ("use_amp=on",), "use_amp", ("bfloat16", "layers of 64 units: expect it to be slower")),
        (BF16, ("use_amp=on", f"algo.net_arch=[{AMP_PAYS_FROM_WIDTH}]"), "use_amp", ("bfloat16", "")),
        (CUDA, ("use_compile=auto", ON_CUDA), "use_compile",
         ("reduce-overhead", f"launching kernels is the bottleneck: {GRAPHS}")),
        (CUDA, ("use_compile=on", ON_CUDA), "use_compile", ("default", "")),
        (CUDA, ("use_compile=default", ON_CUDA), "use_compile", ("default", "")),
        (CUDA, ("use_compile=max-autotune", ON_CUDA), "use_compile", ("max-autotune", GRAPHS)),
        (CUDA, ("use_compile=auto", ON_CUDA, "gradient_accumulation=2"), "use_compile", NONE_BY_PARTS),
        (OLD, ("use_compile=auto",), "use_compile", ("off", "on a CPU compiling takes longer than it saves")),
        (OLD, ("use_compile=reduce-overhead",), "use_compile", ("default", "CUDA graphs need CUDA")),
        (OLD, ("pin_memory=auto",), "pin_memory", NO_CUDA),
        (CUDA, ("pin_memory=on", "device=cpu"), "pin_memory", NO_CUDA),
        (OLD, ("pin_memory=on", ON_CUDA), "pin_memory", PINNED),  # building the model refuses the device
        (CUDA, ("pin_memory=on", ON_CUDA), "pin_memory", PINNED),
        (BF16, ("+profile=speed", "algo.net_arch=[1024, 512]"), "fused_update",
         ("off", "use_amp is bfloat16: the compiled kernels compute in float32")),
    ],
)  # fmt: skip
def test_what_is_chosen_by_hardware_and_width_and_why(machine, arguments, flag, expected):
    profile = () if arguments[0].startswith("+") else ("engine=fast",)
    assert outcome(plan_of(*profile, *arguments, machine=machine), flag) == expected


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
    assert tuple(plan.row(flag).effective for flag in ("use_amp", "fused_update")) == expected


def test_images_go_to_cuda_by_themselves_and_take_bfloat16_where_there_are_units():
    plan = plan_of("+profile=speed", machine=CUDA, images=True)
    found = [plan.row(flag).effective for flag in ("use_amp", "use_compile", "pin_memory", "fused_update")]
    assert found == ["bfloat16", "reduce-overhead", "on", "off"]
    assert plan_of("+profile=speed", machine=CUDA).config.use_compile == "off", "a small MLP stays on the CPU"
    on_cpu = [plan_of("+profile=speed", machine=machine, images=True) for machine in (BF16, OLD)]
    assert [plan.row("use_amp").effective for plan in on_cpu] == ["bfloat16", "off"]


@pytest.mark.parametrize("flag", ["use_amp", "use_compile", "pin_memory"])
@pytest.mark.parametrize("algo", ["dqn", "ppo"])
def test_only_our_algorithms_can(flag: str, algo: str):
    stock = (f"algo={algo}", "engine=stock", ON_CUDA)
    assert outcome(plan_of(*stock, f"{flag}=auto", machine=CUDA), flag) == ("off", "the stock classes do not have it")
    with pytest.raises(ConfigError, match=f"{flag}=on with engine=stock: "):
        plan_of(*stock, f"{flag}=on", machine=CUDA)
    ours = plan_of(f"algo={algo}", "engine=fast", ON_CUDA, f"{flag}=auto", machine=CUDA)
    assert outcome(ours, flag)[0] == {"use_amp": "bfloat16", "use_compile": "reduce-overhead"}.get(flag, "on")


@pytest.mark.parametrize("arguments", wrong_inputs("what this machine cannot compute"))
def test_what_cannot_be_had_is_refused_where_it_was_typed(arguments: str):
    with pytest.raises(ConfigError) as told:
        plan_of(*arguments.split(), use_amp=TYPED, use_compile=TYPED)
    assert_says("what this machine cannot compute", arguments, str(told.value))


def test_float16_of_a_profile_is_left_out_on_the_cpu():
    plan = plan_of("engine=fast", "use_amp=float16", use_amp=MINE)
    assert outcome(plan, "use_amp") == ("off", "float16 needs CUDA")


@pytest.mark.parametrize("argument", ["use_amp=on", "use_compile=on", "gradient_accumulation=2"])
def test_what_the_kernels_lack_is_done_eagerly_unless_they_were_asked_for(argument: str):
    flag = argument.split("=")[0]
    plan = plan_of("engine=fast", "fused_update=auto", argument)
    effective, reason = outcome(plan, "fused_update")
    assert effective == "off"
    assert flag in reason
    assert str(plan.row(flag).effective) == {"use_amp": "bfloat16", "use_compile": "default"}.get(flag, "2")
    with pytest.raises(ConfigError, match=f"{argument} .*fused_update=on"):
        plan_of("engine=fast", "fused_update=on", argument, **{flag: TYPED})


def test_kernels_asked_for_win_over_auto_and_over_a_profile():
    plan = plan_of(
        "engine=fast", "fused_update=on", "use_amp=auto", "use_compile=auto", "gradient_accumulation=4",
        "algo.net_arch=[512]", machine=BF16,
    )  # fmt: skip
    assert outcome(plan, "use_amp") == ("off", "fused_update=on computes in float32")
    assert outcome(plan, "use_compile") == ("off", "fused_update=on: the update is compiled already")
    assert outcome(plan, "gradient_accumulation") == (1, "compiled kernels work in blocks and do not need it")
    assert plan.config.gradient_accumulation == 1


def test_profiles_keep_the_ratio_of_their_own_number_of_envs():
    profiles = {f"profile {file.stem}": OmegaConf.load(file) for file in (conf_dir() / "profile").glob("*.yaml")}
    ratios = {name: profile.num_envs for name, profile in profiles.items() if profile.updates_per_step > 1}
    assert ratios == PROFILE_ENVS
