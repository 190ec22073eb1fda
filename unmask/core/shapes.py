"""The legend of every tensor name, and the two marks of a step map.

A name ends in its shape, one letter a dimension:

    B  traces in a batch                 L  positions of the canvas, prompt included
    W  positions of one block            V  vocabulary
    T  denoising steps                   K  views of a trace, or kept candidates
    S  distinct masked states            N  questions (rows of Probes)
    M  units: (trace, term) pairs        Q  single positions asked about, flattened
    A  answers: the log-probability, and with a teacher the cross-entropy
"""

from torch import Tensor

GIVEN = -1
"""The step of a position that was never masked: prompt, padding, or filled before a branch began."""

NEVER = 2**31 - 1
"""The step of a position that was never filled, because an end token retired its row: MASK in every state."""

NO_TOKEN = -1
"""The end token of a trace that no token ends."""

Metrics = dict[str, Tensor]
