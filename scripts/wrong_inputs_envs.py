"""Wrong inputs by hand: envs and wrappers that cannot be found, built or played."""

from __future__ import annotations

from collections.abc import Iterator

from wrong_inputs_settings import Case, with_files

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
