"""The configuration of a training run: YAML and key=value overrides in, frozen models out, with methods and their
options by name. Checks everything that needs no model. The public names are in `__init__.pyi`; importing the schema
does not import torch. Imports tasks and the rooms below.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
