"""Models by name, by folder, or by their id on the hub: families, checkpoints, tokenizers, low-rank adapters, and
the embedded model. Imports core and util. The public names are in `__init__.pyi`; each is imported on first use.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
