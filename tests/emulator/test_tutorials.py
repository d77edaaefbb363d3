"""The unmodified kernels of the installed fbtriton run, are right, and raise no false alarm."""

import pytest

from gdpa_kernels import emulator

from .tutorials import blackwell, hopper
from .tutorials.cases import run_case

CASES = {case.name: case for case in (*hopper.CASES, *blackwell.CASES)}
RANDOM_SCHEDULES = 20


@pytest.mark.parametrize("name", CASES)
def test_right_under_every_schedule(name):
    for schedule in ("modelled", *range(RANDOM_SCHEDULES)):
        run_case(CASES[name], schedule)


@pytest.mark.parametrize(
    "case, errors", blackwell.FAULTY, ids=lambda value: getattr(value, "name", "")
)
def test_faults_of_the_tutorials_are_found(case, errors):
    with pytest.raises(emulator.EmulatorError) as caught:
        run_case(case)
    assert type(caught.value).__name__ in errors
