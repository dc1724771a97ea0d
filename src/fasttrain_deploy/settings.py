"""The settings of `play` and `export`. They are a part of every configuration, so this module imports little."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from fasttrain.spec.groups import MAX_SEED
from fasttrain.spec.plugins import Owner, Part
from fasttrain.spec.setting import setting


@dataclass(frozen=True, kw_only=True, slots=True)
class PlayConfig:
    """How `fasttrain play` shows a game."""

    episodes: int = setting(1, "Number of episodes to show.", least=1)
    speed: float = setting(2.0, "Decisions per second. 0 waits for Enter at each decision.", least=0)
    seed: int | None = setting(None, "Seed of the game. null plays another game every time.", least=0, most=MAX_SEED)
    human: bool = setting(False, "You play against the agent.")
    deterministic: bool = setting(True, "true takes the best action. false draws one from the policy's distribution.")


@dataclass(frozen=True, kw_only=True)
class DeploySettings:
    """What play and export add to a configuration."""

    format: Literal["onnx", "torchscript"] | None = setting(None, "Format of the exported file.")
    play: PlayConfig = PlayConfig()


if TYPE_CHECKING:
    from fasttrain.spec import config

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config(config.Config, DeploySettings):
        """A configuration as play and export see it."""

else:
    Config = object  # this module is imported before `Config` is made


class _Deploy(Part):
    name, settings = "deploy", DeploySettings
    owners: ClassVar = {
        "format": Owner(("export",), "to export that run: fasttrain export run=…"),
        "play.": Owner(("play",), "to watch a run: fasttrain play run=…"),
    }


PART = _Deploy()
