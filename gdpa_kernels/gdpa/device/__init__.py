"""Device functions that the kernels of gdpa share.

Without softmax: S = Q K^T, P = activation(scale S), O = P V; backward, with g = dO, dP = dO V^T,
dS = activation'(scale S) dP, dV = P^T dO, dK = scale dS^T Q and dQ = scale dS K.

| word     | what it is                                                                          |
|----------|-------------------------------------------------------------------------------------|
| row, key | the number of a query or a key in its sequence                                      |
| position | where a query stands for a mask: row + shift, where shift is len_k - len_q with     |
|          | "lower_right" and 0 otherwise; a key's position is its number                       |
| tile     | the rows (forward) or the keys (backward) of one head that a program works on       |
| entry    | the line of a work list for a tile; `item` is its number in the list                |
| step     | one pass of a tile's loop; backward: rows of one query head against a tile of keys  |
| count    | the steps of this program so far, from which the stage and phase of a ring follow   |
| role     | a warp group; as a number, that of a consumer                                       |
| part     | the columns that a consumer holds in registers at a time                            |
"""
