"""What `impl="auto"` takes, as a table that is read by eye.

`python -m tests.calling.test_auto` writes it: after a record, look at what has changed.
"""

import csv
import io
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import torch

import tritonemu
from gdpa_kernels.block_attention import api as block_api
from gdpa_kernels.block_attention.batch import Batch as BlockBatch
from gdpa_kernels.calling import ladder
from gdpa_kernels.gdpa import api
from gdpa_kernels.gdpa.batch import Batch
from gdpa_kernels.gdpa.bias import Bias
from gdpa_kernels.gdpa.mask import Mask

PATH = Path(__file__).with_name("auto.csv")
GPUS = ("sm_90", "sm_100")
DTYPES = ("bfloat16", "float16", "float32", "float64")
HEAD_DIMS = (32, 64, 80, 128, 192, 256, 264)
LENGTHS = ((64, 64), (256, 256), (64, 1024), (1024, 64), (1024, 1024))
OPTIONS = (
    "no mask", "causal", "lower_right", "window", "targets", "bias", "out_dtype", "shared q",
)  # fmt: skip
COLUMNS = ("gpu", "direction", "options", "lengths", "dtype", *map(str, HEAD_DIMS))


def batch_of(options: str, dtype: torch.dtype, head_dim: int, len_q: int, len_k: int) -> Batch:
    """Eight sequences of these lengths with 4 heads; its tensors are never read."""
    q, k = (torch.empty(8 * n, 4, head_dim, dtype=dtype) for n in (len_q, len_k))
    offsets = [torch.arange(9, dtype=torch.int32) * n for n in (len_q, len_k)]
    more: dict = {
        "causal": {"mask": Mask(True)},
        "lower_right": {"mask": Mask("lower_right")},
        "window": {"mask": Mask(window=16)},
        "targets": {"mask": Mask("lower_right"), "segments": torch.zeros(8, 2, dtype=torch.int32)},
        "bias": {"bias": Bias(torch.zeros(1, 5), None, None, None, None)},
        "out_dtype": {"out_dtype": torch.float32},
    }.get(options, {})
    if options == "shared q":
        q, offsets[0] = q[:len_q], None
    return Batch(q, k, k, *offsets, len_q, len_k, ("gelu_tanh",), 1.0, **more)


def calls(operator: str, direction: str) -> Iterator[tuple[str, str, str, list]]:
    """(options, lengths, dtype, a batch for each head_dim)."""
    if operator == "gdpa":
        for options, lengths, dtype in product(OPTIONS, LENGTHS, DTYPES):
            if options != "out_dtype" or (direction == "forward" and dtype != "float64"):
                kind = getattr(torch, dtype)
                batches = [batch_of(options, kind, head_dim, *lengths) for head_dim in HEAD_DIMS]
                yield options, "{} x {}".format(*lengths), dtype, batches
        return
    ends = torch.arange(3, dtype=torch.int32) * 70
    for rotary, dtype in product((False, True), DTYPES):
        batches = []
        for head_dim in HEAD_DIMS:
            q = torch.empty(140, 4, head_dim, dtype=getattr(torch, dtype))
            turns = tuple(torch.empty(2, 140, head_dim // 2)) if rotary else None
            batches.append(BlockBatch(q, q, q, ends, 1.0, rotary=turns))
        yield "rotary" if rotary else "blocks", "all", dtype, batches


def chosen(operator: str, direction: str, batch: object) -> str:
    resolve = api.resolve if operator == "gdpa" else block_api.resolve
    return resolve("auto", direction, batch).impl


def joined(rows: dict[tuple[str, ...], tuple], place: int) -> dict[tuple[str, ...], tuple]:
    """Rows that are alike but for one name, as one row with all of their names."""
    alike: dict[tuple, list[str]] = {}
    for names, impls in rows.items():
        alike.setdefault((*names[:place], *names[place + 1 :], impls), []).append(names[place])
    everything = {names[place] for names in rows}
    return {
        (*rest[:place], "all" if {*named} == everything else ", ".join(named), *rest[place:]): impls
        for (*rest, impls), named in alike.items()
    }


def table() -> str:
    """The text of the table."""
    text = io.StringIO()
    written = csv.writer(text, lineterminator="\n")
    written.writerow(COLUMNS)
    for gpu, operator, direction in product(
        GPUS, ("gdpa", "block_attention"), ("forward", "backward")
    ):
        with tritonemu.enabled(gpu, multiprocessors=132):
            rows = {
                names: tuple(chosen(operator, direction, batch) for batch in batches)
                for *names, batches in map(list, calls(operator, direction))
                for names in [tuple(names)]
            }
        for place in (1, 2, 0):
            rows = joined(rows, place)
        for (options, lengths, dtype), impls in rows.items():
            written.writerow((gpu, direction, options, lengths, dtype, *impls))
    return text.getvalue()


def test_auto_takes_what_the_table_says():
    assert table() == PATH.read_text(), "python -m tests.calling.test_auto, and read what changed"


@pytest.mark.parametrize("operator", ("gdpa", "block_attention"))
@pytest.mark.parametrize("direction", ("forward", "backward"))
def test_a_cpu_takes_the_definition(operator, direction):
    for *_, batches in calls(operator, direction):
        assert {chosen(operator, direction, batch) for batch in batches} == {"reference"}


def test_a_batch_that_padding_makes_large_takes_the_definition():
    """One sequence of 2,000 tokens among 150 of 3; or a model's max_seqlen for 30 tokens."""
    v0 = ladder.rung("v0_eager")
    for lengths, most in (([3] * 150 + [2000], 2000), ([30], 20_000)):
        ends = torch.tensor([0, *lengths]).cumsum(0).int()
        q = torch.empty(sum(lengths), 4, 272)
        batch = Batch(q, q, q, ends, ends, most, most, ("relu",), 1.0)
        with tritonemu.enabled():
            assert v0.needs_much_memory(batch) and v0.call_problem(batch) is None
            assert chosen("gdpa", "forward", batch) == "reference"
    q = torch.empty(8 * 64, 4, 272)
    ends = torch.arange(9, dtype=torch.int32) * 64
    with tritonemu.enabled():
        small = Batch(q, q, q, ends, ends, 64, 64, ("relu",), 1.0)
        assert chosen("gdpa", "forward", small) == "v0_eager"


if __name__ == "__main__":
    PATH.write_text(table())
