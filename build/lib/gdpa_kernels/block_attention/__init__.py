"""Softmax attention inside blocks of consecutive tokens: its definition and its ladder of
kernels."""
