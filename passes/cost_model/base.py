"""The interface of prices, whatever their source: a roofline, measurements, formulas."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from passes.hardware.mesh import MeshAxis

COMPUTE_KINDS = ("matmul", "attention", "convolution", "pointwise", "embedding", "view")
"""Kinds of kernels. `view` moves nothing and costs nothing."""

BUCKET_BYTES = 4 * 2**20
"""Gradients smaller than this are reduced together, up to this many bytes in one collective."""

COLLECTIVE_KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "send_recv")


class CostModel(Protocol):
    """Predicted times in µs, per rank, of local shapes (after sharding); at least 0, and growing with the sizes."""

    def compute_us(self, flops: float, bytes_moved: float, dtype: str, kind: str) -> float:
        """One kernel: `flops` operations (a multiply and an add are two) in `dtype`, which is torch's name of it.

        bytes_moved: read and written in memory; a chain of pointwise ops that is fused counts as one kernel, with
        the bytes that remain after fusion. kind: one of `COMPUTE_KINDS`; raises ValueError on another.
        """
        ...

    def collective_us(self, kind: str, axis: MeshAxis, nbytes: float) -> float:
        """One collective in all groups of a mesh axis at once; 0 on an axis of size 1.

        nbytes, for each of `COLLECTIVE_KINDS` (raises ValueError on another):
          all_gather      the gathered tensor, as every rank has it afterwards (each rank brings nbytes / size)
          reduce_scatter  the tensor that every rank has before (each rank keeps nbytes / size)
          all_reduce      the tensor of one rank
          all_to_all      the tensor of one rank (of which it sends all but nbytes / size)
          broadcast       the tensor
          send_recv       the message, from a rank to one neighbor on the axis
        """
        ...

    def optimizer_us(self, elements: float) -> float:
        """The optimizer's step over that many parameter elements of this rank."""
        ...


@dataclass(frozen=True)
class OptimizerModel:
    """Bytes of optimizer state per parameter element; the default is torch's AdamW on float32.

    torch's AdamW keeps two states of the parameter's dtype and no float32 master copy. state_bytes counts all states
    together (a master copy belongs there). fused: `AdamW(fused=True)`, one kernel that touches everything once.
    """

    parameter_bytes: float = 4.0
    gradient_bytes: float = 4.0
    state_bytes: float = 8.0
    fused: bool = False

    def traffic_bytes(self, temporaries_in_cache: bool) -> float:
        """Memory traffic of a step per parameter element.

        Fused: parameter and states read and written, gradient read. Else one kernel per operation, counted from
        `torch/optim/adamw.py`: decay (parameter read, written), lerp (gradient; first moment read, written), mul and
        addcmul (gradient; second moment twice), sqrt (second moment), addcdiv (first moment; parameter read, written)
        and the denominator, written or read six times, which on a CPU stays in the cache from one op to the next.
        """
        if self.fused:
            return 2 * self.parameter_bytes + self.gradient_bytes + 2 * self.state_bytes
        denominator = 0.0 if temporaries_in_cache else 6 * self.parameter_bytes
        return 4 * self.parameter_bytes + 2 * self.gradient_bytes + 4 * self.state_bytes + denominator
