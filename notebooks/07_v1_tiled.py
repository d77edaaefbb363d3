# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
# measures: true
# ---

# %% [markdown]
# # v1
# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["hide-input"]
if mode == "measure":
    from gdpa_kernels import measure
    from gdpa_kernels.gdpa import v1_tiled, v2_tma
    from gdpa_kernels.workload import workload

    session = measure.Session("notebooks/07_v1_tiled.py", device)
    shapes = [(128, 32, 8, 4), (128, 64, 4, 2), (128, 64, 8, 3), (128, 128, 8, 2), (64, 32, 4, 3)]
    shapes += [(64, 64, 4, 3), (64, 64, 4, 2), (64, 128, 4, 2)]
    for name in ("gdpa-self-full-256", "gdpa-self-full-1024", "gdpa-cross-full-1024"):
        session.measure(
            workload(name),
            [
                (
                    module.__name__.split(".")[-1],
                    "x".join(map(str, s)),
                    {"config": module.Config(*s)},
                )
                for s in shapes
                for module in (v1_tiled, v2_tma)
            ],
        )
    print(session.write(data_dir))
