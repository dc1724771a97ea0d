"""Wrong inputs by hand: what is typed, files, folders of runs, envs that cannot be found, built or played."""

from __future__ import annotations

from collections.abc import Iterator

from wrong_inputs import ENV, Case, Content, with_files

# --- settings that contradict each other

CONTRADICTIONS = (
    "algo.n_steps=4 algo.rollout_size=64", "batch_size=65 algo.rollout_size=64", "num_envs=65 algo.rollout_size=64",
    "batch_size=9 algo.n_steps=4", "algo.n_steps=1 batch_size=2", "force_dummy_vec_env=true vec_env=shared",
    "use_subproc_envs=false vec_env=subproc", "num_workers=3 num_envs=2 vec_env=shared", "num_workers=2 vec_env=dummy",
    "train_log_to_file=true train_log_enabled=false", "algo.net_arch=[0]", "algo.net_arch={pi:[4],q:[4]}",
    "algo.net_arch=[a]", "algo.policy=CnnPolicy", "algo.policy=MultiInputPolicy", "schedule=pipelined",
    "schedule=first_ready", "engine=stock fused_update=on", "overlap=true", "engine_switch_at=5",
    "algo.learning_rate=linear_", "inference_batch_size=4", "gradient_accumulation=2 engine=stock",
    "env.on_env_error=restart vec_env=dummy", "seed=99999999999", "tier=fastest", "stop.patience=2",
    "profiler=cprofile", "on_existing=ask", "live=maybe", "checkup=loud", "algo.shared_lstm=true algo=recurrent_ppo",
    "algo=recurrent_ppo engine=fast use_amp=on", "algo=dqn algo.buffer_size=10 batch_size=11",
    "algo=dqn num_envs=20 algo.buffer_size=10 batch_size=4", "algo=dqn engine=stock algo.dueling=true",
    "algo=dqn engine=stock algo.prioritized=true", "algo=dqn algo.n_steps=129", "algo=dqn algo.per_alpha=0.5",
    "algo=dqn algo.buffer_size=1e15", "total_timesteps=1e400", "num_envs=1e12", "algo.gamma=1.01",
    "algo.clip_range=0", "env.max_episode_steps=0", "env.frame_stack=1.5", "action_repeat=0", "torch_threads=9999",
)  # fmt: skip


def contradictions() -> Iterator[Case]:
    for text in CONTRADICTIONS:
        typed = tuple(text.split())
        start = (*ENV, "engine=fast") if "algo=" in text else (*ENV, "algo=ppo", "engine=fast")
        keys = tuple(part.partition("=")[0] for part in typed if not part.startswith("algo="))
        keys = (*keys, *(key.removeprefix("algo.") for key in keys if "buffer_size" in key))
        yield Case("contradiction", (*start, *typed), keys)
        yield Case("contradiction", (*start, *reversed(typed)), keys)


# --- what is typed

GRAMMAR = (
    "num_envs", "num_envs:4", "=4", "num_envs==4", "num_envs=[", "num_envs=]", "num_envs='4", "num_envs=(4",
    "num_envs=$x", "num_envs=${", "num_envs=${nothing}", "num_envs=${oc.env:NOTHING_OF_THAT_NAME}",
    "num_envs=${num_envs}", "num_envs=a b", 'num_envs=\x00', 'num_envs=\u2028', "num_envs=😀", 'num_envs=\ud800',
    "num_envs=4,", "num_envs=,4", "num_envs=range(1,4)", "num_envs=glob(*)", "num_envs=f(1)", "num_envs=choice()",
    "num_envs.x=4", "num_envs[0]=4", ".num_envs=4", "num_envs.=4", "num..envs=4", "ä=4", "+num_envs=4", "~num_envs",
    "~seed", "~algo", "~algo.gamma", "~nothing", "++nothing=1", "+algo=dqn", "algo=[ppo,dqn]", "algo=PPO", "algo=a3c",
    "algo=sac", "algo=", "algo=null", "algo.name=a2c", "env=atari", "env=", "env=5", "env=/etc/passwd", "+env=gym",
    "+profile=spead", "+profile=null", "+profile=[speed,nothing]", "++profile=speed", "profile=speed,balance",
    "hydra.nothing=1", "hydra.run.dir=", "hydra.run=5", "hydra=5", "hydra.run.dir=[1]", "hydra/launcher=joblib",
    "hydra.mode=5", "algo@x=ppo", "x/y=z", "/num_envs=4", "num_envs=4#", "[1,2]", "{}", "''", "A", "num envs=4", "=",
    "-", "defaults=[]", "_target_=os.system", "env.kwargs=5", "env.kwargs=[1]", "env.kwargs.=5", "env.kwargs..x=5",
)  # fmt: skip
OPTIONS = (
    "--nothing", "-x", "--num-envs 4", "--num_envs=4", "--config-dir", "--config-dir=", "--config-dir nothing",
    "--config-name nothing", "--config-path nothing", "--cfg", "--cfg nothing", "--info nothing", "--resolve",
    "-m -m --trust", "--multirun=3", "---", "--run=x", "-cd", "--shell-completion", "--experimental-rerun no.pickle",
)  # fmt: skip
WORDS = (
    "trian", "evaluate", "train eval", "run", "train train", "resume", "eval", "export", "play", "report", "compare",
    "tune run=", "doctor --test nothing", "compare candidates={ablate:[nothing]}", "ablate run=nothing",
    "warmup run=x", "check run=x", "resume run=", "eval run=x num_envs=4", "export format=onnx",
    "export run=x format=tflite", "play play.speed=-1", "tune -m num_envs=4,8", "resume -m run=a,b", "train --trust",
    "tune tune.space=5", "tune tune.space={nothing:[1]}", "tune tune.space={num_envs:[abc]}", "tune tune.sampler=grid",
    "tune tune.space={num_envs:{low:2}}", "tune tune.objective=rewards", "tune tune.objective=time_to:x",
    "report run=nothing", "tune +profile=speed minutes=0", "compare seeds=0 candidates=[baseline,speed]",
)  # fmt: skip
CANDIDATES = (
    "", "[]", "abc", "[baseline]", "[baseline,baseline]", "[baseline,nothing]", "[baseline,5]", "[[a],[b]]", "{a: 1}",
    "[baseline,null]", "[baseline,{name: x}]", "[", "]", "[baseline,{name: x, overrides: [num_envs=abc]}]", "'",
    "[baseline,{nam: x, overrides: []}]", "[baseline,num_envs=0]", "[baseline,'num_envs=[']", '[baseline,\t]',
    "[baseline,{name: [1], overrides: []}]", "[baseline,{name: x, overrides: [-m]}]", "[baseline, &a [*a]]",
    "[baseline,!!python/object:os.system x]", "[baseline,{name: x, overrides: ['num_envs=4,8']}]",
)  # fmt: skip
SWEEPS = ("num_envs=,", "num_envs=1,", "nothing=1,2", "algo=ppo,nothing", "num_envs=[", "num_envs=range(1,2,3,4)",
          "env=x,y", "+profile=speed,nothing", "hydra.x=1,2", "num_envs=choice(", "algo.n_step=1,2")  # fmt: skip


def typed() -> Iterator[Case]:
    known = ("report=false", "total_timesteps=8")
    for text in GRAMMAR:
        bare = text.lstrip("+~").partition("=")[0].strip("'\"")
        yield Case("grammar", (*ENV, "algo=ppo", text), (bare, text))
        if not text.startswith(("num_envs", "algo")):  # which would be said again, rightly
            yield Case("grammar", (text, *ENV, "algo=ppo"), (bare, text))
    for text in OPTIONS:
        words = tuple(text.split(" "))
        named = (words[0].partition("=")[0], *words[1:], "-m", "--config-dir", "subcommand")
        yield Case("option", (*ENV, "algo=ppo", *words), named)
        yield Case("option", (*words, *ENV, "algo=ppo"), named)
    for text in WORDS:
        words = tuple(text.split(" "))
        named = tuple(word.partition("=")[0] for word in words)
        more = () if "+profile" in text else ("+profile=speed",)
        yield Case("command", words, (*named, "run=", "format="))
        if words[0] not in ("ablate", "tune") or "flags" in text or "space" in text:  # else that begins one
            yield Case("command", (*words, *more, *known), (*named, "run=", "format="))
    for text in CANDIDATES:
        for more in ((), ("seeds=2", "algo=ppo", "env.id=CartPole-v1")):
            yield Case("candidates", ("compare", f"candidates={text}", *more, *known), ("candidate",))
    for text in SWEEPS:
        bare = text.lstrip("+").partition("=")[0]
        yield Case("sweep", ("-m", *ENV, "algo=ppo", text), (bare,))


# --- files

YAMLS: tuple[Content, ...] = (
    "num_envs: [1, 2\nseed: 3\n", "num_envs:\n\t- 3\n", "num_envs: 3\nnum_envs: 4\n", "- num_envs\n- 3\n", "num_envs\n",
    "5\n", bytes(range(256)), b"\x00\x00\x00\x00", "num_envs: 3 # gr\xf6\xdfe\n".encode("latin-1"),
    "num_envs: 3\n".encode("utf-16"), "num_envs: 3: 4\n", "num_envs: '3\n", "env: {id: CartPole-v1\n",
    "num_envs: !!python/object/apply:os.getcwd []\n", "num_envs: *nothing\n", "num_envs: 3\n---\nnum_envs: 4\n",
    "num_envs: abc\n", "num_evns: 4\n", "env:\n  max_step: 4\n", "env: [1, 2]\n", "stop: now\n", "num_envs: {a: 1}\n",
    "num_envs: ${nothing}\n", "num_envs: ${num_envs}\n", "num_envs: ${seed\n", "num_envs: ${nothing:3}\n",
    "defaults:\n  - nothing\n", "defaults: 5\n", "defaults:\n  - mine\n", "null: 3\n", "3: 4\n", "num_envs: -3\n",
    "num_envs: 2026-01-01\n", "num_envs: " + "[" * 2000 + "]" * 2000 + "\n", "%\n", "num_envs: @3\n", "? [a]\n: 3\n",
)  # fmt: skip


def yamls() -> Iterator[Case]:
    """As a profile, and as a file of a group."""
    for content in YAMLS:
        keys = [word for word in ("num_envs", "num_evns", "max_step", "stop", "env", "nothing") if word in str(content)]
        named = ("mine.yaml", *keys, "mine", "key '3'", "'env.3'")
        start = (*(key for key in ENV if key != "num_envs=1"), "algo=ppo", "--config-dir", "conf")
        text = "# @package _global_\n" + content if isinstance(content, str) else content
        yield Case("profile", (*start, "+profile=mine"), named, prepare=with_files({"conf/profile/mine.yaml": text}))
        start = tuple(key for key in start if key != ENV[0])
        yield Case("env group", (*start, "env=mine"), named, prepare=with_files({"conf/env/mine.yaml": content}))
    broken = with_files({"conf/profile/mine.yaml": "# @package _global_\nnum_envs: [1\n"})
    for command in ("eval", "doctor", "compare", "check", "tune", "ablate", "warmup", "-m"):
        yield Case("YAML", (command, "--config-dir", "conf", "+profile=mine"), ("mine.yaml",), prepare=broken)
    yield Case("YAML, a file as folder", (*ENV, "--config-dir", "conf"), ("conf",), prepare=with_files({"conf": "x"}))


# --- folders


def folders() -> Iterator[Case]:
    """Runs with damaged files: evil_files.py and tests/runs/test_resume.py."""
    for command in ("eval", "resume", "export", "play", "report"):
        more = ("format=torchscript",) if command == "export" else ()
        for prepare in (
            None,
            with_files({"run": "x"}),
            with_files({"run/x.txt": "x"}),
            with_files({"run/plan.json": "["}),
        ):
            yield Case("run folder", (command, "run=run", *more), ("run=run", "run/"), prepare=prepare)
        for value in ("", "null", "[a]", "5", "a/../..", "/", "x" * 300, "'a\tb'", "run,run", "/dev/null"):
            yield Case("run folder", (command, f"run={value}", *more), ("run", command))
    for value in ("/proc/nothing/x", "/dev/null/x", "a" * 300, "file/x", "file", "'x\x00y'", "/sys/x"):
        arguments = (*ENV, "algo=ppo", f"hydra.run.dir={value}")
        named = (value, "output folder", "hydra.run.dir")
        yield Case("output folder", arguments, named, prepare=with_files({"file": "x"}))


# --- envs

GAME = """
import gymnasium as gym, numpy as np
class Game(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = {space}
    def __init__(self, size=1): {init}
    def reset(self, *, seed=None, options=None): return np.zeros(2, np.float32), {{}}
    def step(self, action): return np.zeros(2, np.float32), 0.0, False, False, {{}}
"""


def game(init: str = "pass", space: str = "gym.spaces.Discrete(2)") -> str:
    """A module with an env, broken in one place; those that break while they are played: test_bad_envs.py."""
    return GAME.format(init=init, space=space)


MODULES: tuple[Content, ...] = (
    "", "Game = 3\n", "class Game:\n    pass\n", "def Game(size=1): return None\n", "class Game(:\n",
    b"\x00\xff\xfe\x80",
    "import nothing_of_that_name\n", "from os import nothing_of_that_name\n", "raise ValueError('on import')\n",
    "import sys\nsys.exit(5)\n", "raise SystemExit\n", "def f(): return f()\nf()\n",
    game("raise RuntimeError('no board')"),
    game("raise RuntimeError"), game("raise RuntimeError('a\\nb\\nc')"), game("import sys; sys.exit(3)"),
    game("import sys; sys.exit('good bye')"), game("input('who are you? ')"), game("assert False"),
    "class Odd(Exception):\n    def __str__(self): raise ValueError('no words')\n" + game("raise Odd"),
    game(space="None"), game(space="'two'"), game(space="gym.spaces.Text(5)"),
    game(space="gym.spaces.Tuple((gym.spaces.Discrete(2),))"),
)  # fmt: skip
WRAPPERS = (
    "", "class Wrap:\n    pass\n", "def Wrap(env): return None\n", "Wrap = 3\n", "def Wrap(env:\n",
    "def Wrap(env): raise RuntimeError('no wrap')\n", "def Wrap(env, size): return env\n",
)  # fmt: skip
NAMES = (
    "nothing", "nothing:Game", ":Game", "nothing:", "no/such.py:Game", "os:Game", "os:getcwd", ":", "a:b:c", "x y:Game",
    "fasttrain:PPO", "gymnasium:Env", "1:2",
)  # fmt: skip
ENV_IDS = ("NoSuch-v0", "CartPole-v99", "cartpole-v1", "nothing:CartPole-v1", "CartPole-v1 ", "ALE/Pong-v5", "a:b:c")
ENVS = (
    "env.entry_point=a:B", "env=skirmish env.kwargs.mission=none", "algo=maskable_ppo", "opponent=self",
    "env.backend=envpool", "vec_env=native", "env.normalize=[rewards]", "env.wrappers=[3]", "env.info_keys=3",
    "env.on_env_error=restart", "device=cuda:99", "device=tpu", "env.kwargs.size=5", "env.kwargs.id=3",
)  # fmt: skip


def envs() -> Iterator[Case]:
    plain = ("algo=ppo", "vec_env=dummy", "num_envs=1", "total_timesteps=8", "report=false")
    known = ("env.id=CartPole-v1", *plain)
    for number, source in enumerate(MODULES):
        name = f"wrong_game_{number}"  # another module each: an imported one is not read again
        for command in ("train", "check"):
            arguments = (command, f"env.entry_point={name}:Game", *plain[: 5 if command == "train" else 1])
            yield Case("env", arguments, (name, "env.entry_point"), prepare=with_files({f"{name}.py": source}))
    for number, source in enumerate(WRAPPERS):
        name = f"wrong_wrapper_{number}"
        named = (name, "env.wrappers")
        yield Case(
            "wrapper", (*known, f"env.wrappers=[{name}:Wrap]"), named, prepare=with_files({f"{name}.py": source})
        )
    for value in NAMES:
        yield Case("entry point", (f"env.entry_point='{value}'", *plain), (value, "env.entry_point"))
        yield Case("wrapper", (*known, f"env.wrappers=['{value}']"), (value, "env.wrappers"))
    for value in ENV_IDS:
        yield Case("env id", (f"env.id='{value}'", *plain), (value.strip(), "env.id"))
    for text in ENVS:
        words = [word.partition("=") for word in text.split()]
        named = (*(key for key, _, _ in words), *(value for _, _, value in words), "env.kwargs", "CartPole-v1")
        yield Case("env", (*known, *text.split()), named)


def by_hand() -> Iterator[Case]:
    """All of them."""
    for make in (contradictions, typed, yamls, folders, envs):
        yield from make()
