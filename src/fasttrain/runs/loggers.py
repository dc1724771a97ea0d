"""progress.csv of a resumed run: SB3's own file, gone on with instead of begun anew."""

from __future__ import annotations

import csv
import io
import sys
from pathlib import Path

from stable_baselines3.common.logger import CSVOutputFormat, HumanOutputFormat, KVWriter, Logger

STEPS = "time/total_timesteps"


class ContinuedCSV(CSVOutputFormat):
    """Rows and columns that are there stay; SB3's class would empty the file."""

    def __init__(self, file: Path) -> None:
        super().__init__(str(file.with_name(f"{file.name}.unused")))
        self.file.close()
        file.with_name(f"{file.name}.unused").unlink()
        file.touch()
        self.file = file.open("r+", encoding="utf-8", newline="")
        self._find_end()

    def cut(self, env_steps: int) -> None:
        """Forget rows of more env steps."""
        self.file.seek(0)
        rows = list(csv.reader(io.StringIO(self.file.read())))
        if rows and STEPS in rows[0]:
            column = rows[0].index(STEPS)
            kept = [row for row in rows[1:] if len(row) > column and _steps_of(row[column]) <= env_steps]
            text = io.StringIO()
            csv.writer(text, lineterminator="\n").writerows([rows[0], *kept])
            self.file.seek(0)
            self.file.truncate()
            self.file.write(text.getvalue())
            self.file.flush()
        self._find_end()

    def _find_end(self) -> None:
        self.file.seek(0)
        header = self.file.readline().rstrip("\n")
        self.keys = header.split(",") if header else []
        self.file.seek(0, io.SEEK_END)


def continued_logger(folder: str, formats: list[str]) -> Logger:
    """As SB3's `configure`, for a folder with the files of a run that goes on."""
    writers: list[KVWriter] = [
        ContinuedCSV(Path(folder) / "progress.csv") if name == "csv" else HumanOutputFormat(sys.stdout)
        for name in formats
    ]
    return Logger(folder, writers)


def cut_back(logger: Logger, env_steps: int) -> None:
    """What was logged after that is logged again."""
    for writer in logger.output_formats:
        if isinstance(writer, ContinuedCSV):
            writer.cut(env_steps)


def _steps_of(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return 0.0
