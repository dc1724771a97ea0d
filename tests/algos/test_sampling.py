"""No illegal action is ever drawn: two million draws here, any number by scripts/sample_masks.py."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fasttrain.algos import losses
from toys import single_thread

one_thread = pytest.fixture(autouse=True)(single_thread)
SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "sample_masks.py"


def load_script() -> Any:
    spec = importlib.util.spec_from_file_location("sample_masks", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["sample_masks"] = module  # NamedTuple looks its module up
    spec.loader.exec_module(module)
    return module


script = load_script()
WORKS = list(script.works())
EACH = 50_000  # of the 40 works that are not wide


@pytest.mark.parametrize("work", WORKS, ids=lambda work: f"{work.kind}, {work.dtype}, {work.family}")
def test_no_illegal_action(work: Any):
    found = script.draw(work, 2_000 if work.family == "wide" else EACH, seed=1)
    assert found.draws >= 2_000
    assert (found.illegal, found.broken) == (0, 0)


def test_every_way_every_dtype_and_two_million_in_all():
    assert {work.kind for work in WORKS} >= {"sample", "multi_sample", "fused act"}
    assert {work.dtype for work in WORKS if work.kind == "sample"} == {torch.float32, torch.bfloat16, torch.float16}
    assert sum(work.family != "wide" for work in WORKS) * EACH >= 1_700_000


def test_the_count_sees_what_is_illegal(monkeypatch: pytest.MonkeyPatch):
    """Drawn as if nothing were masked, logits that favour the illegal show it at once."""
    blind = losses.sample
    monkeypatch.setattr(losses, "sample", lambda logits, masks: blind(logits.float(), None))
    found = script.draw(script.Work("sample", torch.bfloat16, "illegal favoured"), 1_000, seed=1)
    assert found.illegal == found.draws
    masks = torch.tensor([[True, False, True, True], [True, False, False, True]])
    assert script.count_illegal(torch.tensor([[0, 1], [0, 0]]), masks, (2, 2)) == 1
    assert script.count_illegal(torch.tensor([[0, 2], [0, 1]]), masks, (2, 2)) == 1
    assert script.count_illegal(torch.tensor([[0, -1], [1, 1]]), masks, (2, 2)) == 2
