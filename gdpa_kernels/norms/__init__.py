"""Norms beside attention, each in one pass over memory: RMSNorm with the residual add, and of q and
k; and the norm of the result times a gate."""
