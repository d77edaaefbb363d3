"""What measures the operators of `gdpa_kernels` and tells of it: workloads, records, charts."""
