"""The configuration of a training run: YAML and key=value overrides in, frozen models out, with methods and their
options by name. Everything that can be checked without a model is checked here. The public names are in `__init__.pyi`;
importing the schema does not import torch. Imports tasks and what is below it.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
