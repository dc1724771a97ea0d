"""All algorithms, with one entry each. No other module knows an algorithm by its name.

A new algorithm of Stable-Baselines3 or sb3-contrib is an entry here. Its constructor arguments come from a table that
scripts/stock_arguments.py writes. Classes are dotted names, which are imported when a model is built.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from importlib import import_module
from importlib.resources import files
from typing import Any, Literal

from fasttrain.errors import ConfigError
from fasttrain.spec.removed import flat
from fasttrain.spec.setting import convert, did_you_mean, setting

TIERS = ("baseline", "balance", "speed", "debug")
PER_TRANSITION = -1  # SB3's gradient_steps=-1: one update for each new transition
# Constructor arguments that are not keys below `algo.`: they are flags or other settings.
ELSEWHERE = frozenset(
    ("batch_size", "learning_starts", "gradient_steps", "seed", "verbose", "stats_window_size",
     "optimize_memory_usage", "_init_setup_model")
)  # fmt: skip
LSTM = {"lstm_hidden_size": (int, 256), "n_lstm_layers": (int, 1), "enable_critic_lstm": (bool, True),
        "shared_lstm": (bool, False)}  # fmt: skip
MEMORY = {**LSTM, "cell": (Literal["lstm", "gru"], "lstm"),
          "memory_inputs": (tuple[Literal["action", "reward"], ...], ())}  # fmt: skip
PPO_EXTRAS = {"teacher": (str | None, None), "teacher_coef": (float | str, "linear_1"), "reuse": (int, 1),
              "target_tv": (float | None, None)}  # fmt: skip
DQN_EXTRAS = {"loss": (Literal["huber", "mse"], "huber"), "double_q": (bool, False), "dueling": (bool, False),
              "prioritized": (bool, False), "per_alpha": (float, 0.6), "per_beta": (float, 0.4),
              "use_masking": (bool, True)}  # fmt: skip
# Ranges of constructor arguments.
MOST_RATE = 1_000_000
SHARE, POSITIVE, NOT_NEGATIVE, BOUNDED = (0, 1), (1, None), (0, None), (0, 1_000_000)
RANGES: dict[str, tuple[float | None, float | None]] = {
    **dict.fromkeys(("gamma", "gae_lambda", "tau", "line_search_shrinking_factor", "per_beta", "exploration_fraction",
                     "exploration_initial_eps", "exploration_final_eps", "target_tv"), SHARE),
    **dict.fromkeys(("n_epochs", "lstm_hidden_size", "n_lstm_layers", "buffer_size", "n_steps", "policy_delay",
                     "target_update_interval", "cg_max_steps", "line_search_max_iter", "n_critic_updates",
                     "sub_sampling_factor", "her_goals", "reuse", "n_top", "n_delta"), POSITIVE),
    **dict.fromkeys(("per_alpha", "target_kl", "target_policy_noise", "target_noise_clip", "cg_damping", "rms_prop_eps",
                     "top_quantiles_to_drop_per_net"), NOT_NEGATIVE),
    **dict.fromkeys(("max_grad_norm", "ent_coef", "vf_coef"), BOUNDED),
    "rollout_size": (2, None),
    "sde_sample_freq": (-1, None),
    "learning_rate": (None, MOST_RATE),
}  # fmt: skip
CHOICES = ("Discrete", "MultiDiscrete", "MultiBinary")


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmSpec:
    """The capabilities of one algorithm."""

    name: str
    zoo: str = ""  # the algorithm's name in rl_zoo3, if different
    stock: str  # module:Class
    fast: str | None = None  # fasttrain's class, if fasttrain has one
    ours_alone: bool = False  # not in SB3; `stock` is only a class with the same arguments
    on_policy: bool = False  # learns from rollouts
    off_policy: bool = False  # learns from a replay buffer
    recurrent: bool = False
    masks: Literal["no", "may", "must"] = "no"  # whether action masks are used; may: only by fasttrain's class
    actions: tuple[str, ...]  # names of Gymnasium's spaces
    stock_actions: tuple[str, ...] | None = None  # action spaces of the stock class, if fewer
    greedy: bool = False  # evaluated with greedy actions only, because the policy changes much in an update
    policies: tuple[str, ...] = ("MlpPolicy", "CnnPolicy", "MultiInputPolicy")
    exports: Literal["logits", "q_values", "no"] = "no"
    # Defaults by tier: batch_size, learning_rate, rollout_size, … An algorithm lacks settings that are not named here.
    tiers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    flags: Mapping[str, Any] = field(default_factory=dict)  # defaults of flags for this algorithm
    extras: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)  # argument of `fast` alone → (type, default)
    lacks: Mapping[str, str] = field(default_factory=dict)  # flag that the fast class does not support → reason
    kernels: str = "actor-critic"  # the kernels of `fused_update`: a key of `eligible.REPRODUCED`
    hidden: int = 64  # default number of units of the policy's widest layer

    @property
    def rows_alone(self) -> bool:
        """Whether the algorithm learns from single rows of a rollout, not from sequences."""
        return self.on_policy and not self.recurrent

    @property
    def minibatches(self) -> bool:
        """Whether the algorithm learns in minibatches of `batch_size`."""
        return "batch_size" in self.arguments()

    @property
    def stretches(self) -> bool:
        """Whether the algorithm's exploration depends on `total_timesteps`."""
        return "exploration_fraction" in self.arguments()

    def arguments(self) -> Mapping[str, tuple[str, Any]]:
        """Name → (type, default) of the stock class's constructor arguments that have a simple type."""
        return {name: (kind, default) for name, (kind, default) in _table()[self.stock.partition(":")[2]].items()}

    def keys(self) -> dict[str, tuple[Any, Any]]:
        """Name → (type, default) of the keys below `algo.`, except keys about the policy and its networks."""
        keys: dict[str, tuple[Any, Any]] = {}
        for name, (kind, default) in self.arguments().items():
            if name not in ELSEWHERE:
                keys[name] = (HINTS[kind.rstrip("?")] | None if kind.endswith("?") else HINTS[kind], default)
        if self.off_policy:
            keys |= {"her": (Literal["off", "future", "final", "episode"], "off"), "her_goals": (int, 4)}
            keys["train_freq"] = (keys["train_freq"][0], 1)  # SB3's DQN has 4, for one env; fasttrain has several
        if self.on_policy:
            keys["n_steps"] = (int | None, None)
            keys["rollout_size"] = (int, None)
        return keys | dict(self.extras)

    def fields(self) -> list[tuple[Any, ...]]:
        """The keys as fields of a dataclass. Those that depend on tier and game have no default."""
        own = set.intersection(*({*values} for values in self.tiers.values()))
        return [
            (name, hint, setting(MISSING if name in own else usual, "", least=least, most=most))
            for name, (hint, usual) in self.keys().items()
            for least, most in [RANGES.get(name, (None, None))]
        ]

    def load(self, fast: bool) -> Any:
        """Import fasttrain's class if `fast` is set and the class exists, else the stock class."""
        module, _, name = (self.fast if self.fast and (fast or self.ours_alone) else self.stock).partition(":")
        return getattr(import_module(module), name)


HINTS: dict[str, Any] = {"schedule": float | str, "float": float, "int": int, "bool": bool, "str|float": float | str,
                         "frequency": int | tuple[int | str, ...]}  # fmt: skip


@cache
def _table() -> dict[str, dict[str, list[Any]]]:
    text = files("fasttrain.spec").joinpath("stock_arguments.json").read_text(encoding="utf-8")
    return json.loads(text)  # type: ignore[no-any-return]


def every_tier(**values: object) -> Mapping[str, Mapping[str, Any]]:
    """The same defaults for all tiers, but with short rollouts in `debug`."""
    return {**dict.fromkeys(TIERS, values), "debug": in_short(values)}


def in_short(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Defaults for a run of a few thousand steps: rollouts are short, so that there are some updates."""
    return {name: min(value, 512) if name == "rollout_size" else value for name, value in values.items()}


# Larger minibatches give fewer gradient steps with less noise, so the learning rate grows with the batch size. Smaller
# rollouts give more updates for the same number of env steps (docs/concepts/classes.md). Stock: 8 envs × 2,048 steps.
PPO_STOCK = {"batch_size": 64, "learning_rate": 3e-4, "n_epochs": 10, "rollout_size": 16_384}
PPO_TIERS = {
    "baseline": PPO_STOCK,
    "balance": {"batch_size": 256, "learning_rate": 6e-4, "n_epochs": 10, "rollout_size": 16_384},
    "speed": {"batch_size": 256, "learning_rate": 1e-3, "n_epochs": 10, "rollout_size": 4_096},
    "debug": in_short(PPO_STOCK),
}
DQN_TIERS = {
    "baseline": {"batch_size": 64, "learning_rate": 1e-4},
    "balance": {"batch_size": 320, "learning_rate": 1e-4},
    "speed": {"batch_size": 256, "learning_rate": 1e-4},
    "debug": {"batch_size": 64, "learning_rate": 1e-4},
}

RECURRENT: dict[str, Any] = {
    "on_policy": True,
    "recurrent": True,
    "kernels": "recurrent",
    "policies": ("MlpLstmPolicy", "CnnLstmPolicy", "MultiInputLstmPolicy"),
    "exports": "logits",
    "tiers": every_tier(batch_size=128, learning_rate=3e-4, n_epochs=10, rollout_size=1_024),
    "extras": MEMORY,
    "lacks": {"use_amp": "recurrent policies compute in float32",
              "use_compile": "recurrent policies are not compiled"},
}  # fmt: skip


def continuous(name: str, stock: str, learning_rate: float, greedy: bool = False, **more: Any) -> AlgorithmSpec:
    """An off-policy algorithm for continuous actions, with one update per transition as in the papers."""
    return AlgorithmSpec(
        name=name,
        stock=stock,
        off_policy=True,
        actions=("Box",),
        greedy=greedy,
        tiers=every_tier(batch_size=256, learning_rate=learning_rate),
        flags={"updates_per_step": PER_TRANSITION, "warmup_steps": 100},
        extras={"action_noise": (str | None, None)},  # normal_0.1: Gaussian with this deviation; ornstein-uhlenbeck_0.5
        hidden=256,
        **more,
    )


ALGORITHMS: dict[str, AlgorithmSpec] = {
    spec.name: spec
    for spec in (
        AlgorithmSpec(
            name="maskable_ppo",
            stock="sb3_contrib:MaskablePPO",
            fast="fasttrain.algos.ppo:MaskablePPO",
            on_policy=True,
            masks="must",
            actions=CHOICES,
            exports="logits",
            tiers=PPO_TIERS,
            extras=PPO_EXTRAS,
        ),
        AlgorithmSpec(
            name="ppo",
            stock="stable_baselines3:PPO",
            fast="fasttrain.algos.ppo:PPO",
            on_policy=True,
            actions=(*CHOICES, "Box"),
            exports="logits",
            tiers=PPO_TIERS,
            extras=PPO_EXTRAS,
        ),
        AlgorithmSpec(
            name="dqn",
            stock="stable_baselines3:DQN",
            fast="fasttrain.algos.dqn:DQN",
            off_policy=True,
            masks="may",
            actions=("Discrete", "MultiDiscrete"),
            stock_actions=("Discrete",),
            kernels="Q-network",
            greedy=True,
            exports="q_values",
            tiers=DQN_TIERS,
            extras=DQN_EXTRAS,
        ),
        AlgorithmSpec(
            name="recurrent_ppo",
            zoo="ppo_lstm",
            stock="sb3_contrib:RecurrentPPO",
            fast="fasttrain.algos.recurrent:RecurrentPPO",
            actions=(*CHOICES, "Box"),
            **RECURRENT,
        ),
        AlgorithmSpec(
            name="maskable_recurrent_ppo",
            stock="sb3_contrib:RecurrentPPO",
            fast="fasttrain.algos.recurrent:MaskableRecurrentPPO",
            ours_alone=True,
            masks="must",
            actions=CHOICES,
            **RECURRENT,
        ),
        AlgorithmSpec(
            name="a2c",
            stock="stable_baselines3:A2C",
            on_policy=True,
            actions=(*CHOICES, "Box"),
            exports="logits",
            tiers=every_tier(learning_rate=7e-4, rollout_size=40),
        ),
        AlgorithmSpec(
            name="trpo",
            stock="sb3_contrib:TRPO",
            on_policy=True,
            actions=(*CHOICES, "Box"),
            exports="logits",
            tiers=every_tier(batch_size=128, learning_rate=1e-3, rollout_size=16_384),
        ),
        AlgorithmSpec(
            name="qrdqn",
            stock="sb3_contrib:QRDQN",
            off_policy=True,
            actions=("Discrete",),
            greedy=True,
            tiers=every_tier(batch_size=32, learning_rate=5e-5),
        ),
        continuous(
            "sac",
            "stable_baselines3:SAC",
            3e-4,
            fast="fasttrain.algos.sac:SAC",
            kernels="soft actor-critic",
            lacks={
                "use_amp": "SAC computes in float32",
                "use_compile": "SAC is not compiled",
                "pin_memory": "SAC copies as stock does",
            },
        ),
        continuous("td3", "stable_baselines3:TD3", 1e-3, greedy=True),
        continuous("ddpg", "stable_baselines3:DDPG", 1e-3, greedy=True),
        continuous("tqc", "sb3_contrib:TQC", 3e-4),
        continuous("crossq", "sb3_contrib:CrossQ", 1e-3, policies=("MlpPolicy",)),
        AlgorithmSpec(
            name="ars",
            stock="fasttrain.algos.ars:ARS",  # sb3-contrib's class, in a form that callbacks can stop
            actions=("Box", "Discrete"),
            greedy=True,
            policies=("MlpPolicy", "LinearPolicy"),
            tiers=every_tier(learning_rate=0.02),
            flags={"num_envs": 1, "vec_env": "dummy"},
        ),
    )
}


def algorithms_with(capability: str) -> tuple[str, ...]:
    """Names of the algorithms for which this property of the spec is true."""
    return tuple(name for name, spec in ALGORITHMS.items() if getattr(spec, capability))


INSTEAD = {
    "env": "the environment is env.id=CartPole-v1, or env.entry_point=module:Class",
    "batch_size": "use batch_size=…",
    "learning_starts": "use warmup_steps=…, env steps before the first update",
    "gradient_steps": "use updates_per_step=…, updates after every algo.train_freq=… steps of all envs",
    "seed": "use seed=…",
    "device": "use device=…",
    "verbose": "use train_log_to_console=true or false",
    "tensorboard_log": "the log is progress.csv in the run's folder (train_log_to_file=true), which report.html plots",
    "stats_window_size": "mean returns are over the last 100 episodes; episodes.csv in the run's folder has all",
    "rollout_buffer_class": "the engine chooses the buffer: engine=stock uses SB3's, engine=fast its own",
    "rollout_buffer_kwargs": "the engine chooses the buffer: engine=stock uses SB3's, engine=fast its own",
    "replay_buffer_class": "use algo.prioritized=true or false, and engine=stock for SB3's own buffer",
    "replay_buffer_kwargs": "use algo.buffer_size=…, algo.prioritized=… and algo.n_steps=…",
    "optimize_memory_usage": "use a smaller algo.buffer_size=…, or in Python fasttrain.DQN with this argument",
    "_init_setup_model": "the model is always set up before training",
}


def argument_message(key: str) -> str:
    """The message about a constructor argument that is no key below `algo.`; empty for any other key."""
    group, _, name = key.partition(".")
    advice = INSTEAD.get(name.split(".")[0]) if group == "algo" else None
    return f"{key} is no setting here: {advice}" if advice else ""


# --- defaults of a game (`GameSpec.own`) and of an algorithm, for settings that the user does not set


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnValues:
    """The defaults of the game or the algorithm. None: the algorithm has no such setting."""

    total_timesteps: int = setting(100_000, "of a training", least=1)
    eval_episodes: int = setting(100, "of an evaluation", least=2)
    batch_size: int | None = setting(None, "minibatch of one gradient update", least=2)
    learning_rate: float | None = setting(None, "of the optimizer", least=0)
    n_epochs: int | None = setting(None, "passes over a rollout", least=1)
    rollout_size: int | None = setting(None, "transitions of a rollout, of all envs", least=2)
    num_envs: int | None = setting(None, "copies of a native game", least=1)


OWN_NAMES = tuple(one.name for one in fields(OwnValues))


def own_values(games: Mapping[str, Any], spec: AlgorithmSpec, tier: str) -> OwnValues:
    """The game's defaults in a tier, otherwise the algorithm's. Raises ConfigError if a value of the game is wrong."""
    of_algorithm = {name: value for name, value in spec.tiers[tier].items() if name in OWN_NAMES}
    own: OwnValues = convert({**of_algorithm, **games_own(games, spec.name, tier)}, OwnValues, "GameSpec.own")
    return own


def games_own(games: Mapping[str, Any], algo: str, tier: str) -> dict[str, Any]:
    """A game's defaults for an algorithm and a tier. A more specific entry wins.

    Raises ConfigError if a key is neither a value's name nor a tier nor an algorithm.
    """
    own = {}
    for words, value in sorted(((key.split("."), it) for key, it in flat(games).items()), key=lambda one: len(one[0])):
        if value in (None, {}):
            continue
        names, places = [word for word in words if word in OWN_NAMES], {*words} - {*OWN_NAMES}
        if len(names) != 1 or not places <= {*TIERS, *ALGORITHMS}:
            wrong = next(iter(places - {*TIERS, *ALGORITHMS}), words[-1])
            raise ConfigError(
                f"GameSpec.own has no {'.'.join(words)!r}{did_you_mean(wrong, (*OWN_NAMES, *TIERS, *ALGORITHMS))}; "
                f"it may have {', '.join(OWN_NAMES)}, also by tier or algorithm, "
                'as in GameSpec(env="my_game:MyEnv", own={"num_envs": {"speed": 16}}) (docs/guides/native_games.md)'
            )
        if places <= {algo, tier}:
            own[names[0]] = value
    return own
