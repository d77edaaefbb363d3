# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
# measures: true
# ---

# %% [markdown]
# # The published figures
# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["hide-input"]
if mode == "measure":
    from gdpa_kernels import ladder, measure
    from gdpa_kernels.baselines import BASELINES
    from gdpa_kernels.workload import FIGURES, workload

    session = measure.Session("notebooks/10_figures.py", device)
    impls = [*(rung.impl for rung in ladder.RUNGS), *BASELINES]
    names = [n for figure in FIGURES if "-fwd-" in figure for n in FIGURES[figure]]
    for name in dict.fromkeys(names):
        session.measure(workload(name), impls, scopes=("kernel", "op"))
    print(session.write(data_dir))
