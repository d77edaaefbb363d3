# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
# measures: true
# ---

# %% [markdown]
# # How we measure
# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["hide-input"]
if mode == "measure":
    import time
    from dataclasses import replace

    import torch

    from gdpa_kernels import measure, timing
    from gdpa_kernels.gdpa import v2_tma
    from gdpa_kernels.inputs import make_inputs
    from gdpa_kernels.workload import workload

    session = measure.Session("notebooks/05_measuring.py", device)
    for name in ("gdpa-self-full-256", "gdpa-self-full-1024"):
        replicates = [("v2_tma", f"replicate {i}", {}) for i in range(8)]
        session.measure(workload(name), replicates)

    def call(work, zeros=False, scale=128**-0.5):
        inputs = make_inputs(work, device=session.device)
        arguments = inputs.arguments() | {"activation": ("gelu_tanh",), "scale": scale}
        if zeros:
            arguments |= {name: torch.zeros_like(arguments[name]) for name in "qkv"}
        return lambda: v2_tma.forward(**arguments)

    samples = {}
    for name in ("gdpa-self-full-256", "gdpa-self-full-1024"):
        work = workload(name)
        small = replace(work, batch=32)
        protocol = session.protocol
        cold = replace(protocol, interleaved=False)
        warm = replace(cold, l2_flush_bytes=0)
        bare = replace(warm, pause_us=0.0, warmup=0)
        for what, function, how in (
            ("ours", call(work), cold),
            ("all inputs zero", call(work, zeros=True), cold),
            ("scale 1, as published", call(work, scale=1.0), cold),
            ("no L2 flush", call(work), warm),
            ("no L2 flush, no lead, no warm-up", call(work), bare),
            ("ours, batch 32", call(small), cold),
            ("no L2 flush, batch 32", call(small), warm),
            ("no L2 flush, no lead, no warm-up, batch 32", call(small), bare),
        ):
            times = timing.sample_kernels({"x": function}, session.device, how)["x"]
            flops = (small if "batch 32" in what else work).flops("forward")
            samples[name, what, flops] = times
        function = call(work)
        torch.cuda.synchronize()
        times = []
        for _ in range(30):
            begin = time.perf_counter()
            function()
            times.append((time.perf_counter() - begin) * 1e6)
        torch.cuda.synchronize()
        samples[name, "host clock, no synchronisation", work.flops("forward")] = times
    session.tabulate("protocols", ("workload", "protocol", "flops"), samples)
    print(session.write(data_dir))
