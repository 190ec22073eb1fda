"""Models by name, by folder, or by their id on the hub: families, checkpoints, tokenizers, low-rank adapters, and
the embedded model. Imports core and util.
"""

from unmask.core.policy import CachingPolicy, Policy, Tokenizer
from unmask.models.checkpoint import save
from unmask.models.load import Model, load_checkpoint, load_model
from unmask.models.tiny import Tiny, TinyShape, load_tiny, tiny_policy

__all__ = [
    "CachingPolicy",
    "Model",
    "Policy",
    "Tiny",
    "TinyShape",
    "Tokenizer",
    "load_checkpoint",
    "load_model",
    "load_tiny",
    "save",
    "tiny_policy",
]
