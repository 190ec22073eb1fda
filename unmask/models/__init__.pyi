from .checkpoint import save as save
from .load import Model as Model, load_checkpoint as load_checkpoint, load_model as load_model
from .tiny import Tiny as Tiny, TinyShape as TinyShape, load_tiny as load_tiny, tiny_policy as tiny_policy
