"""ARS (Mania, Guy & Recht 2018, arXiv:1803.07055). The results are sb3-contrib's; callbacks can stop the training.

sb3-contrib's own loop ignores what callbacks return, gives callbacks no `locals`, and draws candidates before
`on_rollout_start`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import sb3_contrib
import torch
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.evaluation import evaluate_policy
from torch import Tensor
from torch.nn.utils import parameters_to_vector

from fasttrain.errors import ConfigError


class _EndedError(Exception):
    """A callback asked to stop."""


class ARS(sb3_contrib.ARS):
    """sb3-contrib's ARS for one env. Each update begins with the weights that the policy has.

    Raises:
        ConfigError: there are several envs.
    """

    weights: Any

    def _setup_model(self) -> None:
        if self.n_envs != 1:
            raise ConfigError(f"num_envs={self.n_envs}: ARS plays one candidate after the other; use num_envs=1")
        super()._setup_model()

    def learn(  # type: ignore[override] # arguments as in sb3_contrib.ARS
        self,
        total_timesteps: int,
        callback: Any = None,
        log_interval: int | None = 1,
        tb_log_name: str = "ARS",
        reset_num_timesteps: bool = True,
        async_eval: Any = None,
        progress_bar: bool = False,
    ) -> ARS:
        """As sb3-contrib's `learn`. If a callback returns False, the policy has the last complete update's weights.

        Raises:
            ConfigError: `async_eval` is given. Its processes call no callbacks.
        """
        if async_eval is not None:
            raise ConfigError("async_eval: its processes call no callbacks; remove it, or use sb3_contrib.ARS")
        horizon, callback = self._setup_learn(total_timesteps, callback, reset_num_timesteps, tb_log_name, progress_bar)
        callback.on_training_start(locals(), globals())
        try:
            while self.num_timesteps < horizon:
                self._update_current_progress_remaining(self.num_timesteps, total_timesteps)
                callback.on_rollout_start()
                self.weights = parameters_to_vector(self.policy.parameters()).detach()
                self._do_one_update(callback, None)
                if log_interval is not None and self._n_updates % log_interval == 0:
                    self.dump_logs()
        except _EndedError:
            self.policy.load_from_vector(self.weights.cpu())
        callback.on_training_end()
        return self

    def evaluate_candidates(self, candidate_weights: Tensor, callback: BaseCallback, async_eval: Any) -> Tensor:
        """The return of each candidate: (candidates, weights) float32 → (candidates,) float32."""
        returns = torch.zeros(len(candidate_weights), device=self.device)
        self.ep_info_buffer: Any = []  # the returns of these candidates; SB3 logs their mean
        env: Any = self.env
        for index, weights in enumerate(candidate_weights):
            self.policy.load_from_vector(weights.cpu())
            rewards, lengths = evaluate_policy(
                self.policy, env, self.n_eval_episodes, return_episode_rewards=True, warn=False,
                callback=partial(self._on_env_step, callback),
            )  # fmt: skip
            returns[index] = sum(rewards) + self.alive_bonus_offset * sum(lengths)  # type: ignore[arg-type]
            self._mimic_monitor_wrapper(rewards, lengths)  # type: ignore[arg-type]
        callback.on_rollout_end()
        return returns

    def _on_env_step(self, callback: BaseCallback, step_locals: dict[str, Any], _: dict[str, Any]) -> None:
        self.num_timesteps += 1
        callback.update_locals({**step_locals, "new_obs": step_locals["new_observations"]})
        if not callback.on_step():
            raise _EndedError
