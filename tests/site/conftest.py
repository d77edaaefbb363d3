"""What the tests of the built site share: where it is, and its pages (`page_name`, from _toc.yml).

`make book` runs them after building; `make test` does not.
"""

from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "book" / "_build" / "html"


def pages() -> list[str]:
    """Pages of _toc.yml, as paths inside the site."""
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8"))
    chapters = [chapter["file"] for part in toc["parts"] for chapter in part["chapters"]]
    return [f"{name}.html" for name in (toc["root"], *chapters)]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--screenshots", metavar="DIR", help="keep a picture of every page in DIR")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "page_name" in metafunc.fixturenames:
        metafunc.parametrize("page_name", pages())


@pytest.fixture(scope="session")
def toc() -> list[str]:
    return pages()


@pytest.fixture(scope="session")
def site() -> Path:
    if not (SITE / "index.html").exists():
        pytest.fail(f"{SITE} holds no built book: run `make book`", pytrace=False)
    return SITE
