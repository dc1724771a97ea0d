"""Base classes of native games, around their compiled functions ("kernels"): slots, seeds, steps and state.

`GameBatch` is N games that are stepped together. `SingleGame` is one game as a Gymnasium environment, with the same
kernels.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import DTypeLike, NDArray

from fasttrain.batch import BoolArray, Float32Array, Float64Array, Int64Array, Record, Slots, load_into
from fasttrain.errors import ConfigError, EnvError, EnvSpecError
from fasttrain_kernels.jit import njit
from fasttrain_kernels.kernel_cache import KernelCall
from fasttrain_kernels.threads import ThreadChoice

GAMES_PER_THREAD = 64  # a step of fewer games takes less time than waking a second thread
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
MIX_2 = np.uint64(0x94D049BB133111EB)
U11, U27, U30, U31, U32 = (np.uint64(bits) for bits in (11, 27, 30, 31, 32))


class GameBatch(ABC):
    """N games of one kind. It implements `TwoSidedGame` and `ResumableGame`, except for the rules of the game.

    Args:
        title: name of the game, for messages.
        records: (N,) one record per game, changed in place. One field is the state of the game's random generator;
            `_seed` sets it.
        mix: (N, …) cumulative weights of the opponents, for the game's kernels.
        width: number of entries of an observation, float32 in -1..1.
        mask_width: number of entries of an action mask.

    Attributes:
        max_threads: 1 by default. It may be set to the number of cores; results do not change.
    """

    def __init__(
        self,
        title: str,
        records: NDArray[Any],
        mix: Float64Array,
        action_space: spaces.Discrete | spaces.MultiDiscrete,
        width: int,
        mask_width: int,
    ) -> None:
        num_envs = len(records)
        self.num_envs = num_envs
        self.observation_space = spaces.Box(-1.0, 1.0, (width,), np.float32)
        self.action_space = action_space
        self.mask_width = mask_width
        self.final_observations: Float32Array = np.zeros((num_envs, width), np.float32)
        self.opponents_turn: BoolArray = np.zeros(num_envs, np.bool_)  # (N,) True where the opponent must act
        self.opponents_ns = 0
        self.max_threads = 1
        self._title = title
        self.records = records  # the present state: writing into it changes the games
        self._mix = mix
        self._seeded: BoolArray = np.zeros(num_envs, np.bool_)
        self._all_games: Int64Array = np.arange(num_envs, dtype=np.int64)
        self._marks: BoolArray = np.zeros(num_envs, np.bool_)
        self._thread_choices = {False: ThreadChoice(trial=8), True: ThreadChoice(trial=8)}  # key True: for step_listed
        self._slots: Slots | None = None
        self._observations: Float32Array = np.zeros((0, width), np.float32)
        self._masks: BoolArray = np.zeros((0, mask_width), np.bool_)

    def bind(self, slots: Slots) -> None:
        """Use the arrays of `slots`. The game reads `slots.actions` and writes all other arrays.

        Raises EnvSpecError: an array has the wrong shape or dtype.
        """
        n = self.num_envs
        expected: dict[str, tuple[tuple[int, ...], DTypeLike]] = {
            "observations": (self.final_observations.shape, np.float32),
            "action_masks": ((n, self.mask_width), np.bool_),
            "rewards": ((n,), np.float32),
            "terminations": ((n,), np.bool_),
            "truncations": ((n,), np.bool_),
        }
        for name, (shape, dtype) in expected.items():
            array = getattr(slots, name)
            if not isinstance(array, np.ndarray) or array.shape != shape or array.dtype != dtype:
                raise EnvSpecError(f"{self._title} needs slots.{name} as an array {shape} of {np.dtype(dtype)}")
        shape = (n, *(self.action_space.shape or ()))
        if slots.actions.shape != shape or not np.issubdtype(slots.actions.dtype, np.integer):
            raise EnvSpecError(f"{self._title} needs slots.actions as an array {shape} of integers")
        self._slots = slots
        self._observations, self._masks = slots.observations, slots.action_masks  # type: ignore[assignment]

    def reset(self, indices: NDArray[np.int64], seeds: Sequence[int | None]) -> None:
        """Start a new game in each listed env and write its first observation and mask.

        A game depends only on its seed, neither on its index nor on the number of envs. An env whose seed is None
        continues its random generator. An env that has no generator yet gets a random seed.
        """
        self._bound()
        listed = np.asarray(indices, np.int64)
        pairs = zip(listed.tolist(), seeds, strict=True)
        to_seed = [(index, seed) for index, seed in pairs if seed is not None or not self._seeded[index]]
        values = [secrets.randbits(64) if seed is None else int(seed) & 0xFFFF_FFFF_FFFF_FFFF for _, seed in to_seed]
        envs = np.array([index for index, _ in to_seed], np.int64)
        self._seed(envs, np.array(values, np.uint64))
        self._seeded[envs] = True
        self._restart(listed)

    def set_options(self, options: Mapping[str, Any], indices: Int64Array) -> None:
        """Set the options of the next games of these envs, as in Gymnasium's reset. {}: play as configured.

        Raises EnvSpecError: the game does not know an option or its value.
        """
        if options:
            raise EnvSpecError(f"{self._title} takes no reset options, got {dict(options)}")

    def step(self) -> None:
        """Apply `slots.actions`, let opponents act until the learner must act again, and write all slots.

        With opponents "self" a step also ends if they must act. Rewards are those of the learner since the last
        decision. Games that end write the learner's last observation to `final_observations` and start again in the
        same step. `slots.finished` is not changed.

        Raises:
            EnvError: an action is illegal; the message names env, action and legal actions. No action was applied.
        """
        self._step(self._all_games, self._thread_choices[False])

    def step_listed(self, indices: Sequence[int] | Int64Array) -> None:
        """`step` for these games only, with their rows of `slots.actions`. Only rows of these games are written.

        Raises EnvError: as in `step`; or an index is out of range or occurs twice.
        """
        listed = np.ascontiguousarray(indices, np.int64)
        if not occur_once(listed, self._marks):
            last = self.num_envs - 1
            raise EnvError(f"{self._title}: step_listed takes games 0 to {last}, each once, not {listed.tolist()}")
        if len(listed):
            self._step(listed, self._thread_choices[True])

    def state_arrays(self) -> dict[str, NDArray[Any]]:
        """The state of all games, as arrays that a checkpoint saves; see `ResumableGame`."""
        games = {"games": self.records, "seeded": self._seeded, "opponents_turn": self.opponents_turn, "mix": self._mix}
        return games | {"final_observations": self.final_observations}

    def load_state_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Load the state of all games. The values are checked, because kernels use them as indices without a check."""
        games = arrays.get("games")
        if games is not None and games.dtype != self.records.dtype and games.dtype.names is not None:
            games = self._with_new_fields(games)
            arrays = {**arrays, "games": games}
        if games is not None and games.dtype == self.records.dtype and (error := self._impossible(games)):
            raise ConfigError(f"the checkpoint's games of {self._title} are impossible: {error}")
        for name, array in self.state_arrays().items():
            load_into(array, arrays, name)

    def _with_new_fields(self, games: NDArray[Any]) -> NDArray[Any]:
        """`games` of an older version, in the present dtype. Fields that they lack are those of `self.records`."""
        records: NDArray[Any] = self.records.copy()
        names = games.dtype.names or ()
        own = records.dtype.names or ()
        if games.shape != records.shape or any(
            name not in own or games.dtype[name] != records.dtype[name] for name in names
        ):
            return games  # these are of another game; `load_into` refuses them
        for name in names:
            records[name] = games[name]
        return records

    @abstractmethod
    def kernel_calls(self) -> list[KernelCall]:
        """The kernels that `reset` and `step` call, to compile them before training. Slow kernels come first."""

    @abstractmethod
    def episode_info(self, index: int) -> dict[str, Any]:
        """The info at the end of an episode of env `index`. Called right after the episode's last step."""

    def _bound(self) -> Slots:
        if self._slots is None:
            raise EnvError(f"{self._title}: bind(slots) must come before reset() and step()")
        return self._slots

    def _parts(self, listed: Int64Array) -> int:
        """The number of parts into which these games are split, one per thread."""
        return min(self.max_threads, len(listed) // GAMES_PER_THREAD)

    @abstractmethod
    def _seed(self, indices: Int64Array, seeds: NDArray[np.uint64]) -> None:
        """Seed the random generator of each listed game."""

    @abstractmethod
    def _restart(self, indices: Int64Array) -> None:
        """Start a game in each listed env and write its slots."""

    @abstractmethod
    def _step(self, indices: Int64Array, choice: ThreadChoice) -> None:
        """Step the listed games. `choice` decides whether to use threads."""

    @abstractmethod
    def _impossible(self, games: NDArray[Any]) -> str:
        """Text about a value in these records that no game can have; empty if there is none."""


@njit
def occur_once(indices: Int64Array, marks: BoolArray) -> bool:
    """Whether all `indices` are in range and differ. `marks`: (N,) scratch, all False before and after the call."""
    valid = True
    for index in indices:
        if index < 0 or index >= len(marks) or marks[index]:
            valid = False
            break
        marks[index] = True
    for index in indices:
        if 0 <= index < len(marks):
            marks[index] = False
    return valid


Action = TypeVar("Action")
Game = TypeVar("Game", bound=GameBatch)
_FIRST = np.zeros(1, np.int64)
_FIRST.flags.writeable = False


class SingleGame(gymnasium.Env[Float32Array, Action], Generic[Action, Game]):
    """One native game as a Gymnasium environment.

    As in `GameBatch`, the next game begins when a game ends. `reset()` without a seed after an episode's end returns
    this next game. Any other `reset()` begins a new game.

    Args:
        on_illegal: what to do with an action that the mask forbids. "replace": take a legal action, and count this
            in `info["illegal_actions"]`, because env checkers and algorithms without masks sample from the whole action
            space. "raise": raise EnvError, as the batch does.

    Raises:
        ConfigError: `on_illegal` has a different value.
    """

    def __init__(self, game: Game, on_illegal: str) -> None:
        if on_illegal not in ("replace", "raise"):
            raise ConfigError(f"on_illegal={on_illegal!r}: choose 'replace' or 'raise'")
        self._replace_illegal = on_illegal == "replace"
        self._game = game
        self.observation_space = game.observation_space
        self.action_space = game.action_space  # type: ignore[assignment]
        self._masks: BoolArray = np.zeros((1, game.mask_width), np.bool_)
        self._observations: Float32Array = np.zeros(game.final_observations.shape, np.float32)
        self._slots = Slots(
            observations=self._observations,
            actions=np.zeros((1, *(game.action_space.shape or ())), np.int64),
            rewards=np.zeros(1, np.float32),
            terminations=np.zeros(1, np.bool_),
            truncations=np.zeros(1, np.bool_),
            action_masks=self._masks,
        )
        game.bind(self._slots)
        self._next_game_begun = False
        self._has_options = False
        self._illegal_actions = 0

    @property
    def opponents_ns(self) -> int:
        """Time of the opponents' turns since construction, in ns."""
        return self._game.opponents_ns

    @property
    def opponents_turn(self) -> bool:
        """Whether the opponent must act (with opponents "self")."""
        return bool(self._game.opponents_turn[0]) and not self._next_game_begun

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Float32Array, dict[str, Any]]:
        """Start a game with these options (see `GameBatch.set_options`). The info is empty."""
        super().reset(seed=seed)
        changed = bool(options) or self._has_options
        if changed:
            self._game.set_options(options or {}, _FIRST)
            self._has_options = bool(options)
        if changed or seed is not None or not self._next_game_begun:
            self._game.reset(_FIRST, [seed])
        self._next_game_begun = False
        self._illegal_actions = 0
        return self._observation(), {}

    def action_masks(self) -> BoolArray:
        """(A,) bool, True = legal: the mask of the next action, one sub-action after another."""
        mask: BoolArray = self._masks[0].copy()
        return mask

    def get_state(self) -> dict[str, Any]:
        """The state of the game as plain values and arrays, for `set_state`."""
        counts = {"begun": self._next_game_begun, "illegal_actions": self._illegal_actions}
        return {**counts, **bytes_of(self._arrays())}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore a state. Raises ConfigError, ValueError: no game can have this state."""
        arrays = load_bytes(self._arrays(), state)
        self._game.load_state_arrays(arrays)
        self._observations[:], self._masks[:] = arrays["observations"], arrays["masks"]
        self._next_game_begun, self._illegal_actions = bool(state["begun"]), int(state["illegal_actions"])

    def _arrays(self) -> dict[str, NDArray[Any]]:
        return {**self._game.state_arrays(), "observations": self._observations, "masks": self._masks}

    def _observation(self) -> Float32Array:
        observation: Float32Array = self._observations[0].copy()
        return observation

    def _stepped(self) -> tuple[Float32Array, float, bool, bool, dict[str, Any]]:
        """The result of `step`, after the batch has stepped."""
        info: dict[str, Any] = {}
        if self._illegal_actions:
            info["illegal_actions"] = self._illegal_actions
        reward = float(self._slots.rewards[0])
        self._next_game_begun = bool(self._slots.terminations[0])
        if not self._next_game_begun:
            return self._observation(), reward, False, False, info
        info.update(self._game.episode_info(0))
        return self._game.final_observations[0].copy(), reward, True, False, info


def bytes_of(arrays: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    """Copies of arrays, also structured ones, as uint8 arrays, which a game's `get_state` may return."""
    return {name: np.frombuffer(array.tobytes(), np.uint8) for name, array in arrays.items()}


def load_bytes(like: Mapping[str, NDArray[Any]], state: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """Undo `bytes_of`: arrays with the shapes and dtypes of `like`. Raises ValueError: wrong number of bytes."""
    arrays = {}
    for name, array in like.items():
        stored = np.asarray(state[name], np.uint8)
        if stored.size != array.nbytes:
            raise ValueError(f"{name} has {stored.size} bytes, not {array.nbytes}")
        arrays[name] = stored.view(array.dtype).reshape(array.shape)
    return arrays


# --- a game's own random generator, splitmix64, in the field `rng` of its record


@njit
def random_bits(game: Record) -> Any:
    """The next 64 random bits of the game."""
    game.rng = game.rng + GOLDEN
    bits = game.rng
    bits = (bits ^ (bits >> U30)) * MIX_1
    bits = (bits ^ (bits >> U27)) * MIX_2
    return bits ^ (bits >> U31)


@njit
def random_below(game: Record, bound: int) -> Any:
    """Uniform int64 in 0..bound-1 (bound < 2^16; the error of a probability is at most 2^-16 / bound)."""
    return np.int64(((random_bits(game) >> U32) * np.uint64(bound)) >> U32)


@njit
def random_unit(game: Record) -> Any:
    """Uniform float64 in [0, 1)."""
    return np.float64(random_bits(game) >> U11) * (1.0 / 9007199254740992.0)


@njit
def seed_stream(game: Record, seed: int) -> None:
    """Seed the game's generator with a uint64. One step of splitmix64 makes neighbouring seeds unlike."""
    game.rng = seed
    game.rng = random_bits(game)
