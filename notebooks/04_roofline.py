# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
# measures: true
# ---

# %% [markdown]
# # Roofline
# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["hide-input"]
if mode == "measure":
    import functools

    import torch

    from gdpa_kernels import measure, record, timing

    session = measure.Session("notebooks/04_roofline.py", device)
    products, flops = {}, {}
    for size in (1024, 2048, 4096, 8192, 16384):
        shape = {"size": (size, size), "device": session.device, "dtype": torch.bfloat16}
        for values, make in {"random": torch.randn, "zeros": torch.zeros}.items():
            a, b = make(**shape), make(**shape)
            products[values, size] = functools.partial(torch.mm, a, b)
        flops[size] = 2 * size**3
    samples = timing.sample_kernels(products, session.device, session.protocol)
    session.tables["matmul"] = record.Table(
        ("values", "size", "flops", "samples_us"),
        [(values, size, flops[size], times) for (values, size), times in samples.items()],
    )
    copies = {}
    for megabytes in (4, 16, 64, 256, 1024, 4096):
        source = torch.randn(megabytes * 2**19, device=session.device, dtype=torch.bfloat16)
        copies[megabytes] = functools.partial(torch.empty_like(source).copy_, source)
    samples = timing.sample_kernels(copies, session.device, session.protocol)
    session.tables["copy"] = record.Table(
        ("megabytes", "bytes", "samples_us"),
        [(size, size * 2**21, times) for size, times in samples.items()],
    )
    print(session.write(data_dir))
