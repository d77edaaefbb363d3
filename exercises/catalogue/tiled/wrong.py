from exercises.catalogue import Wrong

WRONG = {
    "no mask for keys": Wrong([(", mask=mask_k, other=0.0", "")], "unmasked-load", "tl.load(k_ptr"),
    "the last keys left out": Wrong(
        [("end_k - start_k, BLOCK_N)", "(end_k - start_k) // BLOCK_N * BLOCK_N, BLOCK_N)")],
        "last-keys",
    ),
    "stores all rows": Wrong([("), mask=mask_q)", "))")], "foreign-rows", "tl.store(out_ptr"),
    "no other": Wrong(
        [("mask=mask_k, other=0.0", "mask=mask_k")], "undefined-lanes", "tl.load(k_ptr"
    ),
    "no activation": Wrong(
        [("silu(scale * tl.dot(q, k.T))", "scale * tl.dot(q, k.T)")], "activation"
    ),
    "returns without keys": Wrong(
        [("    # >>> Store", "    if end_k == start_k:\n        return\n    # >>> Store")],
        "unwritten",
    ),
    "does not go on": Wrong(
        [
            (
                "    for first_key in tl.range(0, end_k - start_k, BLOCK_N):\n",
                "    first_key = 0\n    while first_key < end_k - start_k:\n",
            )
        ],
        "endless",
        "while",
    ),
    "no scale": Wrong([("silu(scale * tl.dot(q, k.T))", "silu(tl.dot(q, k.T))")], "scale"),
}
