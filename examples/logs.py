"""Where the numbers of a run go: printed lines, a bar, a CSV file, TensorBoard."""

from __future__ import annotations

import argparse
import csv
import importlib.util
import sys

from tqdm import tqdm

COLUMNS = (
    "step", "loss", "rows_per_s", "lr", "ne", "auc", "hr", "ndcg", "bayes_ne", "bayes_auc",
)  # fmt: skip
"""Columns of the CSV file: a line holds the metrics after a step, on training or held-out rows."""


def check(parser: argparse.ArgumentParser, o: argparse.Namespace) -> None:
    if o.tensorboard and importlib.util.find_spec("tensorboard") is None:
        parser.error(
            "--tensorboard needs the package tensorboard, which is not installed: "
            "pip install tensorboard"
        )
    if o.log_csv and o.log_csv.exists() and not o.resume:
        parser.error(f"--log-csv must be a new file without --resume, got {o.log_csv}")


class Logs:
    """Log of the run's steps from `first` on; ranks other than 0 log nothing.

    The bar counts rows, on a terminal only. A run that resumes adds to the CSV file, so a step
    after the checkpoint may be in it twice: the later line counts.
    """

    def __init__(self, o: argparse.Namespace, first: int, rank: int):
        self.on = rank == 0
        self.file = self.board = None
        self.bar = tqdm(
            total=o.steps * o.batch, initial=first * o.batch, unit=" rows", unit_scale=True,
            disable=None if self.on else True,
        )  # fmt: skip
        if self.on and o.log_csv:
            self.file = o.log_csv.open("a", newline="")
            self.rows = csv.DictWriter(self.file, COLUMNS)
            if not self.file.tell():
                self.rows.writeheader()
        if self.on and o.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(o.tensorboard, purge_step=first + 1 if first else None)

    def __enter__(self) -> Logs:
        return self

    def __exit__(self, *_) -> None:
        self.bar.close()
        for each in (self.file, self.board):
            if each is not None:
                each.close()

    def say(self, line: str) -> None:
        if self.on:
            with tqdm.external_write_mode(sys.stdout):
                print(line, flush=True)

    def add(self, step: int, **values: float) -> None:
        """Values after a step, of COLUMNS."""
        if self.file is not None:
            self.rows.writerow({"step": step, **values})
            self.file.flush()
        if self.board is not None:
            for name, value in values.items():
                self.board.add_scalar(name, value, step)
