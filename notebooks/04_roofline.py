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

    from gdpa_kernels import measure, timing

    session = measure.Session("notebooks/04_roofline.py", device)
    products = {}
    for size in (1024, 2048, 4096, 8192, 16384):
        shape = {"size": (size, size), "device": session.device, "dtype": torch.bfloat16}
        for values, make in {"random": torch.randn, "zeros": torch.zeros}.items():
            key = (values, size, 2 * size**3)
            products[key] = functools.partial(torch.mm, make(**shape), make(**shape))
    samples = timing.sample_kernels(products, session.device, session.protocol)
    session.tabulate("matmul", ("values", "size", "flops"), samples)
    copies = {}
    for megabytes in (4, 16, 64, 256, 1024, 4096):
        source = torch.randn(megabytes * 2**19, device=session.device, dtype=torch.bfloat16)
        key = (megabytes, megabytes * 2**21)
        copies[key] = functools.partial(torch.empty_like(source).copy_, source)
    samples = timing.sample_kernels(copies, session.device, session.protocol)
    session.tabulate("copy", ("megabytes", "bytes"), samples)
    print(session.write(data_dir))
