"""The envs of one worker process: they step, and write observations, masks, infos and failures for the trainer."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import gymnasium
import numpy as np

from fasttrain.batch import Int64Array, each_array, select_rows
from fasttrain.envs.answers import MOST_REWARD, as_ends, as_reward, check_reset, check_step, last_observation
from fasttrain.envs.masks import (
    KEY,
    MASKABLE_SPACES,
    FlatMasks,
    find_mask_convention,
    mask_entry,
    mask_method,
    mask_width,
)
from fasttrain.envs.tasks import task_options_of
from fasttrain.envs.user_code import blame, needs_package
from fasttrain.errors import EnvError, EnvSpecError, ReplaceEnv
from fasttrain.spec.infos import enemy_turn_ms
from fasttrain_vec.replacing import built_anew
from fasttrain_vec.worker_memory import ABSENT, BOOL, FLOAT, INT, NO_ROW, Arrays, ForkGuard

Env = gymnasium.Env[Any, Any]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of one worker, sent to it by pickle."""

    worker: int
    first: int  # index of its first env
    factories: bytes  # cloudpickle of the list of its env functions
    info_keys: tuple[str, ...] | None  # info entries to send at every step; None: all
    use_masks: bool
    check_finite: bool
    restart_envs: bool  # rebuild an env that fails; False: report the failure
    spin_s: float  # how long to spin for the next request before sleeping


class Failure(NamedTuple):
    """An error in one env, as text, so that it can be sent to the trainer."""

    env_index: int
    text: str  # "RuntimeError: the board fell (bad.py:17, in step)"
    traceback: str
    seed: int | None = None  # seed of the env's last seeded reset
    action: str = ""
    step: int = 0  # steps of this env, over all episodes
    is_spec_error: bool = False  # an EnvSpecError: the user's input is wrong
    missing: bool = False  # a call raised AttributeError, which SB3's `has_attr` relies on
    asked: bool = False  # the env raised ReplaceEnv


class NeedsRestartError(Exception):
    """The worker cannot go on without help of the trainer."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.text)
        self.failure = failure


class BadDataError(EnvError):
    """An env returned wrong data, which must not reach a buffer."""


class Packed(NamedTuple):
    """A pickled info, to be sent to the trainer."""

    info: bytes = b""
    unsent: tuple[str, ...] = ()  # keys whose values cannot be pickled


class Record(NamedTuple):
    """What one env sends after a step, in addition to the arrays."""

    env_index: int
    info: bytes = b""  # pickled: at an episode's end the whole info, else entries in `info_keys` that are no numbers
    reset_info: bytes = b""  # pickled: the info of the reset after an episode's end
    failure: Failure | None = None  # the error because of which the env was rebuilt
    unsent: tuple[str, ...] = ()  # info keys whose values cannot be pickled


def failure_of(error: BaseException, env_index: int) -> Failure:
    text = str(error) if isinstance(error, EnvError) else blame(error)
    lines = "".join(traceback.format_exception(error))
    wrong, asked = isinstance(error, EnvSpecError) or needs_package(error), isinstance(error, ReplaceEnv)
    return Failure(env_index, text, lines, is_spec_error=wrong, asked=asked)


class MaskReader:
    """Reads action masks from a method, infos or observations. It leaves observations and infos as they are."""

    def __init__(self, env: Env, use_masks: bool) -> None:
        space = env.action_space
        self.convention = find_mask_convention(env) if use_masks and isinstance(space, MASKABLE_SPACES) else None
        self.width = mask_width(space) if self.convention else 0
        # Whether the search for masks had to reset the env, see `find_mask_convention`.
        self.used_env = use_masks and isinstance(space, MASKABLE_SPACES) and self.convention in (None, "info")
        self._kind = (env.observation_space, space)
        self._flat = FlatMasks(self.width)

    def suits(self, env: Env) -> bool:
        """Whether `env` has the same spaces as the first env, and the mask method if the first env has one."""
        same: bool = (env.observation_space, env.action_space) == self._kind
        return same and (self.convention != "method" or self.method_of(env) is not None)

    def method_of(self, env: Env) -> Callable[[], Any] | None:
        """The env's mask method, if masks come from methods.

        Look it up once per env: the search through the wrappers takes longer than most masks.
        """
        return mask_method(env) if self.convention == "method" else None

    def read(self, method: Callable[[], Any] | None, observation: Any, info: Mapping[str, Any]) -> Any:
        """The mask (A,) of the present state. Raises EnvError if there is no mask, or it does not fit the space."""
        if method is not None:
            mask = method()
        else:
            mask = mask_entry(info if self.convention == "info" else observation)
            if mask is None:
                raise BadDataError(f"no action mask in {self.convention}[{KEY!r}]; every reset and step must give one")
        if type(mask) is np.ndarray and mask.dtype == np.bool_ and mask.shape == (self.width,):
            return mask
        return self._flat(mask)


class EnvRows:
    """The envs of one worker, and their rows in the shared arrays."""

    def __init__(
        self,
        settings: Settings,
        factories: Sequence[Callable[[], Env]],
        envs: list[Env],
        masks: MaskReader,
        arrays: Arrays,
        current: Int64Array,
        guard: ForkGuard | None = None,
    ) -> None:
        self.settings, self.factories, self.envs, self.masks, self.arrays = settings, factories, envs, masks, arrays
        self.current = current  # (1,) row of the env that steps or resets now; the trainer reads it after a hang
        self.opponents_ns = 0
        self._guard = guard or ForkGuard()  # checked whenever an env returns, before anything is written
        count = len(envs)
        self._mask_methods = [masks.method_of(env) for env in envs]
        for row, env in enumerate(envs):
            self._show_task(row, env)
        self._seeds: list[int | None] = [None] * count
        self._steps = [0] * count
        self._records: list[Record] = []
        self._asked: list[Record] = []  # envs that asked to be replaced in a reset; sent with this or the next step
        self._copies_actions = arrays.actions.ndim > 1
        self._shapes = each_array(lambda part: part.shape[1:], arrays.final_observations)

    def reset(self, seeds: Sequence[int | None], options: Sequence[dict[str, Any]], buffer: int) -> list[Packed]:
        """Reset every env as SB3's DummyVecEnv does. Returns the reset infos."""
        arrays = self.arrays
        arrays.rewards[:] = 0.0
        arrays.terminations[:] = arrays.truncations[:] = arrays.lost[:] = False
        arrays.info_kinds[:] = ABSENT
        self._into = arrays.observations[buffer]
        infos = []
        for row, env in enumerate(self.envs):
            self.current[0] = row
            if seeds[row] is not None:
                self._seeds[row] = seeds[row]
            try:
                extra = {"options": options[row]} if options[row] else {}
                try:
                    info = self._store_reset(row, env.reset(seed=seeds[row], **extra))
                except ReplaceEnv as asked:
                    info = self._store_reset(row, self._built_anew(row, asked, **extra))
            except BaseException as error:
                raise NeedsRestartError(self._failure(row, "", error)) from error
            infos.append(_pack_info(info))
        self.current[0] = NO_ROW
        for row, reason in self._bad_rows():
            raise NeedsRestartError(self._failure(row, "", BadDataError(reason)))
        return infos

    def _show_task(self, row: int, env: Env) -> None:
        """With a curriculum: let the env read the number of its next task from the shared memory."""
        if (tasks := task_options_of(env)) is not None:
            tasks.choice = self.arrays.tasks[row : row + 1]

    def step(self, buffer: int) -> list[Record]:
        """Step every env with its action in the arrays, and write its row. `buffer`: the observation array to write.

        Raises NeedsRestartError if an env failed, and it cannot or must not be rebuilt here.
        """
        arrays, actions = self.arrays, self.arrays.actions
        self._into, self._before = arrays.observations[buffer], arrays.observations[1 - buffer]
        self._records = []
        arrays.lost[:] = False
        if arrays.info_kinds.size:
            arrays.info_kinds[:] = ABSENT
        for row, env in enumerate(self.envs):
            action = actions[row].copy() if self._copies_actions else actions[row]
            self.current[0] = row
            self._steps[row] += 1  # a step that fails counts too
            try:
                self._store_step(row, env, env.step(action))
            except BaseException as error:
                self._handle_failure(row, action, error)
        self.current[0] = NO_ROW
        bad_rows = self._bad_rows()
        for row, reason in bad_rows:
            self._handle_failure(row, actions[row], BadDataError(reason))
        for row, _ in self._bad_rows() if bad_rows else ():  # the rebuilt env returned bad data too
            raise NeedsRestartError(self._failure(row, actions[row], BadDataError("bad data right after a rebuild")))
        asked, self._asked = self._asked, []
        return asked + self._records  # in this order: only the last record of an env has its infos

    def _store_step(self, row: int, env: Env, answer: Any) -> None:
        if self._guard.forked:  # this check takes 20 ns
            self._guard.check()
        if type(answer) is not tuple or len(answer) != 5 or type(answer[4]) is not dict:
            check_step(answer)  # makes the same check in 400 ns, the line above in 60 ns
        observation, reward, terminated, truncated, info = answer
        arrays = self.arrays
        if type(reward) is not float or not -MOST_REWARD <= reward <= MOST_REWARD:
            reward = as_reward(reward)
        arrays.rewards[row] = reward
        try:
            arrays.terminations[row], arrays.truncations[row] = terminated, truncated
        except ValueError:  # one is an array
            arrays.terminations[row], arrays.truncations[row] = as_ends(terminated, truncated)
        if "perf" in info:
            self.opponents_ns += int(1e6 * enemy_turn_ms(info))
        if terminated or truncated:
            self._end_episode(row, env, observation, info)
            return
        self._write_observation(row, self._into, observation)
        if self.masks.width:
            arrays.action_masks[row] = self.masks.read(self._mask_methods[row], observation, info)  # type: ignore[index]
        keys = self.settings.info_keys
        if keys is None:
            if info:
                self._add_record(row, info)
        elif keys:
            self._send_entries(row, info, keys)

    def _end_episode(self, row: int, env: Env, observation: object, info: dict[str, Any]) -> None:
        """Reset the env in the same step, as SB3 does. The last observation goes to `final_observations`."""
        terminated = bool(self.arrays.terminations[row])
        observation = last_observation(env.observation_space, observation, terminated, self.settings.check_finite)
        self._write_observation(row, self.arrays.final_observations, observation)
        last, unsent = _pack_info(info)  # before the reset, because that may change lists inside the info
        first, unsent_too = self._pack_reset_info(self._store_reset(row, env.reset()))
        if last or first or unsent or unsent_too:
            self._records.append(Record(self.settings.first + row, last, first, None, (*unsent, *unsent_too)))

    def _store_reset(self, row: int, answer: Any) -> Mapping[str, Any]:
        """Write the observation and the mask of a reset. Returns its info."""
        self._guard.check()
        info = check_reset(answer)
        observation = answer[0]
        self._write_observation(row, self._into, observation)
        if self.masks.width:
            self.arrays.action_masks[row] = self.masks.read(self._mask_methods[row], observation, info)  # type: ignore[index]
        return info

    def _pack_reset_info(self, info: Mapping[str, Any]) -> Packed:
        keys = self.settings.info_keys
        return _pack_info(info if keys is None else {key: info[key] for key in keys if key in info})

    def _write_observation(self, row: int, into: Any, observation: Any) -> None:
        """Write one observation. Its shape is checked: NumPy would broadcast a wrong shape such as (1,)."""
        try:
            if isinstance(into, dict):
                for key, part in into.items():
                    _assign(part, row, observation[key], self._shapes[key], f" {key!r}")
            else:
                _assign(into, row, observation, self._shapes, "")
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            text = f"the observation, {observation!s:.80}, does not fit its space: {blame(error)}"
            raise BadDataError(text) from error

    def _send_entries(self, row: int, info: dict[str, Any], keys: tuple[str, ...]) -> None:
        """Send these info entries: numbers in the arrays, other values in a record."""
        others = {}
        for column, key in enumerate(keys):
            if key in info:
                value = info[key]
                kind = _kind_of(value)
                if kind:
                    self.arrays.info_values[row, column] = value
                    self.arrays.info_kinds[row, column] = kind
                else:
                    others[key] = value
        if others:
            self._add_record(row, others)

    def _add_record(self, row: int, info: dict[str, Any]) -> None:
        packed, unsent = _pack_info(info)
        self._records.append(Record(self.settings.first + row, packed, unsent=unsent))

    def _bad_rows(self) -> list[tuple[int, str]]:
        """Rows with NaN or infinity, and the reason as text."""
        bad: dict[int, str] = {}
        if self.settings.check_finite:
            parts = self._into.items() if isinstance(self._into, dict) else [("", self._into)]
            for key, part in parts:
                if part.dtype.kind == "f" and np.count_nonzero(np.isfinite(part)) < part.size:  # faster than all()
                    finite = np.isfinite(part).reshape(len(part), -1).all(axis=1)
                    name = f"the observation{f' {key!r}' if key else ''} is not finite (NaN or infinite)"
                    bad |= dict.fromkeys(np.flatnonzero(~finite).tolist(), name)
            if np.count_nonzero(np.isfinite(self.arrays.rewards)) < len(self.envs):
                rows = np.flatnonzero(~np.isfinite(self.arrays.rewards)).tolist()
                bad |= dict.fromkeys(rows, "the reward is not finite (NaN or infinite)")
        return sorted(bad.items())

    def _handle_failure(self, row: int, action: object, error: BaseException) -> None:
        failure = self._failure(row, action, error)
        if not self.settings.restart_envs and not failure.asked:
            raise NeedsRestartError(failure) from error
        try:
            self._rebuild(row, failure)
        except BaseException as again:
            raise NeedsRestartError(self._failure(row, action, again)) from again

    def _rebuild(self, row: int, failure: Failure) -> None:
        """Replace an env that failed. Its episode ends as truncated in the state before this step."""
        arrays = self.arrays
        self._records = [record for record in self._records if record.env_index != failure.env_index]
        arrays.rewards[row], arrays.terminations[row], arrays.truncations[row] = 0.0, False, True
        arrays.lost[row] = True
        arrays.info_kinds[row] = ABSENT
        place = slice(row, row + 1)
        each_array(np.copyto, select_rows(arrays.final_observations, place), select_rows(self._before, place))
        first, unsent = self._pack_reset_info(self._store_reset(row, self._built_anew(row)))
        self._records.append(Record(failure.env_index, b"", first, failure, unsent))

    def _built_anew(self, row: int, asked: ReplaceEnv | None = None, **options: Any) -> Any:
        """Close and build an env, and reset it. Returns the answer of the reset. `asked`: why, if not after a step."""

        def build() -> Env:
            self._show_task(row, env := self.factories[row]())
            return env

        def note(error: ReplaceEnv) -> None:
            self._asked.append(Record(self.settings.first + row, failure=self._failure(row, "", error)))

        if asked is not None:
            note(asked)
        self.envs[row], self._seeds[row], answer = built_anew(self.envs[row], build, self._seeds[row], note, **options)
        self._mask_methods[row] = self.masks.method_of(self.envs[row])
        return answer

    def _failure(self, row: int, action: object, error: BaseException) -> Failure:
        self._guard.check(error)
        failure = failure_of(error, self.settings.first + row)
        return failure._replace(seed=self._seeds[row], action=str(action), step=self._steps[row])


def _assign(into: Any, row: int, value: Any, shape: tuple[int, ...], name: str) -> None:
    value_shape = value.shape if type(value) is np.ndarray else np.shape(value)
    if value_shape != shape:
        raise BadDataError(f"the observation{name} has shape {value_shape}, its space says {shape}")
    into[row] = value


def _kind_of(value: object) -> int:
    """The kind of a number in `info_kinds`; ABSENT for any other value.

    NumPy's numbers count as other values: they would not keep their type.
    """
    if type(value) is bool:
        return BOOL
    if type(value) is float:
        return FLOAT
    return INT if type(value) is int and abs(value) < 2**53 else ABSENT


def _pack_info(info: Mapping[str, Any]) -> Packed:
    """Pickle an info without the entries that cannot be pickled."""
    if not info:
        return Packed()
    try:
        return Packed(pickle.dumps(info, protocol=pickle.HIGHEST_PROTOCOL))
    except Exception:
        good = {key: value for key, value in info.items() if _can_be_pickled(value)}
        return Packed(pickle.dumps(good), tuple(str(key) for key in info if key not in good))


def _can_be_pickled(value: object) -> bool:
    try:
        pickle.dumps(value)
    except Exception:
        return False
    return True
