# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
# measures: true
# ---

# %% [markdown]
# # v3
# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["hide-input"]
if mode == "measure":
    import functools
    from dataclasses import replace

    from gdpa_kernels import measure, record, timing
    from gdpa_kernels.gdpa import v2_tma, v3_persistent
    from gdpa_kernels.inputs import make_inputs
    from gdpa_kernels.schedule import ORDERS
    from gdpa_kernels.workload import workload

    session = measure.Session("notebooks/09_v3_persistent.py", device)
    base = v3_persistent.Config()
    for name in (
        "gdpa-self-full-1024",
        "gdpa-self-half-dense-512",
        "gdpa-self-half-dense-1024",
        "gdpa-self-half-jagged-512",
        "gdpa-self-half-jagged-1024",
        "gdpa-self-half-jagged-2048",
        "gdpa-self-ml1m-1024",
        "gdpa-self-ml20m-2048",
        "gdpa-self-ml25m-1024",
        "gdpa-self-kuairandpure-512",
        "gdpa-self-kuairand1k-4096",
    ):
        work = workload(name)
        variants = [
            ("v3_persistent", order, {"config": replace(base, order=order)}) for order in ORDERS
        ]
        fewer = replace(base, order="padded", num_programs=131)
        full = replace(base, order="padded", num_programs=132)
        variants += [
            ("v3_persistent", "padded, 131 programs", {"config": fewer}),
            ("v3_persistent", "padded, 132 programs", {"config": full}),
        ]
        same = {
            "config": v2_tma.Config(base.BLOCK_M, base.BLOCK_N, base.num_warps, base.num_stages)
        }
        session.measure(work, [("v2_tma", "hardware", same), *variants])
        inputs = make_inputs(work, device=session.device)
        makers = {
            order: functools.partial(
                v3_persistent.make_schedule,
                inputs.q,
                inputs.cu_seqlens_q,
                inputs.cu_seqlens_k,
                inputs.max_seqlen_q,
                replace(base, order=order),
            )
            for order in ORDERS
        }
        for sampler, how in ((timing.sample_kernels, "device"), (timing.sample_ops, "host")):
            for order, times in sampler(makers, session.device, session.protocol).items():
                row = record.Row.of(
                    work, "forward", impl="v3_persistent", math="activation", scope="schedule",
                    variant=f"{order}, {how} time", samples_us=times,
                    flops=0, bytes_read=0, bytes_written=0,
                )  # fmt: skip
                session.add(work, row)
        del inputs, makers
    print(session.write(data_dir))
