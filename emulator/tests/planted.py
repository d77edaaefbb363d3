"""Mistakes that are planted in pipelines: those that fbtriton brings, and one of our own.

A mistake is an occurrence of a text in a function and all below it, and the text for it; or, for a
release that comes early, that of the release, behind which it then stands. Nothing else moves.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

import tritonemu

from .tutorials import blackwell, cases, hopper

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Pipeline:
    """A kernel: its file, and how a module made of it is run."""

    path: Path
    kernel: str
    run: Callable[[ModuleType], None]


@dataclass(frozen=True)
class Mistake:
    """kind: what is wrong. old, number: the text, and which occurrence. new: "" for a statement
    that is left out. after: for a release that comes early, its text; `old` is what it must follow.
    """

    pipeline: str
    kind: str
    old: str
    new: str = ""
    number: int = 0
    after: str = ""

    def planted(self) -> tuple[str, int]:
        """The file with the mistake, and its line."""
        pipeline = PIPELINES[self.pipeline]
        lines = pipeline.path.read_text(encoding="utf-8").splitlines(keepends=True)
        start = next(i for i, text in enumerate(lines) if f"def {pipeline.kernel}(" in text)
        where = [i for i, text in enumerate(lines) if i > start and self.old in text][self.number]
        text = lines[where]
        indent = text[: len(text) - len(text.lstrip())]
        if self.after:
            release = next(i for i in range(where, len(lines)) if self.after in lines[i])
            lines.insert(release, lines.pop(where))
            where = release - 1
        else:
            lines[where] = text.replace(self.old, self.new, 1) if self.new else f"{indent}pass\n"
        return "".join(lines), where + 1


def _tutorial(of: ModuleType, file: str, kernel: str, name: str, first: str = "") -> Pipeline:
    (case,) = (each for each in of.CASES if each.name == name)

    def run(module: ModuleType) -> None:
        previous, of.load = of.load, lambda file: module
        try:
            cases.run_case(case)
        finally:
            of.load = previous

    return Pipeline(cases.FOLDER / file, first or kernel, run)


def _relay(module: ModuleType) -> None:
    x, y = torch.arange(64.0 * 12), torch.zeros(64 * 12)
    tritonemu.run(module.relay_kernel, (1,), cases.describe(x, [64]), y, 64, 12, 3)
    assert torch.equal(y, 2 * x)


PIPELINES = {
    "attention": _tutorial(
        hopper, "hopper_fa_ws_pipelined.py", "_attn_fwd_ws_pipelined",
        "hopper_fa_ws_pipelined two groups, fp16",
    ),
    "GEMM": _tutorial(hopper, "hopper_gemm_ws.py", "matmul_kernel_tlx_ws", "hopper_gemm_ws"),
    "Blackwell": _tutorial(
        blackwell, "blackwell_gemm_ws.py", "matmul_kernel_tma_ws_blackwell", "blackwell_gemm_ws",
        first="_process_tile_epilogue_inner",
    ),
    "relay": Pipeline(HERE / "relay.py", "relay_kernel", _relay),
}  # fmt: skip

MISTAKES = (
    Mistake("attention", "arrive count", "count=NUM_MMA_GROUPS", "count=NUM_MMA_GROUPS - 1"),
    Mistake("attention", "arrive count", "count=NUM_MMA_GROUPS", "count=NUM_MMA_GROUPS + 1", 1),
    Mistake("attention", "expect bytes", "2 * BLOCK_N", "BLOCK_N", number=0),
    Mistake("attention", "expect bytes", "2 * BLOCK_N", "4 * BLOCK_N", number=1),
    Mistake("attention", "wrong phase", "(v_empty, kv_phase)", "(v_empty, kv_phase ^ 1)"),
    Mistake("attention", "wrong phase", "(k_full, k_phase)", "(k_full, k_phase ^ 1)", number=1),
    Mistake("attention", "missing wait", "tlx.barrier_wait(q_full, 0)"),
    Mistake("attention", "missing wait", "tlx.barrier_wait(k_full, k_phase)"),
    Mistake("attention", "wrong index", "(k_tiles, buf_id)", "(k_tiles, 1 - buf_id)"),
    Mistake("attention", "wrong index", "(v_fulls, v_buf_id)", "(v_fulls, 1 - v_buf_id)"),
    Mistake("attention", "swapped barrier", "(v_empties, v_buf_id)", "(k_empties, v_buf_id)"),
    Mistake("attention", "early release", "async_dot_wait(0, acc)", after="(v_empty, 1)"),
    Mistake("GEMM", "arrive count", "NUM_STAGES, arrive_count=NUM_MMA_GROUPS", "NUM_STAGES"),
    Mistake("GEMM", "expect bytes", "(full_b, BN", "(full_b, BN // 2"),
    Mistake("GEMM", "missing wait", "tlx.barrier_wait(bar=full_b, phase=p)"),
    Mistake("GEMM", "missing wait", "tlx.barrier_wait(bar=empty_b, phase=p ^ 1)"),
    Mistake("GEMM", "missing arrival", "tlx.barrier_arrive(empty_b)"),
    Mistake("GEMM", "early release", "tlx.async_dot_wait(", after="_arrive(empty_a)"),
    Mistake("GEMM", "swapped barrier", "(bars_full_b, buf)", "(bars_full_a, buf)", number=1),
    Mistake("GEMM", "wrong index", "(bars_empty_a, buf + NUM_STAGES)", "(bars_empty_a, buf)"),
    Mistake("Blackwell", "arrive count", "arrive_count=1)", "arrive_count=2)", number=1),
    Mistake("Blackwell", "missing wait", "tlx.barrier_wait(tmem_full_bars[buf_idx], tmem_"),
    Mistake(
        "Blackwell",
        "wrong phase",
        "(A_smem_empty_bars[a_buf], phase ^ 1)",
        "(A_smem_empty_bars[a_buf], phase)",
    ),
    Mistake("Blackwell", "expect bytes", "[buf], expected_bytes", "[buf], 2 * expected_bytes"),
    Mistake(
        "Blackwell", "swapped barrier", "_wait(B_smem_full_bars[buf]", "_wait(A_smem_full_bars[buf]"
    ),
    Mistake("relay", "missing fence", 'tlx.fence("async_shared")'),
    Mistake("relay", "early release", "async_descriptor_store_wait", after="_arrive(sent"),
    Mistake("relay", "missing wait", "tlx.barrier_wait(sent[slot], turn ^ 1)"),
)
