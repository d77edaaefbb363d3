from tests.report.conftest import add

__all__ = ["add"]
