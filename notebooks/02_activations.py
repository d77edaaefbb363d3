# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
# measures: true
# ---

# %% [markdown]
# # Activations and their errors
# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["hide-input"]
if mode == "measure":
    import torch

    from gdpa_kernels import measure, record
    from gdpa_kernels.gdpa import activations, reference

    session = measure.Session("notebooks/02_activations.py", device)
    x = torch.linspace(-20, 20, 2**22, device=session.device)
    rows = []
    for name, activation in reference.ACTIVATIONS.items():
        exact = activation.function(x.double())
        for approx in (True, False):
            error = (activations.evaluate(x, name, approx=approx).double() - exact).abs()
            for limit in (1.0, 4.0, 20.0):
                inside = x.abs() <= limit
                relative = error[inside] / x[inside].abs().clamp(min=1e-30)
                rows.append(
                    (name, approx, limit, error[inside].max().item(), relative.max().item())
                )
    session.tables["activation_errors"] = record.Table(
        ("activation", "approx", "range", "max_abs_error", "max_error_per_x"), rows
    )
    print(session.write(data_dir))
