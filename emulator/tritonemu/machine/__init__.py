"""Operations of the machines, for every dialect: barriers, copies, MMAs, views of memory.

The table is by TLX's names; `tlx` is that table, and `gluon` puts its own names over it.
"""
