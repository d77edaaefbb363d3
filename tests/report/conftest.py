import pytest

from tests.records import writer


@pytest.fixture
def add(tmp_path):
    """Write a record of rows made on `day` and return it; the data folder is `tmp_path`."""
    return writer(tmp_path)
