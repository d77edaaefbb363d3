"""Baselines in the place of published ones: registered, and quoted only while nothing is nearer."""

import re
from pathlib import Path

import pandas as pd
import pytest

from gdpa_kernels.calling import ladder
from gdpa_lab.measuring.baselines import BASELINES, BLOCK_BASELINES
from gdpa_lab.report import claims, results, stand_ins
from gdpa_lab.report.stand_ins import STAND_INS
from tests.report.test_claims import CLAIMS, V3, results_table

ROOT = Path(__file__).resolve().parents[2]
OURS = {"impl": "v1_tiled", "time_us_p50": 7000.0}
TRITON = {"impl": "gdpa_triton", "time_us_p50": 6600.0}
UNTIMED = TRITON | {"time_us_p50": None, "failure": "HostTooSlow: ..."}


def names(found) -> list[str]:
    return [each.title for each in found]


def test_what_is_registered_can_be_timed_and_is_published():
    known = {*BASELINES, *BLOCK_BASELINES, *ladder.impls("gdpa", "forward")}
    known |= {*ladder.impls("gdpa", "backward")}
    folder = ROOT / "data" / "published"
    tables = pd.concat(pd.read_csv(path) for path in folder.glob("*.csv"))
    for each in STAND_INS:
        assert {*each.impls, *each.originals} <= known
        assert {*each.kernels} <= {*tables["kernel"]}
        assert not {*each.impls} & {*each.originals}


def test_every_published_baseline_that_a_claim_divides_by_is_registered():
    """Its selector takes what stands in for it, or the published kernel itself."""
    by_kernel = {kernel: each for each in STAND_INS for kernel in each.kernels}
    seen = set()
    for claim in CLAIMS:
        if claim.data is None or claim.ours is None or "over" not in claim.data:
            continue
        divisor = claim.data["over"].get("kernel")
        if divisor in by_kernel:
            each = by_kernel[divisor]
            assert {*claim.ours.baseline} <= {*each.impls, *each.originals}, claim.id
            seen.add(divisor)
    assert {"triton_gdpa", "cutlass_fmha", "cutedsl_fa4"} <= seen


def test_a_stand_in_is_outlived_when_the_original_has_times():
    assert stand_ins.outlived(results_table(OURS, UNTIMED)) == []
    assert names(stand_ins.outlived(results_table(OURS, TRITON))) == ["our v1"]


def test_a_claim_over_an_outlived_stand_in_is_refused(monkeypatch):
    """The same claim is answered until then."""
    claim = next(x for x in CLAIMS if x.ours is not None and "gdpa_triton" in x.ours.baseline)
    former = claims.Selector(**vars(claim.ours) | {"baseline": ("v1_tiled",)})
    changed = claims.Claim(**vars(claim) | {"ours": former})
    rows = OURS, V3 | {"time_us_p50": 5000.0, "tflops": 480.0}
    (answer,) = claims.judged(results_table(*rows, UNTIMED), claims=[changed])["ours"]
    assert answer == pytest.approx(7000 / 5000)
    with pytest.raises(claims.ClaimError, match="must be gdpa_triton, which has times, got our v1"):
        claims.judged(results_table(*rows, TRITON), claims=[changed])


def test_used_stand_ins_are_those_of_the_answers():
    judged = pd.DataFrame({"ours_baseline": ["cudnn", "", "fa2_varlen, rotary_kernel", "fa3"]})
    assert names(stand_ins.used(judged)) == [
        "cuDNN", "PyTorch's FlashAttention-2", "our rotary kernel",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("# The page claims 1.6 times Triton; over backward v1 it\n# is {glue:text}`x`.", 1),
        ("The published factor over `v1_tiled`, the plain Triton kernel, is 2.", 1),
        ("Over v1 it is 2. The page claims 1.6 times Triton.", 0),
        ("The page claims 1.6 times Triton; over that kernel it is {glue:text}`x`.", 0),
        ("Forward v1 is a Triton kernel.", 0),
    ],
)
def test_sentences_that_quote_a_stand_in(text, count):
    assert len([*stand_ins.quoted(text, STAND_INS)]) == count


def test_no_chapter_quotes_an_outlived_stand_in():
    late = stand_ins.outlived(results.table(ROOT / "data", latest=False))
    assert names(late) == ["our v1"]
    found = []
    for path in (*ROOT.glob("notebooks/*/*.py"), *ROOT.glob("book/*.md"), ROOT / "README.md"):
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".py":
            text = "\n\n".join(re.findall(r"^# %% \[markdown\]\n((?:#.*\n)*)", text, flags=re.M))
        found += [(path.name, sentence) for _, sentence in stand_ins.quoted(text, late)]
    assert not found
