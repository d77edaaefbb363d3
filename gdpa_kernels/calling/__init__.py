"""How a call reaches a kernel; both operators, and in part the norms, go this way.

    gdpa(...)             checks, packed, jagged       arguments are checked, packed ones divided
                          sequences, lengths           offsets are read
      operator            operators, handover          PyTorch sees one operator for each direction
        implementation    ladder, rung, rankings       the rung that takes the call is chosen
          forward(batch)  base_batch, recipe           it makes the work list that it is not given
            launch        launch, launches             on a GPU, in the emulator, or only recorded

| word      | what it is                                                                           |
|-----------|--------------------------------------------------------------------------------------|
| rung      | an implementation of an operator; a ladder is all of one operator                    |
| lesson    | a rung that only teaches; a product is one that impl="auto" may take                 |
| config    | a rung's launch constants, a frozen dataclass                                        |
| offsets   | cu_seqlens, `[batch + 1]`; `Sequences` are offsets of a call, read and checked once; |
|           | `Lengths` are offsets that the layers of a model share                               |
| padding   | rows behind the last sequence, of which nothing is computed                          |
| work list | int32 tensors on the device: the tiles that the programs of a kernel compute         |
| entry     | a line of a work list                                                                |
| recipe    | all that a work list, or another thing, is made from beside offsets, and how         |
| problem   | what an implementation needs of a call or device and what it got; None: it runs      |
"""
