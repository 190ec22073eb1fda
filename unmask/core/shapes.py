"""The legend of every tensor name, and the two marks of a step map.

A name ends in its shape, one letter a dimension:

    B  traces in a batch                 L  positions of the canvas, prompt included
    W  positions of one block            V  vocabulary
    T  denoising steps                   K  views of a trace, or kept candidates
    S  distinct masked states            N  questions (rows of Probes)
    M  units: (trace, term) pairs        Q  single positions asked about, flattened
"""

from torch import Tensor

GIVEN = -1
"""The step of a position that was never masked: prompt, padding, or what a branch started from."""

NEVER = 2**31 - 1
"""The step of a position that its row, retired by an end token, never filled: MASK in every state."""

NO_TOKEN = -1
"""The end token of a trace that nothing ends."""

Metrics = dict[str, Tensor]
