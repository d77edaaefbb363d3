from exercises.catalogue import Wrong, solution_of

ADDS = "        tl.atomic_add(dq_ptr + offsets, part, mask=mask)\n"
SOLUTION = solution_of("dq")
BY_KEYS = SOLUTION[SOLUTION.index("    key = tl") :]
BY_ROWS = """    dims = tl.arange(0, HEAD_DIM)
    for first in tl.range(tl.program_id(0) * BLOCK, rows, tl.num_programs(0) * BLOCK):
        row = first + tl.arange(0, BLOCK)
        mask = (row < rows)[:, None]
        total = tl.zeros([BLOCK, HEAD_DIM], tl.float32)
        for first_key in tl.range(0, keys, BLOCK):
            key = first_key + tl.arange(0, BLOCK)
            at_k = key[:, None] * HEAD_DIM + dims[None, :]
            at_ds = row[:, None] * keys + key[None, :]
            k = tl.load(k_ptr + at_k, mask=(key < keys)[:, None], other=0.0)
            ds = tl.load(ds_ptr + at_ds, mask=mask & (key < keys)[None, :], other=0.0)
            total = tl.dot(ds, k, total)
        tl.store(dq_ptr + row[:, None] * HEAD_DIM + dims[None, :], total, mask=mask)
"""
WRONG = {
    "a barrier of the warps": Wrong(
        [
            (
                ADDS,
                """        tl.debug_barrier()
        dq = tl.load(dq_ptr + offsets, mask=mask, other=0.0)
        tl.store(dq_ptr + offsets, dq + part, mask=mask)
""",
            )
        ],
        "lost-update",
        "dq_ptr",
    ),
    "atomics give the same bits": Wrong(
        [("SAME_BITS = False", "SAME_BITS = True")], "order-of-sums"
    ),
    "rows of its own, and no answer for it": Wrong([(BY_KEYS, BY_ROWS)], "no-chance"),
    "no answer": Wrong([("SAME_BITS = False", "SAME_BITS = None")], "unsaid"),
}
