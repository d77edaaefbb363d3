"""Measurements of the operators of `gdpa_kernels`: workloads, records, charts, tables."""
