from exercises.catalogue import Wrong

ARRIVES = "                tlx.barrier_arrive(empty[stage])\n"
ENDS = "                acc = tlx.async_dot_wait(0, acc)\n"
FETCHES_V = (
    "                fetch_rows(v_desc, v[stage], v_full[stage], start_k, len_k, head, key)\n"
)
EMPTY = "tlx.barrier_wait(empty[stage]"
WRONG = {
    "lets go before P V has ended": Wrong(
        [(ENDS + ARRIVES, ARRIVES + ENDS)], "released-too-early", "barrier_arrive(empty"
    ),
    "never lets go": Wrong([(ARRIVES, "")], "never-released", EMPTY),
    "the producer waits for phase 0": Wrong(
        [(EMPTY + ", phase ^ 1)", EMPTY + ", phase)")], "first-wait-parity", EMPTY
    ),
    "one arrival, two consumers": Wrong(
        [("tlx.alloc_warp_barrier(STAGES, 4, CONSUMERS)", "tlx.alloc_barriers(STAGES)")],
        "arrival-count", "empty = tlx.alloc_barriers(STAGES)",
    ),
    "arrivals that nobody makes": Wrong(
        [("tlx.alloc_warp_barrier(STAGES, 4, ", "tlx.alloc_warp_barrier(STAGES, 8, ")],
        "count-too-high", "empty = ",
    ),
    "a phase for each block": Wrong(
        [("phase = (block // STAGES) & 1", "phase = block & 1")], "phase-per-turn", "block & 1"
    ),
    "a consumer waits with phase ^ 1": Wrong(
        [("barrier_wait(k_full[stage], phase)", "barrier_wait(k_full[stage], phase ^ 1)")],
        "passed-unfilled", "barrier_wait(k_full",
    ),
    "does not wait for V": Wrong(
        [("                tlx.barrier_wait(v_full[stage], phase)\n", "")],
        "read-before-full", "tlx.async_dot(p, v[stage]",
    ),
    "does not wait for empty": Wrong(
        [("                tlx.barrier_wait(empty[stage], phase ^ 1)\n", "")],
        "filled-twice", "fetch_rows(k_desc",
    ),
    "V is never fetched": Wrong(
        [(FETCHES_V, "")],
        "never-filled", "barrier_wait(v_full",
    ),
    "fetches K as V": Wrong([("fetch_rows(v_desc", "fetch_rows(k_desc")], "v-is-k"),
    "the last keys left out": Wrong([("tl.cdiv(len_k, BLOCK_N)", "len_k // BLOCK_N")], "last-keys"),
    "no sum over blocks": Wrong(
        [("tlx.async_dot(p, v[stage], acc)", "tlx.async_dot(p, v[stage])")], "last-block-only"
    ),
}  # fmt: skip
