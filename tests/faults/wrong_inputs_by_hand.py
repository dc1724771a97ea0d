"""Wrong inputs by hand: what is typed, files, folders of runs, envs that cannot be found, built or played."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from wrong_inputs import ENV, Case, Content, Prepare, with_files

# --- settings that contradict each other

CONTRADICTIONS = (
    "algo.n_steps=4 algo.rollout_size=64", "batch_size=65 algo.rollout_size=64", "num_envs=65 algo.rollout_size=64",
    "batch_size=9 algo.n_steps=4", "algo.n_steps=1 batch_size=2", "force_dummy_vec_env=true vec_env=shared",
    "force_dummy_vec_env=true vec_env=native", "use_subproc_envs=false vec_env=subproc",
    "use_subproc_envs=false vec_env=shared", "num_workers=3 num_envs=2 vec_env=shared", "num_workers=2 vec_env=dummy",
    "num_workers=1 num_envs=2 vec_env=subproc", "train_log_to_file=true train_log_enabled=false", "algo.net_arch=[0]",
    "algo.net_arch={pi:[4],q:[4]}", "algo.net_arch=[64,-1]", "algo.net_arch=[a]", "algo.policy=CnnPolicy",
    "algo.policy=MultiInputPolicy", "schedule=pipelined", "schedule=first_ready",
    "engine=stock fused_update=on", "overlap=true", "engine_switch_at=5", "algo.learning_rate=linear_",
    "algo.clip_range=linear_x",
    "inference_batch_size=4", "gradient_accumulation=2 engine=stock", "eval.episodes=1",
    "env.on_env_error=restart vec_env=dummy", "seed=99999999999", "eval.seed=99999999999", "tier=fastest",
    "stop.patience=2", "profiler=cprofile", "on_existing=ask", "live=maybe", "checkup=loud",
    "algo.shared_lstm=true algo=recurrent_ppo", "algo=recurrent_ppo engine=fast use_amp=on",
    "algo=dqn algo.buffer_size=10 batch_size=11", "algo=dqn num_envs=20 algo.buffer_size=10 batch_size=4",
    "algo=dqn engine=stock algo.dueling=true", "algo=dqn engine=stock algo.prioritized=true",
    "algo=dqn algo.n_steps=129", "algo=dqn engine=stock algo.double_q=true", "algo=dqn algo.per_alpha=0.5",
    "algo=dqn algo.buffer_size=1e15", "algo.rollout_size=1e15", "algo.n_steps=1e13", "total_timesteps=1e400",
    "num_envs=1e12", "num_envs=0", "batch_size=1", "algo.gamma=1.01", "algo.gae_lambda=-0.1", "algo.clip_range=0",
    "algo.learning_rate=-1e-4", "algo.ent_coef=-1", "env.max_episode_steps=0", "env.frame_stack=0",
    "env.frame_stack=1.5", "action_repeat=0", "torch_threads=9999",
)  # fmt: skip


def contradictions() -> Iterator[Case]:
    start = (*ENV, "algo=ppo", "engine=fast")
    for text in CONTRADICTIONS:
        typed = tuple(text.split())
        keys = tuple(part.partition("=")[0] for part in typed if not part.startswith("algo="))
        keys = (*keys, *(key.removeprefix("algo.") for key in keys if "buffer_size" in key))
        yield Case("contradiction", (*start, *typed), keys)
        yield (
            Case("contradiction", (*start, "-m", *typed), keys)
            if "," in text
            else Case("contradiction", (*start, *reversed(typed)), keys)
        )


# --- what is typed

GRAMMAR = (
    "num_envs", "num_envs:4", "=4", "==", "num_envs==4", "num_envs=[", "num_envs={", "num_envs=]", "num_envs='4",
    'num_envs="4', "num_envs=(4", "num_envs=4)", "num_envs=$x", "num_envs=${", "num_envs=${x", "num_envs=${seed",
    "num_envs=${nothing}", "num_envs=${oc.env:NOTHING_OF_THAT_NAME}", "num_envs=${num_envs}", "num_envs=a b",
    'num_envs=\x00', 'num_envs=\n', 'num_envs=\u2028', "num_envs=ä", "num_envs=😀", 'num_envs=\ud800', "num_envs=4,",
    "num_envs=,4", "num_envs=4,8", "num_envs=range(1,4)", "num_envs=glob(*)", "num_envs=sort(1,2", "num_envs=f(1)",
    "num_envs=choice()", "num_envs=interval(1,2)", "num_envs.x=4", "num_envs[0]=4", ".num_envs=4", "num_envs.=4",
    "num..envs=4", "ä=4", "+=4", "+num_envs=4", "~num_envs", "~num_envs=4", "~seed", "~algo", "~env", "~algo.gamma",
    "~nothing", "++nothing=1", "+nothing=1", "+algo=dqn", "algo=[ppo,dqn]", "algo=PPO", "algo=a3c", "algo=sac",
    "algo=", "algo=null", "algo=5", "algo.name=a2c", "algo.name=dqn", "env=atari", "env=", "env=null", "env=5",
    "env=/etc/passwd", "+env=gym", "+profile=spead", "+profile=5", "+profile=null", "+profile=[speed,nothing]",
    "++profile=speed", "profile=speed,balance", "+profile=speed,balance", "hydra.nothing=1", "hydra.run.dir=",
    "hydra.run.dir=null", "hydra.run=5", "hydra=5", "hydra.run.dir=[1]", "hydra/launcher=joblib",
    "hydra.job.nothing=1", "hydra.mode=5", "algo@x=ppo", "nothing@x=y", "x/y=z", "/num_envs=4", "num_envs=4#",
    "[1,2]", "{}", "''", '""', "a", "A", "5", "num envs=4", "=", "-", "num_envs=-", "defaults=[]", "defaults.0=x",
    "_target_=os.system", "algo._target_=os.system", "env.kwargs=5", "env.kwargs=[1]", "env.kwargs=abc",
    "env.kwargs.=5", "env.kwargs..x=5", "~env.kwargs.nothing",
)  # fmt: skip
OPTIONS = (
    "--nothing", "-x", "--num-envs 4", "--num_envs=4", "--config-dir", "--config-dir=",
    "--config-dir=/no/such/folder", "--config-dir nothing", "--config-name nothing", "--config-name",
    "--config-path nothing", "--config-path", "--config-path=/no/such", "--cfg", "--cfg nothing", "--cfg=x",
    "--info nothing", "--resolve", "--trust", "-m -m --trust", "--multirun=3", "---", "--run=x", "-c", "-cd",
    "-cp nothing", "--shell-completion", "--experimental-rerun nothing.pickle", "--experimental-rerun",
)  # fmt: skip
WORDS = (
    "trian", "TRAIN", "evaluate", "traineval", "train eval", "eval train", "help", "version", "run", "train train",
    "resume", "eval", "export", "play", "report", "compare", "tune study=", "doctor --test", "doctor --test nothing",
    "doctor --test=", "doctor doctor.test=x", "ablate", "ablate ablate.flags=[nothing]", "ablate study=nothing",
    "compare study=nothing", "tune study=nothing", "warmup run=x", "check run=x", "resume run=", "eval run=",
    "eval run=x num_envs=4", "export run=x", "export format=onnx", "export run=x format=tflite", "play play.speed=-1",
    "tune -m num_envs=4,8", "compare -m", "doctor -m", "resume -m run=a,b", "play -m run=a,b", "train --trust",
    "compare --trust", "tune tune.space=5", "tune tune.space={nothing:[1]}", "tune tune.space={num_envs:5}",
    "tune tune.space={num_envs:[abc]}", "tune tune.sampler=grid", "report run=nothing", "play run=nothing",
    "tune +profile=speed minutes=0", "compare seeds=0 candidates=[baseline,speed]", "check env.backend=envpool",
)  # fmt: skip
CANDIDATES = (
    "", "[]", "5", "abc", "[baseline]", "[baseline,baseline]", "[baseline,nothing]", "[baseline,5]", "[[a],[b]]",
    "[baseline,null]", "{a: 1}", "[baseline,{name: x}]", "[baseline,{name: x, overrides: 5}]", "[", "[baseline,",
    "[baseline,{name: x, overrides: [num_envs=abc]}]", "[baseline,{name: x, overrides: [nothing=1]}]", "]",
    "[baseline,{nam: x, overrides: []}]", "[baseline,num_envs=0]", "[baseline,'num_envs=[']", "[baseline,algo=x]",
    "[baseline,{name: x, overrides: [5]}]", "[baseline,{name: [1], overrides: []}]", "null", "'", '[baseline,\t]',
    "[baseline,{name: x, overrides: [-m]}]", "[baseline,'']", "[baseline,!!python/object:os.system x]",
    "[baseline,{name: x, overrides: ['num_envs=4,8']}]", "[baseline, &a [*a]]",
    "[baseline,{name: '', overrides: []}]",

)  # fmt: skip

SWEEPS = (
    "num_envs=abc,def", "num_envs=", "num_envs=,", "num_envs=1,", "nothing=1,2", "algo=ppo,nothing", "algo=x,y",
    "num_envs=[", "num_envs=range(1,2,3,4)", "num_envs=glob(*)", "env=x,y", "+profile=speed,nothing", "hydra.x=1,2",
    "num_envs=choice(", "+profile=x,y", "algo.n_step=1,2", "num_envs=range(5,1)",
)  # fmt: skip


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


# --- YAML and folders

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


# --- envs

GAME = """
import gymnasium as gym, numpy as np
class Game(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)
    def __init__(self, size=1): {init}
    def reset(self, *, seed=None, options=None): {reset}
    def step(self, action): {step}
"""
ZEROS = "np.zeros(2, np.float32)"


def game(init: str = "pass", reset: str = "", step: str = "", spaces: str = "") -> str:
    """A module with an env, broken in one place."""
    text = GAME.format(
        init=init, reset=reset or f"return {ZEROS}, {{}}", step=step or f"return {ZEROS}, 0.0, False, False, {{}}"
    )
    return text + (f"    {spaces}\n" if spaces else "")


MODULES = {
    "empty": "",
    "not a class": "Game = 3\n",
    "not an env": "class Game:\n    pass\n",
    "a function that returns none": "def Game(size=1): return None\n",
    "needs an argument": "import gymnasium as gym\nclass Game(gym.Env):\n    def __init__(self, world): pass\n",
    "syntax": "class Game(:\n",
    "indentation": "class Game:\nx = 1\n",
    "not text": b"\x00\xff\xfe\x80",
    "latin 1": b"# \xe9\nclass Game: pass\n",
    "imports what is missing": "import nothing_of_that_name\n",
    "imports what is missing from": "from os import nothing_of_that_name\n",
    "raises on import": "raise ValueError('on import')\n",
    "exits on import": "import sys\nsys.exit(5)\n",
    "exits with none on import": "raise SystemExit\n",
    "divides by zero on import": "1 / 0\n",
    "recursion on import": "def f(): return f()\nf()\n",
    "raises in init": game("raise RuntimeError('no board')"),
    "raises in init without words": game("raise RuntimeError"),
    "raises in init of many lines": game("raise RuntimeError('a\\nb\\nc')"),
    "raises an error that cannot be shown": (
        "class Odd(Exception):\n    def __str__(self): raise ValueError('no words')\n"
    )
    + game("raise Odd"),
    "exits in init": game("import sys; sys.exit(3)"),
    "exits with text in init": game("import sys; sys.exit('good bye')"),
    "prints in init": game("print('x' * 10000); raise RuntimeError('printed')"),
    "reads in init": game("input('who are you? ')"),
    "asserts in init": game("assert False"),
    "no action space": game(spaces="action_space = None"),
    "no observation space": game(spaces="observation_space = None"),
    "a text as a space": game(spaces="action_space = 'two'"),
    "text actions": game(spaces="action_space = gym.spaces.Text(5)"),
    "a tuple of actions": game(spaces="action_space = gym.spaces.Tuple((gym.spaces.Discrete(2),))"),
    "a sequence observed": game(spaces="observation_space = gym.spaces.Sequence(gym.spaces.Discrete(2))"),
    "a graph observed": game(
        spaces="observation_space = gym.spaces.Graph(gym.spaces.Discrete(2), gym.spaces.Discrete(2))"
    ),
}
PLAYED = {  # is told where the env is played before training: checkup=strict
    "reset raises": game(reset="raise RuntimeError('no reset')"),
    "reset without info": game(reset=f"return {ZEROS}"),
    "reset returns none": game(reset="return None"),
    "reset exits": game(reset="import os; os._exit(7)"),
    "reset of another shape": game(reset="return np.zeros(3, np.float32), {}"),
    "reset of another dtype": game(reset="return np.zeros(2), {}"),
    "step raises": game(step="raise RuntimeError('no step')"),
    "step exits": game(step="import sys; sys.exit(0)"),
    "step of four values": game(step=f"return {ZEROS}, 0.0, False, {{}}"),
    "step returns none": game(step="return None"),
    "a reward that is text": game(step=f"return {ZEROS}, 'much', False, False, {{}}"),
    "a reward of none": game(step=f"return {ZEROS}, None, False, False, {{}}"),
    "nan rewards": game(step=f"return {ZEROS}, float('nan'), False, False, {{}}"),
    "nan observed": game(step="return np.full(2, np.nan, np.float32), 0.0, False, False, {}"),
    "another shape": game(step="return np.zeros(5, np.float32), 0.0, False, False, {}"),
    "info that is none": game(step=f"return {ZEROS}, 0.0, True, False, None"),
}
WRAPPERS = {
    "empty": "",
    "no wrapper": "class Wrap:\n    pass\n",
    "none": "def Wrap(env): return None\n",
    "a number": "Wrap = 3\n",
    "raises": "def Wrap(env): raise RuntimeError('no wrap')\n",
    "exits": "def Wrap(env):\n    import sys\n    sys.exit(2)\n",
    "syntax": "def Wrap(env:\n",
    "two arguments": "def Wrap(env, size): return env\n",
    "other spaces": (
        "import gymnasium as gym\nclass Wrap(gym.Wrapper):\n"
        "    def __init__(self, env):\n        super().__init__(env)\n        self.action_space = gym.spaces.Text(3)\n"
    ),
}


ENTRY_POINTS = (
    "nothing", "nothing:Game", ":Game", "nothing:", "no/such.py:Game", "os:Game", "os:getcwd", "json:", ":", "a:b:c",
    "..x:Game", "x y:Game", "os.path:join", "fasttrain:PPO", "gymnasium:Env", "1:2",
)  # fmt: skip
ENV_IDS = (
    "NoSuch-v0", "CartPole-v99", "cartpole-v1", "nothing:CartPole-v1", "CartPole-v1 ", "-v1", "ALE/Pong-v5",
    "GymV21Environment-v0", "Blackjack-v9", "a:b:c", "../CartPole-v1", "os:CartPole-v9",
)  # fmt: skip


def envs() -> Iterator[Case]:
    plain = ("algo=ppo", "vec_env=dummy", "num_envs=1", "total_timesteps=8", "report=false")
    for number, (what, source) in enumerate({**MODULES, **PLAYED}.items()):
        name = f"wrong_game_{number}"  # another module each: an imported one is not read again
        checked = ("checkup=strict",) if what in PLAYED else ()
        for command in ("train", "check"):
            arguments = (command, f"env.entry_point={name}:Game", *plain[: 5 if command == "train" else 1], *checked)
            yield Case(f"env: {what}", arguments, (name, "env.entry_point"), prepare=with_files({f"{name}.py": source}))
    for number, (what, source) in enumerate(WRAPPERS.items()):
        name = f"wrong_wrapper_{number}"
        files = with_files({f"{name}.py": source})
        arguments = ("env.id=CartPole-v1", *plain, f"env.wrappers=[{name}:Wrap]")
        yield Case(f"wrapper: {what}", arguments, (name, "env.wrappers", "Text("), prepare=files)
    for value in ENTRY_POINTS:
        yield Case("entry point", (f"env.entry_point='{value}'", *plain), (value, "env.entry_point"))
        yield Case("wrapper", ("env.id=CartPole-v1", *plain, f"env.wrappers=['{value}']"), (value, "env.wrappers"))
    for value in ENV_IDS:
        yield Case("env id", (f"env.id='{value}'", *plain), (value.strip(), "env.id"))
    known = ("env.id=CartPole-v1", *plain)
    for text in ("env.kwargs.size=5", "env.kwargs={a: 1}", "env.kwargs.id=3"):
        yield Case("env kwargs", (*known, text), ("env.kwargs", "CartPole-v1"))
    for text in ("env.kwargs.opponents=nobody", "env.kwargs.opponents=7", "opponent=nobody", "env.kwargs.players=x"):
        yield Case("env kwargs", ("total_timesteps=8", "report=false", text), (text.split("=")[0], "env.kwargs"))
    for more in (("env.entry_point=a:B",), ("env=skirmish", "env.kwargs.mission=none"), ("algo=maskable_ppo",),
                 ("opponent=self",), ("opponent=hard",), ("env.backend=envpool",), ("vec_env=native",),
                 ("env.native_game=nothing:Game", "algo=dqn", "engine=fast", "vec_env=native"),
                 ("env.normalize=[rewards]",), ("env.wrappers=[3]",), ("env.info_keys=3",),
                 ("env.on_env_error=restart",), ("device=cuda:99",), ("device=tpu",), ("device=cpu:x",),
                 ("env.eval_opponent=hard", "opponent=self")):  # fmt: skip
        words = tuple(text.partition("=")[0] for text in more)
        yield Case("env", (*known, *more), (*words, *(text.partition("=")[2] for text in more)))


def by_hand() -> Iterator[Case]:
    """All of them."""
    for make in (contradictions, typed, yamls, folders, envs):
        yield from make()
