"""Ratings of a CSV file become rows: the right histories, no future, and errors in one line."""

import re

import numpy as np
import pandas as pd
import pytest
import ratings
import torch
import train

from data import HELD_OUT

SMALL = ["--size", "tiny", "--layers", "1", "--device", "cpu", "--attention", "eager"]


@pytest.fixture(scope="module")
def table() -> pd.DataFrame:
    """120 users rate 30 of 40 items, in no order. All like the first 12 of them, none the last 12,
    and each user of the others the half that is theirs."""
    rng = np.random.default_rng(0)
    rows = []
    for user in range(120):
        for item in rng.permutation(40)[:30]:
            liked = item < 12 or (item < 28 and item % 2 == user % 2)
            stars = 5.0 if liked else rng.choice((1.0, 2.0))
            rows.append((user + 7, item + 100, stars, rng.integers(1000, 1400)))
    found = pd.DataFrame(rows, columns=ratings.COLUMNS)
    return found.sample(frac=1, random_state=0).assign(note="not read")


@pytest.fixture(scope="module")
def path(table, tmp_path_factory):
    found = tmp_path_factory.mktemp("ratings") / "ratings.csv"
    table.to_csv(found, index=False)
    return str(found)


@pytest.mark.parametrize("step", (0, 5, HELD_OUT), ids=("0", "5", "held out"))
def test_rows_are_those_of_the_file(step, path, table):
    source = ratings.Ratings(path, 12, 4.0, 0.0, seed=3)
    moment = table["timestamp"].quantile(0.9)
    event, _, _ = source._draw(step, 32)
    batch = source.make_batch(source.sample(step, 32), np.arange(32), step)
    ordered = table.sort_values(["userId", "timestamp"], kind="stable").reset_index()
    ends, order = batch.lengths.cu_seqlens.tolist(), {n: i for i, n in enumerate(range(100, 140))}
    for i, (start, end) in enumerate(zip(ends, ends[1:], strict=False)):
        own = ordered.iloc[event[i]]
        assert (own["timestamp"] > moment) == (step == HELD_OUT)
        before = ordered[: event[i]]
        before = before[before["userId"] == own["userId"]].tail(12)
        assert (before["timestamp"] <= own["timestamp"]).all() and len(before) == end - start
        assert batch.items[start:end].tolist() == [order[x] for x in before["movieId"]]
        assert batch.likes[start:end].tolist() == [int(x >= 4) for x in before["rating"]]
        ages = [int(np.log2(len(before) - j)) for j in range(len(before))]
        assert batch.ages[start:end].tolist() == ages
        assert batch.shown[i] == order[own["movieId"]] and batch.label[i] == (own["rating"] >= 4)


def test_negatives_and_ranks(path):
    """Half of the rows show another item, not clicked; two ranks share the rows of one."""
    o = train.arguments([*SMALL, "--ratings", path, "--max-seqlen", "8", "--batch", "512"])
    whole = train.Loader(o, 0, 1, torch.device("cpu")).batch(0)[0]
    parts = [train.Loader(o, rank, 2, torch.device("cpu")).batch(0)[0] for rank in (0, 1)]
    rows = [torch.stack((x.shown, x.label, x.lengths.cu_seqlens.diff())) for x in (whole, *parts)]
    found = torch.cat(rows[1:], 1).T.tolist()
    assert sorted(found) == sorted(rows[0].T.tolist())
    assert 0.2 < whole.label.mean() < 0.3, "half of a half"


def test_learns_from_a_file(path):
    given = [*SMALL, "--ratings", path, "--max-seqlen", "16", "--batch", "128", "--steps", "60"]
    given += ["--lr", "1e-2", "--eval-every", "60", "--eval-batches", "2", "--candidates", "39"]
    curve = train.main([*given, "--negatives", "0.2"])["curve"]
    assert curve[60]["ne"] < 0.8 * curve[0]["ne"]
    assert curve[60]["ndcg"] > curve[0]["ndcg"] + 0.05 and curve[60]["auc"] > 0.75
    assert "bayes_ne" not in curve[60], "nobody knows it"


HEAD = "userId,movieId,rating,timestamp\n"
GOOD = "1,1,5,100\n1,2,1,200\n"
WRONG = {
    "no file": (None, r"--ratings: must be a CSV file, got \S+"),
    "empty": ("", r"--ratings: must be a CSV file, got \S+: No columns .*"),
    "no rows": (HEAD, r"--ratings: must have ratings, got none in \S+"),
    "ml-1m": ("1::1193::5::978300760\n1::9::1::4\n", "--ratings: must have the columns "
              "userId, movieId, rating, timestamp, got 1::1193::5::978300760"),
    "columns": ("userId,movieId,timestamp\n1,1,1\n", "--ratings: must have the columns "
                "userId, movieId, rating, timestamp, got userId, movieId, timestamp"),
    "names": (HEAD + "9,1,1,5,100\n9,1,2,1,200\n",
              r"--ratings: must have a name for each column, got fewer than values in \S+"),
    "names over a count": (HEAD + "0,1,1,5,100\n1,1,2,1,200\n2,1,3,1,200\n",
                           r"--ratings: must have a name for each column, got fewer .* \S+"),
    "long row": (HEAD + GOOD + "1,1,5,100,2\n", r"--ratings: must be a CSV file, got .* line 4.*"),
    "user": (HEAD + GOOD + ",1,5,100\n", "--ratings: userId must be given, got nan in row 3"),
    "item": (HEAD + "1,,5,100\n" + GOOD, "--ratings: movieId must be given, got nan in row 1"),
    "word": (HEAD + GOOD + "1,1,good,100\n",
             r"--ratings: rating must be a number from 0.5 to 5.0, got good in row 3"),
    "percent": (HEAD + GOOD + "1,1,80,100\n",
                r"--ratings: rating must be a number from 0.5 to 5.0, got 80 in row 3"),
    "date": (HEAD + "1,1,5,2020-01-01\n", "--ratings: timestamp must be whole seconds since 1970, "
             "got 2020-01-01 in row 1"),
    "negative": (HEAD + GOOD + "1,1,5,-1\n",
                 "--ratings: timestamp must be whole seconds since 1970, got -1 in row 3"),
    "all liked": (HEAD + "1,1,5,100\n1,2,5,200\n", "--ratings: must have ratings below and from "
                  r"4.0 on among those trained on, got 1 of 1 from 4.0 on in \S+"),
}  # fmt: skip


def rows_of(*users: str, items: tuple[str, ...] = ("7",)) -> str:
    """Ratings of a file, a user each."""
    rows = enumerate(zip(users, items * len(users), strict=False))
    return HEAD + "".join(f"{user},{item},5,{100 + i}\n" for i, (user, item) in rows)


@pytest.mark.parametrize("users", (
    ("NA", "null", "None", "nan"), ("01", "1", "1.0", "1e0"), ("99999999999999999999", "1"),
    ("10", "9", "-1"),
), ids=",".join)  # fmt: skip
def test_a_name_is_what_it_spells(users, tmp_path):
    """Of a user and of an item; a word among them changes nothing."""
    path = tmp_path / "ratings.csv"
    for more in ((), ("word",)):
        names = (*users, *more, users[0])
        path.write_text(rows_of(*names, items=names))
        read = ratings.read(str(path))
        assert len(read) == len(names)
        for column in ratings.COLUMNS[:2]:
            assert set(map(str, read[column])) == {*users, *more}


def test_integers_sort_as_numbers(tmp_path):
    path = tmp_path / "ratings.csv"
    path.write_text(rows_of("10", "9"))
    assert ratings.read(str(path))["userId"].tolist() == [9, 10]


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_file_is_refused_in_one_line(case, tmp_path):
    text, message = WRONG[case]
    path = tmp_path / "ratings.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit) as stopped:
        train.main([*SMALL, "--ratings", str(path)])
    assert re.fullmatch(message, str(stopped.value).rstrip()), stopped.value


@pytest.mark.parametrize(
    ("given", "message"),
    (
        (["--ratings", "x.csv", "--law", "full"], "--law needs no --ratings, got --law full"),
        (["--like", "3"], "--like needs --ratings, got --like 3.0"),
    ),
)
def test_options_of_other_data_are_refused(given, message, capsys):
    with pytest.raises(SystemExit):
        train.main([*SMALL, *given])
    assert capsys.readouterr().err.endswith(f": {message}\n")
