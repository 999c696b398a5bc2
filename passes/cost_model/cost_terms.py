"""Terms of the cost of a step, and the one function that prices them.

    Kernel    one kernel on a device                             Message   one collective over a mesh axis
    Update    the optimizer's step over one parameter            Slice     a local hop of a redistribution

The sizes in a term are numbers, or formulas (polynomials of input sizes, sympy expressions): `price` is the same for all,
with `Prices` of that kind. So the planner's coefficients, a plan's table, the simulator and the formulas of
`hpml_compiler.instruments.cost_formulas` cannot disagree: they evaluate the same terms.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

from passes.cost_model.algebra import Algebra

N = TypeVar("N")
M = TypeVar("M")

SLICE = 1e-3
"""Cost of a slice. It moves nothing over a link; the tiny cost only breaks ties in favor of fewer collectives."""
REDUCING = ("all_reduce", "reduce_scatter")
"""The collectives that reduce; several gradients share one."""


@dataclass(frozen=True)
class Kernel(Generic[N]):
    """One kernel. flops, bytes: of one device. kind: one of `passes.cost_model.COMPUTE_KINDS`. key: the name of the call if
    it may have been measured (`passes.cost_model.measured.measurement_key`). factor: multiplies its price."""

    flops: N
    bytes: N
    dtype: str
    kind: str
    key: str = ""
    factor: float = 1.0


@dataclass(frozen=True)
class Message(Generic[N]):
    """One collective. bytes: as `CostModel.collective_us` counts them. axis: number of the mesh axis.

    outer: for each end that is split in a dim, the number of elements before that dim; unless it is 1, the shards are not
    contiguous, and are packed before or unpacked after by a copy. bucket_bytes: smaller messages than that are
    bucketed; they pay their share of one collective of that size, and of the copy into the bucket and
    out of it. 0 disables buckets. share: fraction of the bytes that are sent, where they are compressed.
    """

    collective: str
    axis: int
    bytes: N
    outer: tuple[N, ...] = ()
    bucket_bytes: float = 0.0
    share: float = 1.0

    @property
    def sent(self) -> Message[N]:
        """The message after compression."""
        if self.share == 1.0:
            return self
        nbytes: Any = self.bytes
        return replace(self, bytes=nbytes * self.share, bucket_bytes=self.bucket_bytes * self.share, share=1.0)


@dataclass(frozen=True)
class Slice:
    """A local step of a redistribution."""


@dataclass(frozen=True)
class Update(Generic[N]):
    """The optimizer's step over the elements of one parameter."""

    elements: N
    dtype: str


Term = Kernel[N] | Message[N] | Slice | Update[N]


def sized(term: Term[N], of: Callable[[N], M]) -> Term[M]:
    """The term with `of` applied to every size."""
    if isinstance(term, Kernel):
        return Kernel(of(term.flops), of(term.bytes), term.dtype, term.kind, term.key, term.factor)
    if isinstance(term, Message):
        return Message(term.collective, term.axis, of(term.bytes), tuple(map(of, term.outer)), term.bucket_bytes, term.share)
    return Update(of(term.elements), term.dtype) if isinstance(term, Update) else term


class Prices(Protocol):
    """Costs of kernels, collectives and updates on the devices of one mesh, in µs, or in any additive unit (µJ)."""

    @property
    def algebra(self) -> Algebra: ...

    @property
    def keyed(self) -> bool:
        """True if the key of a kernel makes a difference."""
        ...

    def kernel(self, flops: Any, nbytes: Any, dtype: str, kind: str, key: str = "") -> Any: ...

    def collective(self, kind: str, axis: int, nbytes: Any) -> Any: ...

    def update(self, elements: Any, dtype: str) -> Any: ...


def copy(nbytes: Any, prices: Prices) -> Any:
    """A separate copy kernel; `nbytes` counts reads and writes."""
    return prices.kernel(0.0, nbytes, "float32", "pointwise")


def price(term: Term[Any], prices: Prices) -> Any:
    """The cost of one term."""
    if isinstance(term, Kernel):
        cost = prices.kernel(term.flops, term.bytes, term.dtype, term.kind, term.key)
        return cost if term.factor == 1.0 else term.factor * cost
    if isinstance(term, Message):
        term = term.sent
        if not term.bucket_bytes:
            return _alone(term, prices)
        return prices.algebra.below(
            term.bytes, term.bucket_bytes, lambda: _together(term, prices), lambda: _alone(term, prices))
    if isinstance(term, Update):
        return prices.update(term.elements, term.dtype)
    return SLICE


def _alone(term: Message[Any], prices: Prices) -> Any:
    cost = prices.collective(term.collective, term.axis, term.bytes)
    for outer in term.outer:
        cost = cost + prices.algebra.unless_one(outer) * copy(term.bytes, prices)
    return cost


def _together(term: Message[Any], prices: Prices) -> Any:
    whole = prices.collective(term.collective, term.axis, term.bucket_bytes) + 2 * copy(term.bucket_bytes, prices)
    return whole * term.bytes / term.bucket_bytes
