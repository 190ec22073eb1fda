"""unmask: reinforcement-learning post-training for masked diffusion language models.

The public names are listed in `__init__.pyi`; each is imported on first use, so that `import unmask` costs nothing.
"""

import warnings
from typing import Any

import lazy_loader

from unmask.util.version import __version__ as __version__

_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

RENAMED = {
    "STEP_LAWS": "STEP_DISTRIBUTIONS",
    "sandwich": "sandwiched_policy_gradient",
    "varied": "rewards_differ",
}
"""Old public name -> present name. Old names work until 0.3, with a warning."""


def __getattr__(name: str) -> Any:
    if name in RENAMED:
        warnings.warn(f"unmask.{name} is now unmask.{RENAMED[name]}; the old name works until 0.3", FutureWarning, 2)
        name = RENAMED[name]
    return _load(name)
