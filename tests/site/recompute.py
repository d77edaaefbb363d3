"""Recompute numbers of the built book from raw samples, without the package: standard library only.

python tests/site/recompute.py [--seed S] [--count N]

A number is a cell of a figure's or table's data (the CSV files that the pages offer), a cell of the
table in README.md, or a number of a sentence that formulas.json declares. Where it comes from is in
it: a CSV file names record, workload, direction, impl, scope and variant of each row; formulas.json
names the workload of a line of README.md, and of a sentence its page, its quantity and its row, or
two rows of which it is the quotient. Each picked number is printed with its source and what the
samples make of it. Exit status 1 if one is off by more than its printed digits.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import random
import re
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
KEY = ("workload", "direction", "impl", "scope", "variant")
QUANTITIES = ("time_us_p20", "time_us_p50", "time_us_p80", "tflops", "gbytes_per_s",
              "percent_of_roofline", "joules", "power_w", "samples")  # fmt: skip
GPU = "NVIDIA H200"
LEAST_SHARE = 0.2
"""Of README.md and of sentences, each: there are fewer of them than cells of figures."""


class Number(NamedTuple):
    """`printed`: the text; `off`: by how much it may differ; `found`: the value from samples."""

    place: str
    source: str
    printed: str
    off: float
    found: Callable[[], float]


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def floor_us(record: dict, row: dict) -> float:
    """The least time under the ceilings of the record, of bursts or back to back."""
    scope = "sustained" if row["scope"] == "sustained" else "kernel"
    matmul, copies = 0.0, {}
    for limit in record["ceilings"]:
        if (limit.get("scope") or "kernel") != scope:
            continue
        us = statistics.median(limit["samples_us"])
        if limit["kind"] == "matmul":
            matmul = max(matmul, limit["flops"] / us)
        else:
            mix = limit["bytes_read"] / limit["bytes_written"]
            rate = (limit["bytes_read"] + limit["bytes_written"]) / us
            copies[mix] = max(rate, copies.get(mix, 0.0))
    mixes = sorted(copies)
    wanted = row["bytes_read"] / row["bytes_written"] if row["bytes_written"] else math.inf
    below = [mix for mix in mixes if mix <= wanted] or mixes[:1]
    above = [mix for mix in mixes if mix > wanted] or mixes[-1:]
    low, high = below[-1], above[0]
    rate = copies[low]
    if low < wanted < high:
        rate += (copies[high] - copies[low]) * (wanted - low) / (high - low)
    return max(row["flops"] / matmul, (row["bytes_read"] + row["bytes_written"]) / rate)


def flops_of(work: dict, row: dict) -> int:
    """Useful FLOPs of a row; of full batches without a mask from their sizes alone."""
    full = {"kind": "full"}
    plain = work["operator"] == "gdpa" and row["scope"] in ("kernel", "sustained")
    plain = plain and work["lengths_q"] == full and work["lengths_k"] in (None, full)
    if not plain or work["shared_q"] or work["causal"] or work["window"] is not None:
        return row["flops"]
    pairs = work["batch"] * work["max_seqlen_q"] * work["max_seqlen_k"]
    forward = 4 * work["num_heads_q"] * work["head_dim"] * pairs
    return forward if row["direction"] == "forward" else forward * 5 // 2


def value(record: dict, row: dict, quantity: str) -> float:
    samples = row["samples_us"]
    us = quantile(samples, 0.5)
    if quantity.startswith("time_us_p"):
        return quantile(samples, int(quantity[-2:]) / 100)
    if quantity == "tflops":
        return flops_of(record["workloads"][row["workload"]], row) / us / 1e6
    if quantity == "gbytes_per_s":
        return (row["bytes_read"] + row["bytes_written"]) / us / 1e3
    if quantity == "percent_of_roofline":
        return 100 * floor_us(record, row) / us
    if quantity == "power_w":
        return row["load"]["joules"] / statistics.fmean(samples) * 1e6
    return row["load"]["joules"] if quantity == "joules" else len(samples)


class Book:
    """The built pages and the records that they quote."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.formulas = json.loads(Path(__file__).with_name("formulas.json").read_text("utf-8"))
        self.record = cache(self._record)

    def _record(self, name: str) -> dict:
        return json.loads((self.root / f"data/records/{name}.json").read_text("utf-8"))

    def newest(self, page: str, keys: list[tuple]) -> str:
        """The newest record of a page's notebook that has times of these rows, of the GPU that the
        book quotes."""
        slug = re.sub("[^a-z0-9]+", "-", page)
        promoted = json.loads((self.root / "data/promoted.json").read_text("utf-8"))
        ends = tuple(f"Z-{slug}-{system}" for system in promoted[GPU])
        names = [path.stem for path in (self.root / "data/records").iterdir()]
        return max(n for n in names if n.endswith(ends) and all(self._times(n, k) for k in keys))

    def _times(self, name: str, key: tuple) -> bool:
        rows = self.record(name)["rows"]
        return any(r["samples_us"] for r in rows if tuple(r[k] for k in KEY) == key)

    def row(self, name: str, *key: str) -> dict:
        found = [r for r in self.record(name)["rows"] if tuple(r[k] for k in KEY) == key]
        if len(found) != 1:
            raise LookupError(f"{name} must hold one row {key}, got {len(found)}")
        return found[0]

    def cells(self) -> Iterator[Number]:
        """Of the data of figures and tables."""
        for path in sorted((self.root / "book/_build/html/figures").glob("*.csv")):
            with path.open(encoding="utf-8", newline="") as file:
                lines = list(csv.DictReader(file))
            if not lines or not {"record", *KEY} <= lines[0].keys():
                continue
            for i, line in enumerate(lines, 2):
                key = tuple(line[k] for k in KEY)
                for quantity in QUANTITIES:
                    text = line.get(quantity) or ""
                    if text and line["time_us_p50"]:
                        yield self._number(
                            f"{path.name}:{i} {quantity}", line["record"], key, quantity, text,
                            1e-5 * abs(float(text)),
                        )  # fmt: skip

    def _number(
        self, place: str, name: str, key: tuple, quantity: str, text: str, off: float, by: float = 1
    ) -> Number:
        return Number(
            place, f"{name} {' '.join(key)}", text, off,
            lambda: value(self.record(name), self.row(name, *key), quantity) / by,
        )  # fmt: skip

    def readme(self) -> Iterator[Number]:
        """Of the table in README.md: the time, rate and share of our fastest, the fastest peer's
        time and the quotient of the two."""
        text = (self.root / "README.md").read_text("utf-8").split("<!-- results: begin -->")[1]
        text = text.split("<!-- results: end -->")[0]
        names = re.findall(r"\(data/records/([^)]*)\.json\)", text)
        for line in text.splitlines():
            title, *cells = (cell.strip() for cell in line.strip("| ").split("|"))
            if title not in self.formulas["readme"]:
                continue
            work, direction = self.formulas["readme"][title], title.rpartition(" ")[2]
            name = max(n for n in names if self._fastest(n, work, direction, ours=True))
            ours = self._fastest(name, work, direction, ours=True)  # of the newest of those named
            us, (rate, share) = cells[0], cells[1].rsplit(", ", 1)
            quantity = "gbytes_per_s" if "GB/s" in rate else "tflops"
            for text, of, by, off in (
                (us, "time_us_p50", 1e3, 0.005), (rate, quantity, 1, 0.5),
                (share, "percent_of_roofline", 1, 0.5),
            ):  # fmt: skip
                text = text.split()[0].replace(",", "")
                yield self._number(f"README.md {title}", name, ours, of, text, off, by)
            if peer := self._fastest(name, work, direction, ours=False):
                place = f"README.md {title}, peer"
                us, text = cells[3].split()[0], cells[4].rstrip("×")
                yield self._number(place, name, peer, "time_us_p50", us, 0.005, 1e3)
                us = value(self.record(name), self.row(name, *ours), "time_us_p50")
                yield self._number(f"{place}, faster", name, peer, "time_us_p50", text, 0.005, us)
            else:
                assert cells[3].startswith("not timed"), f"README.md {title}: no peer was timed"

    def _fastest(self, name: str, work: str, direction: str, *, ours: bool) -> tuple | None:
        """Return the key of the fastest rung, or peer, back to back; None if none has a time."""
        rows = [
            r for r in self.record(name)["rows"]
            if r["workload"] == work and r["direction"] == direction and r["variant"] == ""
            and r["scope"] == "sustained" and r["samples_us"] and r["math"] != "rotary"
            and bool(re.match("[vb][0-9]", r["impl"])) == ours
        ]  # fmt: skip
        best = min(rows, key=lambda r: quantile(r["samples_us"], 0.5), default=None)
        return best and tuple(best[k] for k in KEY)

    def sentences(self) -> Iterator[Number]:
        """Numbers that pages' texts take from their notebooks, as formulas.json declares them."""
        for page, name, quantity, *rows in self.formulas["glued"]:
            keys = []
            for direction, work, scope, impl in map(str.split, rows):
                keys.append((work, direction, impl, scope, ""))
            run = self.newest(page, keys)

            def found(run: str = run, keys: list = keys, quantity: str = quantity) -> float:
                values = [value(self.record(run), self.row(run, *key), quantity) for key in keys]
                return values[0] / values[1] if len(values) > 1 else values[0]

            text = self._glued(page)[name]
            source = f"{run} {' over '.join(' '.join(key) for key in keys)}"
            yield Number(f"{page} {name} {quantity}", source, text, 1e-9 * float(text), found)

    def _glued(self, page: str) -> dict[str, str]:
        """What a chapter's notebook gave to its text, by name."""
        path = self.root / f"book/executed/{page}.ipynb"
        outputs = [
            output
            for cell in json.loads(path.read_text("utf-8"))["cells"]
            for output in cell.get("outputs", ())
        ]
        return {
            output["metadata"]["scrapbook"]["name"]: "".join(text)
            for output in outputs
            for kind, text in output.get("data", {}).items()
            if kind == "application/papermill.record/text/plain"
        }


def picked(book: Book, seed: int, count: int) -> list[Number]:
    """`count` numbers: of README.md and of sentences a fifth each if there are as many, the rest
    cells, a file of which is as likely as another."""
    chance = random.Random(seed)
    found = []
    for numbers in (list(book.readme()), list(book.sentences())):
        found += chance.sample(numbers, min(len(numbers), round(LEAST_SHARE * count)))
    files: dict[str, list[Number]] = {}
    for number in book.cells():
        files.setdefault(number.place.partition(":")[0], []).append(number)
    if sum(map(len, files.values())) < count:
        raise SystemExit("the built book must offer the data of its figures: run `make book`")
    while len(found) < count:
        cell = chance.choice(files[chance.choice(sorted(files))])
        if cell not in found:
            found.append(cell)
    return found


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--root", type=Path, default=ROOT)
    options = parser.parse_args(given)
    wrong = 0
    for number in picked(Book(options.root), options.seed, options.count):
        found = number.found()
        off = abs(found - float(number.printed)) > number.off
        wrong += off
        print(f"{'OFF' if off else 'ok':3} {number.printed:>14} {found:14.6g}  {number.place}")
        print(f"{'':33} from {number.source}")
    print(f"seed {options.seed}: {options.count - wrong} of {options.count} numbers are right")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
