"""The record of this plugin's feature."""

from verl_fuse.feature import Feature, Fits

FEATURES = (
    Feature(
        "placement",
        {"placement.critic": "auto", "placement.defer": True, "elastic.enabled": True},
        measured=1.08,
        strategy="placement",
        fits=Fits("critic beside generation", "PPO", "FSDP2", "vLLM; any on CPUs", "2 ranks"),
    ),
)
