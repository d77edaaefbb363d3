from exercises.catalogue import Wrong

LOOP = "tl.range(tl.program_id(0), tiles, tl.num_programs(0))"
WRONG = {
    "everybody takes every tile": Wrong([(LOOP, "tl.range(0, tiles)")], "twice"),
    "does not step over the others": Wrong([(LOOP, "tl.range(tl.program_id(0), tiles)")], "twice"),
    "one tile a program": Wrong(
        [(LOOP, "tl.range(tl.program_id(0), tl.program_id(0) + 1)")], "left-out"
    ),
}
