from exercises.catalogue import Wrong

COUNTS = "                used += blocks\n"
OPENS = "                # >>>\n"
STAGE = """                    stage = (used + block) % STAGES
                    phase = ((used + block) // STAGES) & 1
                    tlx.barrier_wait(k_full"""
REWRITTEN = """                    stage = done % STAGES
                    phase = (done // STAGES) & 1
                    done += 1
                    tlx.barrier_wait(k_full"""
BEGINS = "            used = 0\n            phase_q = 0\n            for"
WRONG = {
    "both sides begin again": Wrong([(COUNTS, "")], "ring-restarts"),
    "counts tiles": Wrong(
        [(OPENS + COUNTS, OPENS + COUNTS.replace("blocks", "1"))], "wrong-step", "used += 1"
    ),
    "rewritten": Wrong(
        [(OPENS + COUNTS, OPENS), (BEGINS, BEGINS.replace("used", "done")), (STAGE, REWRITTEN)],
        "too-much-changed",
    ),
}
