import pandas as pd
import pytest

from gdpa_lab.report import results
from tests.records import writer


@pytest.fixture
def add(tmp_path):
    """Write a record of rows made on `day` and return it; the data folder is `tmp_path`."""
    return writer(tmp_path)


@pytest.fixture(scope="session")
def every() -> pd.DataFrame:
    """All rows of the repository's records."""
    return results.table(latest=False)
