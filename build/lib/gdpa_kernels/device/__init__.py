"""Triton helpers that both operators use."""
