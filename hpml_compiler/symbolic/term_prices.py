"""Numbers for terms: what the cost model of one mesh says of them."""
from __future__ import annotations

from collections.abc import Iterable, Mapping

from passes.costs.prices import KINDS, Measured, MeshPrices
from passes.machine.mesh import Mesh
from passes.partition.redistribution import SLICE_US
from passes.partition.terms import Kernel, Message, Quantity, Slice, Term, Update, whole

_MANY, _ROUNDING = 2.0**20, 1e-9


class TermPrices:
    """Numbers of terms on one mesh."""

    def __init__(self, mesh: Mesh, states: int, measured: Measured | None):
        self.prices = MeshPrices(mesh, states, measured)

    @staticmethod
    def kind(kind: str) -> str:
        """A kind of operation as a kind of kernel."""
        return KINDS.get(kind, kind)

    def optimizer_line(self, dtype: str) -> tuple[float, float]:
        """What the optimizer's step over one parameter takes: fixed µs, and µs per element."""
        one, two = (self.prices.optimizer_us(n, dtype) for n in (_MANY, 2 * _MANY))
        fixed = 2 * one - two
        return (fixed if fixed > _ROUNDING * one else 0.0), (two - one) / _MANY

    def us(self, term: Term, value: Mapping[Quantity, float]) -> float:
        """The same as `passes.partition.reprice` and `redistribution.change` say of these sizes."""
        prices = self.prices
        if isinstance(term, Slice):
            return SLICE_US
        if isinstance(term, Update):
            return prices.optimizer_us(value[term.elements], term.dtype)
        if isinstance(term, Kernel):
            return term.factor * prices.compute_us(value[term.flops], value[term.bytes], term.dtype, term.kind)
        nbytes = value[term.bytes]
        if nbytes < term.bucket_bytes:
            together = prices.collective_us(term.collective, term.axis, term.bucket_bytes)
            return (together + 2 * prices.copy_us(term.bucket_bytes)) * nbytes / term.bucket_bytes
        copies = sum(value[whole(outer)] != 1 for outer in term.outer)
        return prices.collective_us(term.collective, term.axis, nbytes) + copies * prices.copy_us(nbytes)


def quantities(term: Term) -> Iterable[Quantity]:
    """What a term's price depends on."""
    if isinstance(term, Kernel):
        return term.flops, term.bytes
    if isinstance(term, Message):
        return term.bytes, *map(whole, term.outer)
    return (term.elements,) if isinstance(term, Update) else ()
