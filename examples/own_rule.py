"""Your own credit rule: `unmask bench credit examples/own_rule.py`, `unmask audit tiny-two --credit --rule ...`.

`credit` is given rollouts as an unmask.Trace and returns the weight of every token, (B, L) as trace.tokens_BL. This one
weights a token by how surprising it was: 1 - p, with p the probability that it was drawn with.
"""

from torch import Tensor

from unmask import Trace


def credit(trace: Trace) -> Tensor:
    return 1 - trace.logp_BL.exp()
