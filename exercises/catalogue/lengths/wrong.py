from exercises.catalogue import Wrong

LOOP = "tl.range(start, end, BLOCK)"
WRONG = {
    "no mask": Wrong([(", mask=mask, other=0.0", "")], "unmasked-load", "tl.load(x_ptr"),
    "one block": Wrong([(LOOP, "tl.range(start, start + 1, BLOCK)")], "first-block"),
    "up to the length": Wrong([(LOOP, "tl.range(start, end - start, BLOCK)")], "length-for-end"),
    "no other": Wrong([(", other=0.0", "")], "undefined-lanes", "tl.load(x_ptr"),
}
