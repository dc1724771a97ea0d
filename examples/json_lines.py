"""A logger of your own: fasttrain +profile=speed env.id=CartPole-v1 algo=ppo loggers=[csv,json_lines:JsonLines]

With arguments: loggers='[{logger: "json_lines:JsonLines", file: log.jsonl}]'. It is a `KVWriter` of
Stable-Baselines3; names are SB3's (rollout/ep_rew_mean, …), and one call is one row.
"""

import json
from pathlib import Path
from typing import Any

from stable_baselines3.common.logger import KVWriter


class JsonLines(KVWriter):
    """A line of JSON per row."""

    def __init__(self, file: str = "log.jsonl"):
        self.stream = Path(file).open("a", encoding="utf-8")  # noqa: SIM115 - closed in `close`

    def write(self, key_values: dict[str, Any], key_excluded: dict[str, tuple[str, ...]], step: int = 0) -> None:
        numbers = {key: float(value) for key, value in key_values.items() if isinstance(value, (int, float))}
        self.stream.write(json.dumps({"step": step, **numbers}) + "\n")
        self.stream.flush()

    def close(self) -> None:
        self.stream.close()
