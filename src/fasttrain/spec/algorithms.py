"""What anybody may ask of an algorithm: one entry each, and no other place that knows an algorithm by its name.

A new algorithm of Stable-Baselines3 or sb3-contrib is an entry here; its constructor arguments come from the table that
scripts/stock_arguments.py writes. Classes are dotted names, imported where a model is built. Of arguments that are no
keys below `algo.`, `INSTEAD` says which setting does it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from importlib import import_module
from importlib.resources import files
from typing import Any, Literal

from fasttrain.errors import ConfigError
from fasttrain.spec.setting import convert, did_you_mean, setting

TIERS = ("baseline", "balance", "speed", "debug")
PER_TRANSITION = -1  # updates of a round: as many as it brought transitions, as SB3 has it
# Constructor arguments that are no keys below `algo.`: flags and parts of the run have their place.
ELSEWHERE = frozenset(
    ("batch_size", "learning_starts", "gradient_steps", "seed", "verbose", "stats_window_size",
     "optimize_memory_usage", "_init_setup_model")
)  # fmt: skip
LSTM = {"lstm_hidden_size": (int, 256), "n_lstm_layers": (int, 1), "enable_critic_lstm": (bool, True),
        "shared_lstm": (bool, False)}  # fmt: skip
MEMORY = {**LSTM, "cell": (Literal["lstm", "gru"], "lstm"),
          "memory_inputs": (tuple[Literal["action", "reward"], ...], ())}  # fmt: skip
TEACHER = {"teacher": (str | None, None), "teacher_coef": (float | str, "linear_1")}
DQN_EXTRAS = {"loss": (Literal["huber", "mse"], "huber"), "double_q": (bool, False), "dueling": (bool, False),
              "prioritized": (bool, False), "per_alpha": (float, 0.6), "per_beta": (float, 0.4),
              "use_masking": (bool, True)}  # fmt: skip
# Least and most of constructor arguments, where more is known than their type.
SHARE, POSITIVE, NOT_NEGATIVE, BOUNDED = (0, 1), (1, None), (0, None), (0, 1_000_000)
RANGES: dict[str, tuple[float | None, float | None]] = {
    **dict.fromkeys(("gamma", "gae_lambda", "tau", "line_search_shrinking_factor", "per_beta", "exploration_fraction",
                     "exploration_initial_eps", "exploration_final_eps"), SHARE),
    **dict.fromkeys(("n_epochs", "lstm_hidden_size", "n_lstm_layers", "buffer_size", "n_steps", "policy_delay",
                     "target_update_interval", "cg_max_steps", "line_search_max_iter", "n_critic_updates",
                     "sub_sampling_factor"), POSITIVE),
    **dict.fromkeys(("per_alpha", "target_kl", "target_policy_noise", "target_noise_clip", "cg_damping", "rms_prop_eps",
                     "top_quantiles_to_drop_per_net"), NOT_NEGATIVE),
    **dict.fromkeys(("max_grad_norm", "ent_coef", "vf_coef"), BOUNDED),
    "rollout_size": (2, None),
    "sde_sample_freq": (-1, None),
    "learning_rate": (None, 1_000_000),
}  # fmt: skip
CHOICES = ("Discrete", "MultiDiscrete", "MultiBinary")


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmSpec:
    """One algorithm: what it learns from, which envs suit it, what it can do here."""

    name: str
    zoo: str = ""  # its name in rl_zoo3, where that is another
    stock: str  # module:Class
    fast: str | None = None  # ours, several times faster; None: the stock class is watched from outside
    ours_alone: bool = False  # what it does no stock class does; `stock` is the one whose arguments it takes
    on_policy: bool = False  # learns from rollouts of its own
    off_policy: bool = False  # learns from a replay buffer
    recurrent: bool = False  # its policy remembers
    masks: Literal["no", "may", "must"] = "no"  # may: ours alone
    actions: tuple[str, ...]  # names of Gymnasium's spaces
    stock_actions: tuple[str, ...] | None = None  # of the stock class, where ours knows more
    greedy: bool = False  # one quality: it acts the same greedily and sampled, by a policy that jumps with every update
    policies: tuple[str, ...] = ("MlpPolicy", "CnnPolicy", "MultiInputPolicy")
    exports: Literal["logits", "q_values", "no"] = "no"
    # Its own values by tier: batch_size, learning_rate, rollout_size, …; what it lacks has no such thing.
    tiers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    flags: Mapping[str, Any] = field(default_factory=dict)  # its own values of flags, unless they are typed
    extras: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)  # keys of ours: name → (type, default)
    lacks: Mapping[str, str] = field(default_factory=dict)  # flags that its fast class does not serve, and why
    kernels: str = "actor-critic"  # that compute `fused_update`: a key of `eligible.REPRODUCED`
    hidden: int = 64  # units of its widest layer, if none are given

    @property
    def has_fast(self) -> bool:
        """Whether fasttrain has a class of its own for it."""
        return self.fast is not None

    @property
    def rows_alone(self) -> bool:
        """Whether rows of its rollouts may be taken apart: they are no sequences."""
        return self.on_policy and not self.recurrent

    @property
    def minibatches(self) -> bool:
        """Whether it learns in minibatches of `batch_size`."""
        return "batch_size" in self.arguments()

    @property
    def stretches(self) -> bool:
        """Whether its exploration stretches over `total_timesteps`."""
        return "exploration_fraction" in self.arguments()

    def arguments(self) -> Mapping[str, tuple[str, Any]]:
        """Name → (kind, default) of all of the stock class's constructor arguments that have a simple type."""
        return {name: (kind, default) for name, (kind, default) in _table()[self.stock.partition(":")[2]].items()}

    def keys(self) -> dict[str, tuple[Any, Any]]:
        """Name → (type, default) of what can be typed below `algo.`, policy and networks apart."""
        found: dict[str, tuple[Any, Any]] = {}
        for name, (kind, default) in self.arguments().items():
            if name not in ELSEWHERE:
                found[name] = (HINTS[kind.rstrip("?")] | None if kind.endswith("?") else HINTS[kind], default)
        if self.off_policy:
            found["train_freq"] = (found["train_freq"][0], 1)  # DQN's own is 4: more envs stand for it here
        if self.on_policy:
            found["n_steps"] = (int | None, None)  # of each env; None: as rollout_size says
            found["rollout_size"] = (int, None)
        return found | dict(self.extras)

    def load(self, fast: bool) -> Any:
        """The class: ours if there is one and `fast`, else stock's."""
        module, _, name = (self.fast if self.fast and (fast or self.ours_alone) else self.stock).partition(":")
        return getattr(import_module(module), name)


HINTS: dict[str, Any] = {"schedule": float | str, "float": float, "int": int, "bool": bool, "str|float": float | str,
                         "frequency": int | tuple[int | str, ...]}  # fmt: skip


@cache
def _table() -> dict[str, dict[str, list[Any]]]:
    text = files("fasttrain.spec").joinpath("stock_arguments.json").read_text(encoding="utf-8")
    found: dict[str, dict[str, list[Any]]] = json.loads(text)
    return found


def every_tier(**values: object) -> Mapping[str, Mapping[str, Any]]:
    """The same own values in all tiers: no others have been measured. Rollouts of `debug` are short."""
    return {**dict.fromkeys(TIERS, values), "debug": in_short(values)}


def in_short(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Own values for a run of a few thousand steps, which shall see some updates."""
    return {name: min(value, 512) if name == "rollout_size" else value for name, value in values.items()}


# Larger minibatches make fewer, better estimated steps: the learning rate grows with the batch size. Smaller rollouts
# let the policy improve more often on the same number of env steps (docs/concepts/classes.md); stock: 8 envs × 2,048.
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
    "lacks": {"use_amp": "policies that remember compute in float32",
              "use_compile": "policies that remember are not compiled"},
}  # fmt: skip


def continuous(name: str, stock: str, learning_rate: float, greedy: bool = False, **more: Any) -> AlgorithmSpec:
    """An actor-critic that learns from a replay buffer, one update per transition as its paper has it."""
    return AlgorithmSpec(
        name=name,
        stock=stock,
        off_policy=True,
        actions=("Box",),
        greedy=greedy,
        tiers=every_tier(batch_size=256, learning_rate=learning_rate),
        flags={"updates_per_step": PER_TRANSITION, "warmup_steps": 100},
        extras={"action_noise": (str | None, None)},  # normal_0.1: Gaussian, of that deviation; ornstein-uhlenbeck_0.5
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
            extras=TEACHER,
        ),
        AlgorithmSpec(
            name="ppo",
            stock="stable_baselines3:PPO",
            fast="fasttrain.algos.ppo:PPO",
            on_policy=True,
            actions=(*CHOICES, "Box"),
            exports="logits",
            tiers=PPO_TIERS,
            extras=TEACHER,
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
            stock="fasttrain.algos.ars:ARS",  # stock's own loop takes no answers
            actions=("Box", "Discrete"),
            greedy=True,
            policies=("MlpPolicy", "LinearPolicy"),
            tiers=every_tier(learning_rate=0.02),
            flags={"num_envs": 1, "vec_env": "dummy"},
        ),
    )
}


def having(capability: str) -> tuple[str, ...]:
    """The names of all algorithms of which `capability`, a property of a spec, is true."""
    return tuple(name for name, spec in ALGORITHMS.items() if getattr(spec, capability))


INSTEAD = {
    "env": "the environment is env.id=CartPole-v1, or env.entry_point=module:Class",
    "batch_size": "use batch_size=…, a key of its own",
    "learning_starts": "use warmup_steps=…, env steps before the first update",
    "gradient_steps": "use updates_per_step=…, updates after every algo.train_freq=… steps of all envs",
    "seed": "use seed=…, a key of its own",
    "device": "use device=…, a key of its own",
    "verbose": "use train_log_to_console=true or false",
    "tensorboard_log": "the log is progress.csv in the run's folder (train_log_to_file=true), drawn in report.html",
    "stats_window_size": "mean returns are over the last 100 episodes; episodes.csv in the run's folder has every one",
    "rollout_buffer_class": "the engine chooses its buffer: engine=stock takes SB3's, engine=fast its own",
    "rollout_buffer_kwargs": "the engine chooses its buffer: engine=stock takes SB3's, engine=fast its own",
    "replay_buffer_class": "use algo.prioritized=true or false, and engine=stock for SB3's own buffer",
    "replay_buffer_kwargs": "use algo.buffer_size=…, algo.prioritized=… and algo.n_steps=…",
    "optimize_memory_usage": "use a smaller algo.buffer_size=…, or in Python fasttrain.DQN with it",
    "_init_setup_model": "the model is always set up before training",
}


def instead(key: str) -> str:
    """The sentence that refuses `algo.batch_size` (or what is below such a key); empty for every other key."""
    group, _, name = key.partition(".")
    told = INSTEAD.get(name.split(".")[0]) if group == "algo" else None
    return f"{key} is no setting here: {told}" if told else ""


# --- own values: of a game (`GameSpec.own`) and of an algorithm, which hold where nobody chose others


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnValues:
    """What the game (`GameSpec.own`), else the algorithm names as its own values in `tier`.

    None where the algorithm has no minibatches, epochs or rollouts.
    """

    total_timesteps: int = setting(100_000, "of a training", least=1)
    eval_episodes: int = setting(100, "of an evaluation", least=2)
    batch_size: int | None = setting(None, "minibatch of one gradient update", least=2)
    learning_rate: float | None = setting(None, "of the optimizer", least=0)
    n_epochs: int | None = setting(None, "passes over a rollout", least=1)
    rollout_size: int | None = setting(None, "transitions of a rollout, of all envs", least=2)
    num_envs: int | None = setting(None, "copies of a native game", least=1)


OWN_NAMES = tuple(one.name for one in fields(OwnValues))


def own_values(games: Mapping[str, Any], spec: AlgorithmSpec, tier: str) -> OwnValues:
    """The game's own values in a tier, else the algorithm's. Raises ConfigError: the game's are no such values."""
    of_algorithm = {name: value for name, value in spec.tiers[tier].items() if name in OWN_NAMES}
    found: OwnValues = convert({**of_algorithm, **games_own(games, spec.name, tier)}, OwnValues, "GameSpec.own")
    return found


def games_own(games: Mapping[str, Any], algo: str, tier: str) -> dict[str, Any]:
    """Of a game's own values those of an algorithm in a tier; what is said of both or one of them goes before the rest.
    Raises ConfigError: a word in it is no value, no tier and no algorithm."""
    found = {}
    for words, value in sorted(_branches(games), key=lambda branch: len(branch[0])):
        names, places = [word for word in words if word in OWN_NAMES], {*words} - {*OWN_NAMES}
        if len(names) != 1 or not places <= {*TIERS, *ALGORITHMS}:
            wrong = next(iter(places - {*TIERS, *ALGORITHMS}), words[-1])
            raise ConfigError(
                f"GameSpec.own has no {'.'.join(words)!r}{did_you_mean(wrong, (*OWN_NAMES, *TIERS, *ALGORITHMS))}; "
                f"there are {', '.join(OWN_NAMES)}, each for a tier or an algorithm alone too, "
                'as in GameSpec(env="my_game:MyEnv", own={"num_envs": {"speed": 16}}) (docs/guides/native_games.md)'
            )
        if places <= {algo, tier}:
            found[names[0]] = value
    return found


def _branches(values: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The words that lead to each value, and the value."""
    for word, value in values.items():
        if isinstance(value, Mapping):
            yield from _branches(value, (*above, str(word)))
        elif value is not None:
            yield (*above, str(word)), value
