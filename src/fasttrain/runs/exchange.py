"""An exchange of population-based training: a run continues with the weights of a better run and with other settings.

The study leaves exchange.json and a copy of the better model in the folder of the run. `fasttrain resume` uses both,
if the run's newest checkpoint is the one after which the exchange was decided. Later checkpoints contain the result.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from stable_baselines3.common.base_class import BaseAlgorithm

from fasttrain.runs.models import statistics_of
from fasttrain.runs.warm_start import MODEL, OPTIMIZER, STATISTICS, warm_start
from fasttrain.saving.files import read_json, write_json
from fasttrain.spec.config import Config
from fasttrain.spec.plan import RunSpec

FILE, WEIGHTS = "exchange.json", "exchange.zip"


class Exchange(NamedTuple):
    """What a run takes over. `settings`: new values by dotted key, all below `algo.`; `at`: env steps of the run."""

    at: int
    settings: Mapping[str, Any]

    @classmethod
    def of(cls, folder: Path, env_steps: int) -> Exchange | None:
        """The exchange that was decided for the run in `folder` at its checkpoint of `env_steps`; None without one."""
        stored = read_json(folder / FILE)
        return cls(env_steps, stored["settings"]) if stored.get("at") == env_steps else None

    def leave(self, folder: Path, better: Path) -> None:
        """Store the exchange in the folder of a run, with the model of the run in the folder `better`."""
        model = better / MODEL
        if statistics_of(model).is_file():
            shutil.copyfile(statistics_of(model), statistics_of(folder / WEIGHTS))
        shutil.copyfile(model, folder / WEIGHTS)
        write_json(folder / FILE, {"at": self.at, "settings": dict(self.settings)})

    def changed(self, plan: RunSpec) -> RunSpec:
        """The plan with the new settings."""
        values = {key.removeprefix("algo."): value for key, value in self.settings.items()}
        rows = [
            row._replace(effective=self.settings[row.flag], source="exchange") if row.flag in self.settings else row
            for row in plan.rows
        ]
        return plan._replace(config=replace(plan.config, algo=replace(plan.config.algo, **values)), rows=tuple(rows))

    def take_weights(self, folder: Path, config: Config, model: BaseAlgorithm, say: Callable[[str], object]) -> None:
        """Load policy, optimizer and the statistics of `env.normalize` of the better run. Raises ConfigError."""
        also: Any = (OPTIMIZER, *[STATISTICS] * bool(config.env.normalize))
        own = replace(config, init_from=str(folder / WEIGHTS), init_from_strict=True, init_from_also=also)
        warm_start(own, model, lambda text: say(text.replace("init_from", "exchange", 1)))
