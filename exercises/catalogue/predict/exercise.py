from functools import cache

import tritonemu
from exercises.cases import gdpa_batch
from exercises.grading import Exercise
from exercises.hints import Failure, Rule
from gdpa_kernels.gdpa.ladder import v4_warp_specialized as v4

LIMIT = 132_000  # bytes of shared memory
WITHIN = 0.15


@cache
def modelled(keys: int, stages: int) -> tuple[float, float, int]:
    """(cycles of the tile, of the tensor core, bytes of shared memory)."""
    batch, config = gdpa_batch((128,), (512,), head_dim=128), v4.Config(keys, stages)
    verdict = tritonemu.check(
        lambda: v4.forward(batch, config=config), search=["modelled"], trace=True
    )
    (report,) = verdict.reports
    return report.cycles, report.timeline.busy[0]["tensor core"], report.shared_bytes


def predicted(module) -> str:
    predictions, choice = module.PREDICT, module.CHOOSE
    missing = [name for name, value in predictions.items() if value is None]
    missing += ["CHOOSE"] * (choice is None)
    if missing:
        facts = {"name": ", ".join(missing)}
        raise Failure("predicted", "predict", "no prediction", facts=facts)
    cycles = {
        "tensor_core": modelled(64, 2)[1], "one_stage": modelled(64, 1)[0],
        "two_stages": modelled(64, 2)[0],
    }  # fmt: skip
    table = ", ".join(f"{n}: {predictions[n]:,.0f}, modelled {c:,.0f}" for n, c in cycles.items())
    for name, value in cycles.items():
        facts = {"name": name, "predicted": predictions[name], "cycles": value}
        if abs(predictions[name] / value - 1) > WITHIN:
            facts["factor"] = predictions[name] / value
            raise Failure("predicted", "predicted", table, facts=facts)
    taken, _, used = modelled(*choice)
    sizes = ((n, s) for n in (32, 64, 128) for s in (1, 2))
    best = min(modelled(*each)[0] for each in sizes if modelled(*each)[2] <= LIMIT)
    if used > LIMIT or taken > best:
        facts = {"choice": choice, "cycles": taken, "used": used, "limit": LIMIT}
        kind = "choice" if used <= LIMIT else "too-large"
        raise Failure("predicted", kind, table, facts=facts)
    return f"{table}; {choice[0]} keys, {choice[1]} stage(s): {taken:,.0f} cycles, {used:,} bytes"


def within(name, low, high):
    """Fit a prediction that is so many times what it should be."""

    def when(failure):
        facts = failure.facts
        if failure.kind != "predicted" or facts["name"] != name:
            return None
        return {"line": failure.find("^PREDICT")} if low <= facts["factor"] <= high else None

    return when


def chosen(kind):
    return lambda failure: {"line": failure.find("^CHOOSE")} if failure.kind == kind else None


EXERCISE = Exercise(
    predicted=predicted,
    rules=[
        Rule(
            "one-product", within("tensor_core", 0.45, 0.55),
            "tensor_core: {predicted:,.0f} is half of {cycles:,.0f}.",
            "A block asks for two products, Q K^T and P V; a multiply-add is two FLOP.",
            "4 * rows * keys * head_dim / 4096.", "forward/planning",
        ),
        Rule(
            "perfect-overlap", within("two_stages", 0, 0.85),
            "two_stages: {predicted:,.0f} of {cycles:,.0f} cycles: the tensor core would hardly "
            "ever rest.",
            "A second stage hides the copy, but neither the activation nor the first copy.",
            "Add what the tile costs at both ends.", "forward/v4_warp_specialized",
        ),
        Rule(
            "too-large", chosen("too-large"),
            "{choice} takes {used:,} bytes of shared memory, more than {limit:,}.",
            "Q takes 32 KB, a stage 2 * BLOCK_N * 128 * 2 bytes.",
            "Fewer stages, or smaller blocks.", "operator/machine",
        ),
        Rule(
            "obvious-choice", chosen("choice"),
            "{choice}: {cycles:,.0f} cycles; another choice takes fewer in as many bytes.",
            "Two stages hide a copy behind a block. K and V have buffers of their own: with one "
            "stage, what hides the copy of the next K?",
            "Compare both choices that fill the memory.", "forward/v4_warp_specialized",
        ),
    ],
)  # fmt: skip
