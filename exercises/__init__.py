"""Exercises: kernels that the reader writes, judged on a CPU.

    python -m exercises              # the list
    python -m exercises ring         # opens mine/ring.py; again: judges it

`catalogue` has the exercises: of each what is asked (`exercise.py`), a solution, and wrong answers
with the hint that each must get. `blanks` makes the reader's file from the solution, `cases` the
calls that are judged, `grading` judges, `hints` turns a failure into a hint.
"""
