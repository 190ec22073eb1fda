"""The models, by name or by folder."""

from pathlib import Path

import torch

from unmask.models.policy import Policy, Tokenizer
from unmask.models.tiny import Tiny, TinyShape, load_tiny, save, tiny_policy


def load_model(
    name_or_path: str | Path, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> Tiny:
    """The embedded model by its name, "tiny"; or a saved one, such as a run's checkpoint, by its folder."""
    if name_or_path == "tiny":
        return load_tiny(dtype=dtype, device=device)
    if (Path(name_or_path) / "config.json").is_file():
        return load_tiny(name_or_path, dtype=dtype, device=device)
    raise ValueError(f'There is no model {str(name_or_path)!r}: give "tiny" or a folder that holds a config.json.')


__all__ = ["Policy", "Tiny", "TinyShape", "Tokenizer", "load_model", "load_tiny", "save", "tiny_policy"]
