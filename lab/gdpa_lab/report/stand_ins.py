"""Baselines that stand in for published ones that we cannot run, and what ends that.

A published factor is over its authors' baseline. Where ours is another kernel, it is registered
here, and nothing quotes it any more once the published one itself has times: `outlived` lists
those, `claims.judged` refuses them, and a test looks for them in what the chapters say.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pandas as pd


@dataclass(frozen=True)
class StandIn:
    """Baselines `impls`, called `title`, in the place of `replaced`: `kernels` are its names in
    data/published, `originals` our names of it where it runs. `text`: a pattern of what a sentence
    calls the stand-in, and `subject` of what it stands for."""

    impls: tuple[str, ...]
    title: str
    replaced: str
    kernels: tuple[str, ...]
    originals: tuple[str, ...] = ()
    text: str = ""
    subject: str = ""

    def __str__(self) -> str:
        return f"{self.title} for {self.replaced}"


STAND_INS = (
    StandIn(("cudnn", "cudnn_varlen"), "cuDNN", "CUTLASS FMHA on Blackwell", ("cutlass_fmha",)),
    StandIn(
        ("fa4",), "the path for Hopper of flash-attn-4 4.0.0b36", "FlashAttention-4",
        ("cutedsl_fa4",),
    ),
    StandIn(
        ("fa2_varlen",), "PyTorch's FlashAttention-2", "the authors' one in Triton", ("fa2_jfa",)
    ),
    StandIn(("rotary_kernel",), "our rotary kernel", "theirs", ("unfused",)),
    StandIn(
        ("v1_tiled", "v1_tiled_backward"), "our v1", "the published Triton kernel",
        ("triton_gdpa",), ("gdpa_triton",), text=r"\bv1\b|`v1_tiled", subject=r"\bTriton\b",
    ),
)  # fmt: skip
"""One for each published baseline that we replaced, those included whose original runs by now."""


def outlived(results: pd.DataFrame) -> list[StandIn]:
    """List the stand-ins whose originals have times; `results`: as of `results.table`."""
    timed = {*results["impl"][results["time_us_p50"].notna()]}
    return [each for each in STAND_INS if timed & {*each.originals}]


def used(judged: pd.DataFrame) -> list[StandIn]:
    """List the stand-ins over which `claims.judged` has an answer."""
    named = {impl for names in judged["ours_baseline"] for impl in names.split(", ")}
    return [each for each in STAND_INS if named & {*each.impls}]


_PUBLISHED = r"\bclaim|\bpublish|\bannounc"


def quoted(text: str, among: Sequence[StandIn]) -> Iterator[tuple[StandIn, str]]:
    """Yield the sentences of a text that set a stand-in of `among` against what is published of its
    subject."""
    for sentence in re.split(r"(?<=[.?!])\s+|\n\s*\n", re.sub(r"^# ?", "", text, flags=re.M)):
        for each in among:
            patterns = each.text, each.subject, _PUBLISHED
            if each.text and all(re.search(x, sentence) for x in patterns):
                yield each, " ".join(sentence.split())
