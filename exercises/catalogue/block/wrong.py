from exercises.catalogue import Wrong

WRONG = {
    "no mask of keys": Wrong(
        [('    s = tl.where((tokens < rows)[None, :], s, float("-inf"))\n', "")], "unmasked"
    ),
    "no maximum": Wrong([("s - tl.max(s, 1)[:, None]", "s")], "no-maximum", "tl.exp"),
    "no sum": Wrong([("    p = p / tl.sum(p, 1)[:, None]\n", "")], "no-sum"),
    "no softmax": Wrong(
        [
            ("tl.exp(s - tl.max(s, 1)[:, None])", "s"),
            ("    p = p / tl.sum(p, 1)[:, None]\n", ""),
            ('float("-inf")', "0.0"),
        ],
        "no-softmax",
    ),
    "stores all rows": Wrong([(".to(v.dtype), mask=mask)", ".to(v.dtype))")], "foreign-rows"),
}
