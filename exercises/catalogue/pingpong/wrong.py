from exercises.catalogue import Wrong

ENDS = "                acc = tlx.async_dot_wait(0, acc)\n"
LETS_GO = "                tlx.barrier_arrive(v_empty[v_stage])\n"
WRONG = {
    "waits for both": Wrong(
        [("tlx.async_dot_wait(1, s)", "tlx.async_dot_wait(0, s)")], "no-overlap"
    ),
    "lets go of V before P V has ended": Wrong(
        [(ENDS + LETS_GO, LETS_GO + ENDS)], "released-too-early", "barrier_arrive(v_empty"
    ),
    "the last block left out": Wrong(
        [("            acc = tlx.async_dot(p.to(DTYPE), v[last], acc)\n", "")], "last-block-missing"
    ),
    "does not wait for V": Wrong(
        [("                tlx.barrier_wait(v_full[v_stage], ((block - 1) // STAGES) & 1)\n", "")],
        "read-before-full",
        "tlx.async_dot(p, v[v_stage]",
    ),
    "never lets go of V": Wrong([(LETS_GO, "")], "never-released", "barrier_wait(v_empty"),
}
