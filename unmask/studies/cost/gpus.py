"""The GPUs that a dry run knows. Imports no torch."""

# Dense bf16 and plain fp32 TFLOP/s, TB/s and GiB of the data sheets.
GPUS = {
    "h200": ("NVIDIA H200", 989, 67, 4.8, 140),
    "h100": ("NVIDIA H100 80GB", 989, 67, 3.35, 80),
    "a100-80": ("NVIDIA A100 80GB", 312, 19.5, 2.04, 80),
    "4090": ("NVIDIA GeForce RTX 4090", 165, 82.6, 1.01, 24),
}
NAMES = (*GPUS, "cpu")


def check_hardware(name: str) -> None:
    """ValueError for a name that is not in the table."""
    if name not in NAMES:
        raise ValueError(f"--hardware: unknown {name!r}; choose one of {', '.join(NAMES)}")
