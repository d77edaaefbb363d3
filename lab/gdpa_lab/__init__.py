"""Measures the operators of `gdpa_kernels` and reports on them: workloads, records, charts."""
