from exercises.catalogue import Wrong

GOOD = '{"tensor_core": 8192, "one_stage": 13000, "two_stages": 11500}'
WRONG = {
    "one product": Wrong([(GOOD, GOOD.replace("8192", "4096"))], "one-product", "PREDICT"),
    "perfect overlap": Wrong([(GOOD, GOOD.replace("11500", "8192"))], "perfect-overlap", "PREDICT"),
    "too large": Wrong([("(128, 1)", "(128, 2)")], "too-large", "CHOOSE"),
    "the obvious choice": Wrong([("(128, 1)", "(64, 2)")], "obvious-choice", "CHOOSE"),
}
