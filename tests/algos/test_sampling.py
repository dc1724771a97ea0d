"""No illegal action is ever drawn: two million draws, and 100 million where `-m campaign` asks for them."""

from __future__ import annotations

from typing import Any

import mask_draws
import pytest
import torch

from fasttrain.algos import policy_view
from toys import single_thread

one_thread = pytest.fixture(autouse=True)(single_thread)
WORKS = list(mask_draws.works())
EACH = 50_000  # of the 40 works that are not wide


@pytest.mark.parametrize("times", [1, pytest.param(50, marks=pytest.mark.campaign)])
@pytest.mark.parametrize("work", WORKS, ids=lambda work: f"{work.kind}, {work.dtype}, {work.family}")
def test_no_illegal_action(work: Any, times: int):
    found = mask_draws.draw(work, times * (2_000 if work.family == "wide" else EACH), seed=times)
    assert found.draws >= 2_000
    assert (found.illegal, found.broken) == (0, 0)


def test_every_way_every_dtype_and_two_million_in_all():
    assert {work.kind for work in WORKS} >= {"sample", "multi_sample", "fused act"}
    assert {work.dtype for work in WORKS if work.kind == "sample"} == {torch.float32, torch.bfloat16, torch.float16}
    assert sum(work.family != "wide" for work in WORKS) * EACH >= 1_700_000


def test_the_count_sees_what_is_illegal(monkeypatch: pytest.MonkeyPatch):
    """Drawn as if nothing were masked, logits that favour the illegal show it at once."""
    blind = policy_view.sample
    monkeypatch.setattr(policy_view, "sample", lambda logits, masks: blind(logits.float(), None))
    found = mask_draws.draw(mask_draws.Work("sample", torch.bfloat16, "illegal favoured"), 1_000, seed=1)
    assert found.illegal == found.draws
    masks = torch.tensor([[True, False, True, True], [True, False, False, True]])
    assert mask_draws.count_illegal(torch.tensor([[0, 1], [0, 0]]), masks, (2, 2)) == 1
    assert mask_draws.count_illegal(torch.tensor([[0, 2], [0, 1]]), masks, (2, 2)) == 1
    assert mask_draws.count_illegal(torch.tensor([[0, -1], [1, 1]]), masks, (2, 2)) == 2
