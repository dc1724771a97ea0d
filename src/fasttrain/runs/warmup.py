"""`fasttrain warmup`: the kernels of a run compiled into the cache, for an image or before a batch of jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from fasttrain.errors import EXIT_DONE
from fasttrain.kernel_cache import folders
from fasttrain.runs.build import env_facts, game_calls, this_machine
from fasttrain.runs.engine import compile_shown, learner_calls, replay_calls
from fasttrain.runs.view import make_console
from fasttrain.spec.config import Config
from fasttrain.spec.plan import make_plan
from fasttrain.spec.reading import against_bots


def main(config: Config, sources: Mapping[str, str], folder: Path, overrides: Sequence[str]) -> int:
    """Compile what a training with this configuration would call; returns the exit code."""
    console = make_console()
    of_game = game_calls(config)
    missing = [call for call in of_game if not call.is_kept]  # before the env is looked at, which plays it
    took = compile_shown(of_game, console)
    plan = make_plan(config, sources, env_facts(against_bots(config)), this_machine())
    of_learner = learner_calls(plan.config) + replay_calls(plan.config)
    missing += [call for call in of_learner if not call.is_kept]
    took += compile_shown(of_learner, console)
    count = len(of_game) + len(of_learner)
    what = (
        f"{len(missing)} of {count} kernels compiled in {took:.0f} s" if missing else f"all {count} kernels were there"
    )
    line = f"{what}; they are kept in {folders()[0]}" if count else "this run has no compiled kernels"
    console.print(line, markup=False, highlight=False, soft_wrap=True)
    return EXIT_DONE
