"""RMSNorm beside attention, in one pass over memory: with the residual add, and of q and k."""
