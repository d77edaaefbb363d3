# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# reads: chapters
# ---

# %% [markdown]
# # What we got wrong
#
# Every chapter states what it expects before it shows what it found. How often was it right?
#
# :::{admonition} In this chapter (15 minutes)
# You will see all {glue:text}`all:.0f` predictions of this book, what refuted
# {glue:text}`refuted:.0f` of them, and the {glue:text}`predicted:.0f` that stood in git before the
# record that judges them.
# :::

# %% tags=["hide-input"]
import pandas as pd

from _lib import rare_charts
from gdpa_lab.report.chapter import Chapter
from notebooks.measuring import _refuted

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
chapter = Chapter("measuring/got_wrong", mode=mode, device=device, data_dir=data_dir)
predictions = _refuted.judged()
wrong = predictions[predictions["word"] == "refuted"]
causes = wrong["cause"].value_counts()
away = 100 * predictions["margin"].abs()  # of the limit; none beside a limit of 0
on_axis = away.where(away > 0).dropna().clip(lower=0.1)
rows = predictions["cause"].where(predictions["word"] == "refuted", "confirmed")[on_axis.index]
order = pd.Categorical(rows, [*causes.index, "confirmed"])
shown = pd.DataFrame({"row": order, "value": on_axis.where(rows != "confirmed", -on_axis)})
worst = on_axis[rows != "confirmed"].nlargest(3)
halfway = on_axis[rows != "confirmed"].median()

# %% tags=["remove-input"]
# | name: fig-got-wrong
# | caption: >
# |   **Most misses are near misses, and what memory does is the most frequent cause.** How far each
# |   prediction lies from its nearest limit, as a share of the limit: outside it for the refuted
# |   ones, by cause, the two most frequent in colour; inside it, to the left, for the confirmed.
# | alt: >
# |   Rows of dots on an axis that is logarithmic on both sides of zero. Most refuted predictions
# |   are a few to some tens of per cent outside; a handful are off by their own size or more. The
# |   row of the confirmed ones, left of zero at the bottom, is the longest.
chart = rare_charts.swarm(
    shown.sort_values("row"), xlabel="distance from the limit (%): inside, outside", mirrored=True,
    grey=[x for x in shown["row"].unique() if x not in causes.index[:2]],
    levels={f"half of the misses: {halfway:.0f} %": halfway},
    finding=f"Worst: {', '.join(f'{rows[n]} by {x:,.0f} %' for n, x in worst.items())}.",
)  # fmt: skip
chapter.figure(
    chart, data=predictions.reset_index(), computed="the verdicts of all chapters, as built"
)

# %% tags=["remove-cell"]
by = predictions.groupby("standing")["word"].value_counts().unstack(fill_value=0)
assert [*causes.index[:2]] == ["L2 and memory", "instructions"], "the text says so of both"
assert (away[wrong.index] < 25).mean() > 0.5, "the caption: near misses"
chapter.glue(
    all=len(predictions), refuted=len(wrong), share=100 * len(wrong) / len(predictions),
    predicted=by.loc["predicted"].sum(), predicted_wrong=by.loc["predicted", "refuted"],
    first=causes.index[0], most=causes.iloc[0],
    predicted_refuted=100 * by.loc["predicted", "refuted"] / by.loc["predicted"].sum(),
    other_refuted=100 * by["refuted"].drop("predicted").sum() / by.drop("predicted").sum().sum(),
    median=away[wrong.index].median(), zero=len(away) - len(on_axis),
)  # fmt: skip

# %% [markdown]
# Of all predictions {glue:text}`share:.0f` % were refuted, half of them by more than
# {glue:text}`median:.0f` % of the limit. The figure leaves out {glue:text}`zero:.0f`, which sit on
# their limit or have a limit of 0.
#
# ## What counts as a prediction
#
# A sentence written after the measurement can be honest and still not be a prediction. So a chapter
# says "Predicted", with a commit, only if three things hold: that commit contains the limits, it is
# older than the first record that could judge them, and the answer was not known. "Known before"
# means that it was, from a published figure, an older record, or a run of a prototype that left
# none. The rest is "Expected", a check of our own understanding.

# %% tags=["remove-input"]
order = ["predicted", "known before", "expected"]
chapter.table(
    by.loc[order].reset_index(), name="tab-wrong-standing",
    computed="data/predictions/h200.csv and the verdicts",
    caption="**Fewer than half of the predictions deserve the name.** By what git and the records "
    "say of them.",
)  # fmt: skip
assert by.loc["predicted"].sum() < len(predictions) / 2, "the caption: fewer than half"

# %% [markdown]
# Of the predicted ones {glue:text}`predicted_refuted:.0f` % were refuted, of the others
# {glue:text}`other_refuted:.0f` %.
#
# ## By cause: one lesson for each refuted prediction


# %% tags=["remove-cell"]
def linked(rows):
    """Predictions with what was said, its chapter, and the value alone that was found."""
    said = [f"{text} ({{doc}}`{slug.split('/')[1]} <../{slug}>`)"
            for text, slug in zip(rows["text"], rows["chapter"], strict=True)]  # fmt: skip
    values = rows["found"].str.split(" (", regex=False).str[0]
    return rows.assign(**{"we said": said, "found": values})


# %% tags=["remove-input", "list"]
shown = pd.concat([wrong[wrong["cause"] == cause] for cause in causes.index])
named = shown["cause"] + " (" + shown["cause"].map(causes).astype(str) + ")"
shown = linked(shown).assign(by=named.where(~named.duplicated(), ""))
columns = {"by": "cause", "we said": "we said", "limits": "predicted", "found": "found",
           "lesson": "what was left out"}  # fmt: skip
chapter.table(
    shown[list(columns)].rename(columns=columns), name="tab-wrong-refuted",
    computed="the verdicts of all chapters; cause and lesson are ours",
    caption="**Refuted predictions by cause, the most frequent first.** What a chapter said, its "
    "limits, what was found, and what the model had left out.",
)  # fmt: skip

# %% [markdown]
# ## What the list says
#
# The largest group is *{glue:text}`first`*, with {glue:text}`most:.0f`. The bytes were nearly
# always counted right. What was wrong is what memory makes of them: an addition fetches its line
# first, latency grows under load, a gather does not stream, and bytes saved where none were short
# buy no time. The next group says the same of instructions: a count says what a unit must do, not
# what waits for what.
#
# Narrow limits fail at the edge, and a control in {doc}`../forward/v6_short_kv` shows why: two
# kernels that do the same work differ there by more than many of our limits are wide.
#
# ## The predictions that were confirmed
#
# A chapter shows at most three of its predictions. With the table above, this one has all others:

# %% tags=["remove-input", "list"]
right = linked(predictions[predictions["word"] == "confirmed"])
columns = {"we said": "we said", "limits": "predicted", "found": "found"}
chapter.table(
    right[list(columns)].rename(columns=columns), name="tab-wrong-confirmed",
    computed="the verdicts of all chapters, as built",
    caption="**Confirmed predictions, by chapter.** What a chapter said, its limits, and what was "
    "found.",
)  # fmt: skip

# %% [markdown]
# ## Takeaways
#
# - Write the interval down and commit it before the run. Memory edits predictions.
# - A count bounds a time from below. It predicts the time only where nothing else can wait.
# - Ask of each refuted prediction what was not counted, and count it the next time.
