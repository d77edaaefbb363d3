"""Device functions that the kernels of gdpa share."""
