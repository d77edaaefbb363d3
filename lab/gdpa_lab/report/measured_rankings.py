"""Derives from the records the rankings that `impl="auto"` follows, one table per operator.

`python -m gdpa_lab maintain choices` writes them; calling/rankings.py defines their format.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import pandas as pd

from gdpa_kernels.block_attention import choices as block_choices
from gdpa_kernels.calling import ladder
from gdpa_kernels.calling.rankings import Ranking, Shape, parse_capability
from gdpa_kernels.gdpa import choices
from gdpa_lab.measuring import files, record, system
from gdpa_lab.measuring.workload import Workload
from gdpa_lab.report import results


def _gdpa_shape(gpu: tuple[int, int], direction: str, workload: Mapping) -> Shape | None:
    if workload.get("activation") != "gelu_tanh" or Workload.from_dict(workload).masked:
        return None
    sizes = (int(workload[name]) for name in ("head_dim", "max_seqlen_q", "max_seqlen_k"))
    return gpu, direction, workload["dtype"], *sizes


def _block_shape(gpu: tuple[int, int], direction: str, workload: Mapping) -> Shape | None:
    rotary = int(bool(workload.get("rotary")))
    if workload.get("block_size") != 64:
        return None
    return gpu, workload["dtype"], direction, rotary, int(workload["head_dim"])


CHOICES = {"gdpa": choices, "block_attention": block_choices}
"""Modules that read the tables, by operator."""

SHAPES: dict[str, Callable[[int, str, Mapping], Shape | None]] = {
    "gdpa": _gdpa_shape,
    "block_attention": _block_shape,
}
"""Functions by operator, from compute capability, direction and a workload's dictionary to the
values of its table's columns, or to None for a workload that does not count."""


def update(data_dir: str | Path) -> dict[Path, bool]:
    """Rewrite the tables; return whether each file changed. A refused record stops all."""
    texts = {module.PATH: table_text(data_dir, operator) for operator, module in CHOICES.items()}
    return {path: files.rewrite(path, text) for path, text in texts.items()}


def table_text(data_dir: str | Path, operator: str) -> str:
    """Format the table of an operator from the records."""
    return render(from_records(data_dir, operator), CHOICES[operator].COLUMNS)


def render(rankings: Iterable[Ranking], columns: Iterable[str]) -> str:
    """Format rankings as CSV."""
    rows = [
        ("{}.{}".format(*gpu), *shape, " ".join(impls), made_by)
        for (gpu, *shape), impls, made_by in rankings
    ]
    frame = pd.DataFrame(rows, columns=[*columns, "impls", "record"])
    return frame.to_csv(index=False, lineterminator="\n")


def from_records(data_dir: str | Path, operator: str) -> list[Ranking]:
    """Derive the rankings from the records: for each shape, from the record that compared most
    implementations, then from the newest, of the GPU that data/promoted.json names first. Workloads
    of one shape count together. Sustained times, as in a training loop, decide among the
    implementations that have them, isolated calls among all others.

    Only rows that passed their check count; lessons are ranked, and left out of what is listed.
    RecordError naming every refused file.
    """
    shape_of = SHAPES[operator]
    rungs = {rung.impl: rung for rung in ladder.LADDERS[operator][1:]}
    workloads = {
        (run.id, name): workload
        for run in record.load_all(data_dir)
        for name, workload in run.workloads.items()
    }
    table = results.table(data_dir, latest=False).drop_duplicates(
        ["workload", "impl", "variant", "scope", "direction", "record"]
    )
    rows = table[table["scope"].isin(results.TIMED) & (table["variant"] == "")]
    rows = rows[rows["correct"] & rows["impl"].isin(rungs)]
    timed: dict[Shape, dict[str, dict[str, list]]] = defaultdict(lambda: defaultdict(dict))
    for (run, name, direction, scope), group in rows.groupby(
        ["record", "workload", "direction", "scope"], sort=True
    ):
        workload = workloads[run, name]
        machine = system.by_id(group["system"].iloc[0], data_dir)
        shape = shape_of(parse_capability(machine.compute_capability), direction, workload)
        compared = sum(not rungs[impl].is_lesson for impl in group["impl"])
        if workload["operator"] == operator and shape is not None and compared > 1:
            times = group.set_index("impl")["time_us_p50"]
            timed[shape][run].setdefault(scope, []).append(times)
    first = list(system.promoted(data_dir) or ())
    gpus = table.drop_duplicates("record").set_index("record")["gpu"]
    priority = {run: first.index(gpu) if gpu in first else len(first) for run, gpu in gpus.items()}
    rankings = []
    for shape in sorted(timed):
        orders = {run: _order(**columns) for run, columns in timed[shape].items()}
        run = max(orders, key=lambda run: (-priority[run], len(orders[run]), run))
        products = tuple(impl for impl in orders[run] if not rungs[impl].is_lesson)
        if products:
            rankings.append(Ranking(shape, products, run))
    return rankings


def _order(kernel: Sequence[pd.Series] = (), sustained: Sequence[pd.Series] = ()) -> list[str]:
    """Order implementations, fastest first, from isolated and sustained times, a series for each
    workload: by isolated times, then those with sustained times change places among themselves."""
    isolated, loops = (_fastest_first(columns) for columns in (kernel, sustained))
    both = iter([impl for impl in loops if impl in isolated])
    return [next(both) if impl in loops else impl for impl in isolated] or loops


def _fastest_first(columns: Sequence[pd.Series]) -> list[str]:
    """Sort what was timed on each workload by the sum of its times."""
    return [*pd.concat(columns, axis=1).dropna().sum(axis=1).sort_values().index] if columns else []
