"""Device functions that the kernels of gdpa share, and the host functions that launch them.

| files                               | what they do                                               |
|-------------------------------------|------------------------------------------------------------|
| work_list, ticket_list,             | make the list of tiles, by zigzag, for tickets or of whole |
| longest_first, tickets              | sequences; hand its entries to programs                    |
| activations, derivatives, custom    | the activation and its slope; registered ones              |
| polynomial                          | the activation on FMA units; forward on Blackwell          |
| masks, segments                     | causal and window masks; HSTU's contexts and targets       |
| key_tiles, query_tiles              | the walk of all masks: rows of keys, backward; keys of     |
|                                     | rows, forward                                              |
| bias_tiles, bias_gradient           | a relative bias; the gradients of its tables               |
| pointer_tiles, pages                | loads of plain kernels; of keys in pages                   |
| sums, pair_streams                  | partial outputs; the launch of forward b6 and b7           |
| gradients                           | the backward rungs: rows of a step, sums of dQ, the launch |
| two_consumers                       | backward v4 and v6                                         |
| tensor_memory                       | backward on Blackwell, all rungs                           |
| single_cta                          | those of one CTA (b1, b3); Config of b2, a cluster of two  |
| pair_steps                          | those of CTA pairs (b4 to b6)                              |

Without softmax: S = Q K^T, P = activation(scale S), O = P V; backward, with g = dO, dP = dO V^T,
dS = activation'(scale S) dP, dV = P^T dO, dK = scale dS^T Q and dQ = scale dS K.

| word     | what it is                                                                          |
|----------|-------------------------------------------------------------------------------------|
| row, key | the number of a query or a key in its sequence                                      |
| batch    | on the host a `Batch`; in kernels the number of a sequence; in those that make      |
|          | lists how many there are                                                            |
| position | where a query stands for a mask or a bias: row + shift, where shift is len_k -      |
|          | len_q with "lower_right" and 0 otherwise; a key's position is its number; in those  |
|          | that make lists a place in an order; in gradients of a bias its table of positions  |
| tile     | the rows (forward) or the keys (backward) of one head that a program works on       |
| entry    | the line of a work list for a tile; `item` is its number in the list                |
| split    | a part of a sequence's keys that is listed and summed on its own                    |
| packed   | of arithmetic: two bf16 numbers in a register, computed by one instruction; of      |
|          | tensors and keys (pages): rows of all sequences, one behind the other, not in pages |
| step     | one pass of a tile's loop; backward: rows of one query head against a tile of keys  |
| count    | the steps of this program so far, from which the stage and phase of a ring follow   |
| role     | a warp group; as a number, that of a consumer                                       |
| part     | the slice of a tile, mostly columns, that a role holds in registers at a time; in   |
|          | sums one of the partial outputs                                                     |
"""
