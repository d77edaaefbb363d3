# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # Published figures and ours
#
# Six charts and four tables announced these operators. What holds of each on a GPU that you can
# rent, and what differs?
#
# :::{admonition} In this chapter (5 minutes)
# You will see all ten at a glance, and find the page that measures each. Back to back on the H200
# the best kernel is {glue:text}`forward` times as fast as the best baseline in the forward pass,
# less than published at every length. In the backward pass it is {glue:text}`backward` times as
# fast, more than published up to 256 keys and less beyond.
# :::

# %% tags=["hide-input"]
import pandas as pd

from _lib.ratios import spread
from gdpa_lab.report.chapter import Chapter
from notebooks.tools import _published

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
chapter = Chapter("tools/published", mode=mode, device=device, data_dir=data_dir)
shown = _published.exhibits(chapter)
drawn = pd.concat(
    {(x.title, source): table.rename_axis("at").stack() for x in shown
     for source, table in (("measured", x.measured), ("published", x.published))},
    names=["exhibit", "source"],
)  # fmt: skip
leads = {way: [x for x in shown if f" {way}, " in x.title] for way in ("forward", "backward")}
assert len(shown) == 10 and all(len(charts) == 3 for charts in leads.values()), "the text"
more = {x.title: (x.measured > x.published)["lead"] for charts in leads.values() for x in charts}
assert not any(more[x.title].any() for x in leads["forward"]), "the text: forward less"
for x in leads["backward"]:
    few = more[x.title].index <= (2048 if x.title.startswith("cross") else 256)
    assert (more[x.title] == few).all(), "the text: backward more up to 256 keys"
for way, charts in leads.items():
    chapter.glue(**{way: spread(pd.concat([x.measured["lead"] for x in charts]))})

# %% tags=["remove-input"]
# | name: fig-published
# | caption: >
# |   **Our leads are smaller than the published ones in the forward pass; in the backward pass they
# |   are larger with few keys and shrink to nothing on long sequences.** Times as fast as the best
# |   baseline of the same machine, by length, without doubtful bars. Titles are links.
# | alt: >
# |   Ten small charts, each with measured and published factors. Forward, the measured line lies
# |   below the published one. Backward, it begins above and falls below, and lies above on
# |   cross-attention.
chapter.figure(
    _published.small_multiples(shown), data=drawn.reset_index(name="factor"),
    measured=sorted({name for x in shown for name in x.records}),
    published="six charts and tables 5 to 8, NVIDIA B200",
)  # fmt: skip

# %% [markdown]
# Times of two machines cannot be compared, so every mark is a quotient on one of them. Half-full
# batches keep their keys dense, as published.

# %% tags=["remove-input"]
links = [(x.title.partition(":")[0], x.target.partition("#")[2]) for x in shown]
columns = {"published": [f"{{ref}}`{title} <{name}>`" for title, name in links]}
columns |= {"holds": [x.holds for x in shown], "differs": [x.differs for x in shown]}
chapter.table(
    pd.DataFrame(columns), name="tab-published",
    measured="the records of the figure above", published="as above",
    caption="**Who is ahead mostly carries over; by how much does not.** Here on an H200, not as "
    "published for a B200.",
)  # fmt: skip

# %% [markdown]
# {doc}`The claims <claims>` take all published numbers one by one; {doc}`some <refuted>` contradict
# each other.
#
# ## Takeaways
#
# - A lead belongs to a kernel, a baseline and a machine. Change one, and expect another.
