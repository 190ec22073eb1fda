"""Rollout steps with static shapes, captured as CUDA graphs: a replay launches all kernels of a step at once.

A captured step reads and writes fixed addresses. So everything it touches is held in buffers that are filled again for
each rollout: the trace, the rows that are live, the keys and values of a cache, what is recorded, and a clock with the
number of the block, the step and how many positions it commits. One graph then serves all blocks and all rollouts with
the same shape: rows, columns, positions to draw at. To need few graphs, rows and positions are rounded up. So are the
columns that a block-causal model attends to; those that are too many are masked.

The first step of a shape runs as it is, the second is captured, and the others are replayed. Noise is a function of
(row seed, step, position), so a replay draws what the step would have drawn. The graphs share one memory pool.
"""

import warnings
from collections.abc import Callable, Hashable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from unmask.core.order import ORDERS, order_name
from unmask.core.policy import Memory, Policy, StaticPolicy
from unmask.core.trace import Trace
from unmask.rollout.recorder import RolloutRecorder
from unmask.util.metering import Meter, PassCounterMixin, count_passes

if TYPE_CHECKING:
    from unmask.rollout.decoding import Decoding

COLUMNS = 32
"""Padded canvases are widened to a multiple of this number of columns."""
PARTS = 4
"""The positions that a step draws at are rounded up to a quarter, a half, ... of the block."""
REACH = 256
"""The columns that a block-causal model attends to are rounded up to a multiple of this number."""
MOST = 256
"""Graphs that are kept."""


@dataclass
class _Step:
    forwards: float
    """The passes it counts for, since a replay calls no model."""
    graph: torch.cuda.CUDAGraph | None = None


class Graphs:
    """Captured steps and their buffers. Keep it for all rollouts of a model: a new one has to capture again."""

    def __init__(self, wanted: bool | None = None, captures: bool = True) -> None:
        """`wanted`: None captures on a GPU where it is possible, and False never. True has static shapes also on a CPU.
        `captures`: False runs the static steps without capturing them."""
        self.wanted, self.captures = wanted, captures
        self.buffers: dict[str, Tensor] = {}
        self.memories: dict[Hashable, Memory] = {}
        self.recorders: dict[Hashable, RolloutRecorder] = {}
        self.steps: dict[Hashable, _Step] = {}
        self.pool: Any = None
        self.stream: torch.cuda.Stream | None = None
        self.addresses: Hashable = None
        self.decoding: Decoding | None = None
        self.on_gpu = False

    def apply_to(self, policy: Policy, decoding: "Decoding", device: torch.device) -> bool:
        """Whether these rollouts have static steps; if not though they are wanted, a warning says why.

        Drops all graphs if the model's weights have other addresses than before.
        """
        on_gpu = device.type == "cuda"
        if not (on_gpu if self.wanted is None else self.wanted):
            return False
        why = obstacle(policy, decoding)
        if why is not None:
            warnings.warn(f"rollouts run without CUDA graphs: {why}", stacklevel=2)
            return False
        assert isinstance(policy, StaticPolicy)
        addresses = (id(policy), policy.addresses())
        if addresses != self.addresses or len(self.steps) > MOST:
            self.drop()
        self.addresses, self.on_gpu = addresses, on_gpu
        self.decoding = replace(decoding, graphs=Graphs(False))  # which has these graphs: no cycle, so memory is freed
        return True

    def drop(self) -> None:
        """Forget all graphs. Buffers stay."""
        if any(step.graph is not None for step in self.steps.values()):
            torch.cuda.synchronize()
        self.steps.clear()
        self.pool = None  # the memory of the old one is freed with its last graph

    def release(self) -> None:
        """Forget all graphs, and free the buffers."""
        self.drop()
        for kept in (self.buffers, self.memories, self.recorders):
            kept.clear()

    def hold(self, name: str, value: Tensor) -> Tensor:
        """The value, copied to the buffer of this name. Tensors of all shapes share it: the last one is valid."""
        buffer = self.buffers.get(name, value.new_empty(0))
        if len(buffer) < value.numel() or (buffer.dtype, buffer.device) != (value.dtype, value.device):
            self.drop()
            self.buffers[name] = buffer = value.new_empty(value.numel())
        held = buffer[: value.numel()].view(value.shape)
        return held if held.data_ptr() == value.data_ptr() else held.copy_(value)

    def hold_trace(self, trace: Trace) -> Trace:
        """The trace in buffers; `copy_of` it when it is finished."""
        names = [f.name for f in fields(trace) if f.name.endswith("_BL")]
        held: dict[str, Any] = {name: self.hold(name, getattr(trace, name)) for name in names}
        return replace(trace, **held)

    def recorder(self, new: RolloutRecorder) -> RolloutRecorder:
        """The recorder that earlier rollouts of this kind wrote to, cleared; the new one if there were none."""
        kept = self.recorders.setdefault((self.decoding, new.record, new.batch), new)
        kept.clear()
        return kept

    def memory(self, name: Hashable, rows: int, width: int, make: Callable[[], Memory]) -> Memory:
        """A memory for so many canvases, in buffers that memories of all shapes share. `make` makes a larger one."""
        held = self.memories.get(name)
        if held is None or len(held.keys[0]) * held.keys[0].shape[2] < rows * width:
            self.drop()
            held = None  # two would not fit
            self.memories.pop(name, None)
            self.memories[name] = held = make()

        def part(whole_SHLD: Tensor) -> Tensor:
            _, heads, _, channels = whole_SHLD.shape
            return whole_SHLD.flatten()[: rows * heads * width * channels].view(rows, heads, width, channels)

        return Memory([part(key) for key in held.keys], [part(value) for value in held.values], None)

    def run(self, shape: Hashable, policy: Policy, step: Callable[[], None]) -> None:
        """Take a step of the present rollouts, captured if one of this shape has been taken before."""
        shape = (self.decoding, shape)
        known = self.steps.get(shape)
        if known is None:
            with count_passes(meter := Meter(), policy):
                step()
            self.steps[shape] = known = _Step(meter.forwards)
        else:
            if known.graph is None and self.captures and self.on_gpu:
                known.graph = self._captured(policy, step)
            if known.graph is not None:
                known.graph.replay()
            else:
                with count_passes(None, policy):
                    step()
        if isinstance(policy, PassCounterMixin) and policy.meter is not None:
            policy.meter.forwards += known.forwards

    def _captured(self, policy: Policy, step: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        self.pool = torch.cuda.graph_pool_handle() if self.pool is None else self.pool
        self.stream = torch.cuda.Stream() if self.stream is None else self.stream
        try:
            with (
                count_passes(None, policy),
                torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"),
            ):
                step()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise RuntimeError("a rollout step cannot be captured as a CUDA graph: set rollout.graphs=false") from error
        return graph

    def bytes(self) -> dict[str, int]:
        """The memory it keeps between rollouts: pool of the graphs, and buffers."""
        tensors = [*self.buffers.values()]
        tensors += [part for memory in self.memories.values() for part in (*memory.keys, *memory.values)]
        segments = [] if self.pool is None else torch.cuda.memory_snapshot()
        pool = sum(part["total_size"] for part in segments if tuple(part["segment_pool_id"]) == self.pool)
        return {"pool": pool, "buffers": sum(tensor.numel() * tensor.element_size() for tensor in tensors)}


def obstacle(policy: Policy, decoding: "Decoding") -> str | None:
    """Why steps of these rollouts cannot have static shapes; None if they can."""
    if not isinstance(policy, StaticPolicy):
        return "this model has no passes that can be captured"
    if decoding.sampling.top_p < 1:
        return "rollout.top_p keeps a number of tokens that is not known before"
    if order_name(decoding.order) not in ORDERS:
        return "an order of your own may wait for the device"
    return policy.capture_obstacle()


def copy_of(trace: Trace, width: int) -> Trace:
    """The last `width` columns of a trace that is held, and what was recorded, outside the buffers."""
    names = [f.name for f in fields(trace) if f.name.endswith("_BL")]
    parts: dict[str, Any] = {name: getattr(trace, name)[:, -width:].clone() for name in names}
    return replace(trace, **parts, seen={name: value.clone() for name, value in trace.seen.items()})


def columns_of(width: int, most: int) -> int:
    """The columns of padded canvases, rounded up."""
    return max(width, min(most, -(-width // COLUMNS) * COLUMNS))


def reach_of(reach: int, width: int) -> int:
    """The columns that a block-causal model attends to, rounded up."""
    return min(width, -(-reach // REACH) * REACH)


def rows_of(count: int) -> int:
    """Rows rounded up to 1, 2, 3, 4, 6, 8, 12, 16, 24, ..."""
    power = 1 << max(0, count - 1).bit_length()
    return count if count < 2 else power * 3 // 4 if count <= power * 3 // 4 else power


def positions_of(count: int, block: int) -> int:
    """Positions of a block to draw at, rounded up to a multiple of a quarter of it."""
    part = -(-block // PARTS)
    return min(block, -(-count // part) * part)
