"""Run TileLens on a mistake: `under_tilelens.py seeded.py FAULT`, by a Python that has it.

Its sanitizer and its race detector follow addresses and compute no results, so that the program's
own test says nothing here. Raises RuntimeError for a kernel that the race detector did not judge.
"""

import sys

import seeded
import triton_viz
from triton_viz.clients import RaceDetector, Sanitizer

KERNELS = {"pipeline_kernel": seeded.pipeline_kernel, "sum_kernel": seeded.sum_kernel}
sanitizer, detector = Sanitizer(abort_on_error=False), RaceDetector()
for client in (sanitizer, detector):
    for name, kernel in KERNELS.items():
        setattr(seeded, name, triton_viz.trace(client)(kernel))
    try:
        seeded.main(sys.argv[2])
    except AssertionError as error:
        if not str(error).endswith("wrong"):
            raise
if detector.last_status != "ok":
    raise RuntimeError(f"{detector.last_status}: {detector.unsupported_reason}")
said = [f"Error: {r.op_type.name} outside of {r.tensor_name}" for r in sanitizer.records]
said += [
    f"Race: {r.race_type.name}, programs {r.witness_grid_a} and {r.witness_grid_b}"
    for r in detector.last_reports
]
print(*said, f"ERROR SUMMARY: {len(said)} errors", sep="\n")
