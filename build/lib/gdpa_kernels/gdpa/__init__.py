"""Generalized dot-product attention: the operator, its definition and its ladder of kernels."""
