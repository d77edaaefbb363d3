"""Implementations that one chapter studies: measured like a rung, but on no ladder.

The module of a study stands beside its chapter; `machine_code.STUDIES` says where.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from gdpa_kernels.calling.rung import DIRECTIONS, Requires, Rung
from gdpa_lab.measuring import machine_code


@dataclass(frozen=True)
class Study(Rung):
    """A rung whose module stands beside a chapter."""

    @property
    def path(self) -> Path:
        return Path(self.module().__file__)

    def module(self) -> ModuleType:
        return importlib.import_module(
            machine_code.STUDIES[f"gdpa_kernels.{self.operator}.{self.impl}"]
        )


STUDIES = {
    "eliminations": Study(
        "eliminations",
        "what v1_one_tile leaves out",
        "Each piece of the general kernel, put back.",
        "v1_one_tile",
        Requires(capability=(8, 0)),
        operator="block_attention",
        directions=DIRECTIONS,
    )
}
"""By their names in records."""
