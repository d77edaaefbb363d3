from exercises.catalogue import Wrong

LETS_GO = "                tlx.barrier_arrive(empty[0])\n"
READS = "                x = tlx.local_load(buffer[0])\n"
WRONG = {
    "the producer waits for phase 0": Wrong(
        [("barrier_wait(empty[0], (block & 1) ^ 1)", "barrier_wait(empty[0], block & 1)")],
        "first-wait-parity", "barrier_wait(empty",
    ),
    "the consumer waits for parity 1": Wrong(
        [("barrier_wait(full[0], block & 1)", "barrier_wait(full[0], (block & 1) ^ 1)")],
        "passed-unfilled", "barrier_wait(full",
    ),
    "never lets go": Wrong([(LETS_GO, "")], "never-released", "barrier_wait(empty"),
    "lets go before it reads": Wrong(
        [(READS + LETS_GO, LETS_GO + READS)], "released-too-early", "barrier_arrive(empty"
    ),
    "always phase 0": Wrong([("barrier_wait(full[0], block & 1)", "barrier_wait(full[0], 0)")],
        "stale-phase", "barrier_wait(full",
   ),
    "two producers are counted": Wrong(
        [("full = tlx.alloc_barriers(1)", "full = tlx.alloc_barriers(1, 2)")],
        "count-too-high", "full = ",
    ),
}  # fmt: skip
