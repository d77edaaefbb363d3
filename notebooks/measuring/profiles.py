# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# measures: true
# ---

# %% [markdown]
# # Profiles of the rungs

# %% tags=["hide-input"]
from gdpa_lab.measuring.workloads import workload
from gdpa_lab.report import profiles
from gdpa_lab.report.chapter import Chapter

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
chapter = Chapter(profiles.CHAPTER, mode=mode, device=device, data_dir=data_dir)
V8, V4_BACKWARD = "v8_own_waits", "v4_warp_specialized_backward"
LADDER = {
    "forward": [
        "v0_eager", "v1_tiled", "v2_tma", "v3_persistent", "v4_warp_specialized", "v5_pingpong",
        "v6a_persistent", "v6b_stream", "v6_short_kv", "v7_packed", V8,
    ],
    "backward": ["v1_tiled_backward", "v2_fused_backward", "v2a_ordered_backward", V4_BACKWARD],
}  # fmt: skip
BLOCK = ["v0_flash", "v1_one_tile", "v2_slab", "v3_warp_specialized"]
ROTARY = ["v4_rotary", "v4a_turning_role"]
PLAN = {
    "gdpa-self-full-512": LADDER,
    "gdpa-cross-full-512": {
        "forward": ["v6_short_kv", V8], "backward": [V4_BACKWARD, "v5_short_kv_backward"]
    },
    "gdpa-cross-full-1024-kv128-d64": {"backward": [V4_BACKWARD, "v6_one_tile_backward"]},
    "gdpa-self-full-512-b256-d256": {"forward": [V8], "backward": ["v7_wide_backward"]},
    "gdpa-self-full-2048": {"forward": ["v7_packed", V8], "backward": [V4_BACKWARD]},
    "gdpa-self-lognormal-6000-b48-causal": {"forward": [V8], "backward": [V4_BACKWARD]},
    "block-fill70-4000": {"forward": BLOCK, "backward": BLOCK},
    "block-rotary-1735537": {"forward": ROTARY, "backward": ROTARY},
}  # fmt: skip


@chapter.measure
def _(session):
    calls = [
        (workload(name), way, impls) for name, ways in PLAN.items() for way, impls in ways.items()
    ]
    for of, way, impls in calls:
        session.measure(of, impls, direction=way)
    session.profile([(of, way, impl) for of, way, impls in calls for impl in impls])
