"""Layers: the operators with their projections, on jagged batches."""
