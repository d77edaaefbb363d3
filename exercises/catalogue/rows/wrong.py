from exercises.catalogue import Wrong

WRONG = {
    "loads all lanes": Wrong([(", mask=mask, other=0.0", "")], "unmasked-load", "tl.load("),
    "stores all lanes": Wrong([("y * y, mask=mask", "y * y")], "unmasked-store", "tl.store("),
    "every program takes the first block": Wrong(
        [("tl.program_id(0) * BLOCK + ", "")], "unwritten"
    ),
}
