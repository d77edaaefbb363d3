"""Tables that chapters read out of the lab notes."""

import pytest

from notebooks.serving import _noted


def test_a_table_is_found_by_its_first_column(tmp_path, monkeypatch):
    monkeypatch.setattr(_noted, "NOTES", tmp_path)
    text = "# Notes\n\n| a | b, us |\n|---|--:|\n| one, 2 | 1,234.5 |\n| 8 | none |\n\n| a b |\n"
    (tmp_path / "page.md").write_text(text)
    found = _noted.table("page", "a", "b, us")
    assert found.to_dict("list") == {"a": ["one, 2", 8.0], "b, us": [1234.5, "none"]}
    with pytest.raises(LookupError, match="page.md must have one table of 'a' with 'c', got 0"):
        _noted.table("page", "a", "c")


QUOTED = (("users, rows, keys", "pieces"), ("users, history, candidates", "two calls"))


@pytest.mark.parametrize("column, other", QUOTED)
def test_the_tables_that_the_book_quotes_are_there(column, other):
    found = _noted.table("serving", column, other)
    sizes = found[column].str.replace(",(?! )", "", regex=True).str.split(", ", expand=True)
    assert len(found) >= 4 and sizes.astype(int).shape[1] == 3
    assert found.drop(columns=column).map(lambda x: isinstance(x, float)).all(axis=None)
