from exercises.catalogue import Wrong

SAYS = "                tlx.barrier_arrive(p_full[0])\n"
STORES = "                tlx.local_store(p[0], y.to(DTYPE))\n"
WRONG = {
    "P V does not wait for P": Wrong(
        [("                tlx.barrier_wait(p_full[0], block & 1)\n", "")],
        "p-unguarded",
        "p[0], v[stage]",
    ),
    "says that P is there before it is": Wrong(
        [(STORES + SAYS, SAYS + STORES)], "said-early", "barrier_arrive(p_full"
    ),
    "never says that P is there": Wrong([(SAYS, "")], "never-filled", "barrier_wait(p_full"),
    "K is never let go of": Wrong(
        [("mBarriers=[k_empty[stage], s_full[0]]", "mBarriers=[s_full[0]]")],
        "never-released",
        "barrier_wait(k_empty",
    ),
    "always the first S": Wrong(
        [("barrier_wait(s_full[0], block & 1)", "barrier_wait(s_full[0], 0)")],
        "stale-phase",
        "barrier_wait(s_full",
    ),
    "O begins anew": Wrong([("use_acc=block > 0", "use_acc=False")], "last-block-only"),
}
