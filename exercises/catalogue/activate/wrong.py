from exercises.catalogue import Wrong

CUBIC = " + 0.035677408136300125 * x * x"
WRONG = {
    "by exp": Wrong(
        [("half * tanh(u)", "half * (1.0 - 2.0 / (tl.exp(2.0 * u) + 1.0))")],
        "more-than-one-function",
    ),
    "no cubic term": Wrong([(CUBIC, "")], "no-cubic"),
    "no half": Wrong([("half = 0.5 * x", "half = x")], "no-half"),
}
