"""sbatch, srun and sacct of a Slurm with one node, for plugins that start jobs: jobs are processes of this machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

JOB, NODE, FOLDER = "1234", "here", "SLURM_TOY_FOLDER"


def install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the three programs on the PATH."""
    monkeypatch.setenv(FOLDER, str(folder))
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    for name in ("sbatch", "srun", "sacct"):
        program = folder / name
        program.write_text(f"#!/bin/sh\nexec '{sys.executable}' '{__file__}' {name} \"$@\"\n", encoding="utf-8")
        program.chmod(0o755)


def sbatch(script: str) -> None:
    """Start all jobs of the array. The ended ones leave a file, which sacct reads."""
    first, last = re.search(r"#SBATCH --array=(\d+)-(\d+)", Path(script).read_text()).groups()  # type: ignore[union-attr]
    for task in range(int(first), int(last) + 1):
        own = {"SLURM_JOB_ID": f"{JOB}{task}", "SLURM_ARRAY_JOB_ID": JOB, "SLURM_ARRAY_TASK_ID": str(task),
               "SLURM_JOB_NODELIST": NODE, "SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": "1", "SLURM_NODEID": "0",
               "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}  # fmt: skip
        line = ["sh", "-c", f"bash '{script}'; echo $? > '{os.environ[FOLDER]}/ended_{task}'"]
        subprocess.Popen(line, env={**os.environ, **own}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    sys.stdout.write(f"Submitted batch job {JOB}\n")


def srun(*words: str) -> None:
    """Run the command behind srun's options: `--unbuffered --output FILE --error FILE command…`."""
    begin = next(index for index, word in enumerate(words) if "python" in word)
    os.execvp(words[begin], words[begin:])


def sacct(*_: str) -> None:
    sys.stdout.write("JobID|State|NodeList\n")
    for file in sorted(Path(os.environ[FOLDER]).glob("ended_*")):
        state = "COMPLETED" if file.read_text().strip() == "0" else "FAILED"
        sys.stdout.write(f"{JOB}_{file.name.removeprefix('ended_')}|{state}|{NODE}\n")


if __name__ == "__main__":
    {"sbatch": sbatch, "srun": srun, "sacct": sacct}[sys.argv[1]](*sys.argv[2:])
