"""What every test runs under. The environment is set before torch, transformers or matplotlib is imported."""

import os

from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny tensors: more threads only cost
os.environ["HF_HUB_OFFLINE"] = "1"  # no test reaches the network
os.environ["MPLBACKEND"] = "Agg"  # no test opens a window

# No deadline: the first call of a torch function takes far longer than the second.
# Derandomized: the same commit gives the same verdict.
settings.register_profile("unmask", deadline=None, derandomize=True)
settings.load_profile("unmask")
