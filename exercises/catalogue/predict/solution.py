"""How many cycles? Predict first, run after.

One tile of forward v4: 128 rows, 512 keys, head_dim 128. The model (tritonemu/engines.py): the
tensor core does 4,096 FLOP a cycle; each of two consumers has 64 rows. A block of keys is
S = Q K^T, the activation, O += P V, and a consumer does one after the other.
"""

# >>> Cycles, within 15 %: the tensor core works, in all; the tile takes with blocks of 64 keys
# and one stage; the same with two stages. (A copy of 64 keys takes 1,000 cycles or so.)
# blank: PREDICT = {"tensor_core": None, "one_stage": None, "two_stages": None}
PREDICT = {"tensor_core": 8192, "one_stage": 13000, "two_stages": 11500}
# <<<

# >>> Which (BLOCK_N, stages) takes the fewest cycles with at most 132,000 bytes of shared
# memory? A stage holds BLOCK_N rows of K and of V, Q takes 32 KB; two bytes an element. BLOCK_N
# is 32, 64 or 128.
# blank: CHOOSE = None
CHOOSE = (128, 1)
# <<<
