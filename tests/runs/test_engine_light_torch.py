from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CODE = """
import sys, torch
from fasttrain.runs.engine import leave_compiler_out
leave_compiler_out()
weights = torch.nn.Parameter(torch.ones(2))
adam = torch.optim.Adam([weights], lr=0.5)
adam.load_state_dict(adam.state_dict())
adam.zero_grad()
weights.sum().backward()
adam.step()
print("torch._dynamo" in sys.modules)
print([round(weight, 3) for weight in weights.tolist()], weights.requires_grad)
adam.zero_grad()
print([round(number, 3) for number in torch.compile(lambda x: x + 1, backend="eager")(weights).tolist()])
leave_compiler_out()
"""


def test_an_optimizer_is_built_and_stepped_without_the_compiler_and_works_with_it_later(tmp_path: Path):
    done = subprocess.run([sys.executable, "-c", CODE], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n") == ["False", "[0.5, 0.5] True", "[1.5, 1.5]", ""]
