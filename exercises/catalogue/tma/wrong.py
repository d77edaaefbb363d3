from exercises.catalogue import Wrong

WRONG = {
    "always the first rows": Wrong(
        [("load_rows(q_desc, start_q, len_q, head, first_row)",
          "load_rows(q_desc, start_q, len_q, head, 0)")],
        "first-rows",
    ),
    "the last keys left out": Wrong(
        [("tl.range(0, len_k, BLOCK_N)", "tl.range(0, len_k // BLOCK_N * BLOCK_N, BLOCK_N)")],
        "last-keys",
    ),
    "stores as many rows as keys": Wrong(
        [("store_rows(out_desc, start_q, len_q,", "store_rows(out_desc, start_q, len_k,")],
        "foreign-rows", "store_rows(",
    ),
    "no scale": Wrong([("k.T), scale,", "k.T), 1.0,")], "scale"),
}  # fmt: skip
