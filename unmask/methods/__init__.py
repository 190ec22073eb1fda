"""The methods, one file per paper: bases (`BASES`) and plug-ins (`PLUGINS`), functions that return a Method. The
estimators and objectives of one paper are in its file; those that several use are in core. Imports rollout and the
rooms below it.
"""

from collections.abc import Callable

from unmask.core.method import Method
from unmask.methods.agrpo import agrpo
from unmask.methods.coupled_grpo import coupled_grpo
from unmask.methods.daca import daca, dps, sml
from unmask.methods.diffu_grpo import diffu_grpo
from unmask.methods.dispo import dispo
from unmask.methods.dtm import dtm
from unmask.methods.ebpo import ebpo
from unmask.methods.espo import espo
from unmask.methods.fork import fork
from unmask.methods.gspo import gspo
from unmask.methods.keep_correct import keep_correct
from unmask.methods.positive import positive
from unmask.methods.raft import raft
from unmask.methods.reinforce_pp import reinforce_pp
from unmask.methods.spg import spg
from unmask.methods.step_merge import step_merge
from unmask.methods.surprise import surprise
from unmask.methods.trace_rl import trace_rl
from unmask.methods.unigrpo import unigrpo
from unmask.methods.vine import vine
from unmask.methods.wd1 import wd1

BASES: dict[str, Callable[..., Method]] = {
    f.__name__: f
    for f in (
        diffu_grpo,
        unigrpo,
        coupled_grpo,
        wd1,
        spg,
        gspo,
        espo,
        ebpo,
        reinforce_pp,
        agrpo,
        step_merge,
        trace_rl,
        fork,
        raft,
        dtm,
        vine,
    )
}

PLUGINS: dict[str, Callable[..., Method]] = {
    f.__name__: f for f in (daca, sml, dps, surprise, dispo, positive, keep_correct)
}
