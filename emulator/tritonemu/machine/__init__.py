"""What the machines do, for every dialect: barriers, copies, matrix products, views of memory.

The table is by TLX's names; `tlx` is that table, and `gluon` puts its own names over it.
"""
