"""Triton helpers that both operators use, and the norms in part.

| file      | what it holds                                                                       |
|-----------|-------------------------------------------------------------------------------------|
| ragged    | TMA descriptors that clip at the end of each sequence; loads and stores by them     |
| rows      | the same copies, issued by one role and awaited on an mbarrier                      |
| pairs     | CTA pairs of sm_100: their loads, MMAs and stores                                   |
| groups    | `Ring` and `OneWay`: buffers with the barriers between their producer and consumers |
| sequences | start and length of a sequence                                                      |
| rotation  | rotary embedding of a tile in registers                                             |
| padding,  | offsets checked on their GPU, rows behind the last sequence cleared; the kernels of |
| offsets   | that                                                                                |
| vendor    | differences between NVIDIA and AMD                                                  |
"""
