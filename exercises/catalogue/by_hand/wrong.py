from exercises.catalogue import Wrong

WRONG = {
    "no derivative": Wrong([("dp * 2.0 * positive", "dp")], "no-derivative"),
    "half of the derivative": Wrong([("dp * 2.0 * positive", "dp * positive")], "half-derivative"),
    "no scale": Wrong([("scale * tl.dot(ds", "tl.dot(ds")], "no-scale"),
    "P as it is": Wrong([("tl.dot(p.T, grad)", "tl.dot(p, grad)")], "untransposed"),
}
