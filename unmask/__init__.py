"""unmask: reinforcement-learning post-training for masked diffusion language models.

The public names are listed in `__init__.pyi`; each is imported on first use, so that `import unmask` costs nothing.
"""

import lazy_loader

from unmask.util.version import __version__ as __version__

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
