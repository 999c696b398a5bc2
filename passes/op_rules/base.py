"""Rule of one call of an operator, and the strategies that follow from it.

A rule names, per operand and per result, the *letters* of each dim, as einsum does. A letter stands for an index that
runs through the operator: where it stands in an operand and in a result, splitting it splits both. A dim may carry
several letters, outer one first (a flattened `(batch, sequence)`), or none (it cannot be split).

    mm:      (m)(k), (k)(n) -> (m)(n)         summed: k
    view:    (b)(s)(h)      -> (b s)(h)
    softmax: (b)(v)         -> (b)(v)         blocked: v

Values carry *factors*: each dim is a product of factor sizes, outer one first (4096 = 32 heads * 128), found by
`passes.analyses.dim_factors` so that views map factor to factor. A placement on one mesh axis is therefore

    REPLICATE "R"    every rank has the whole value
    PARTIAL   "P"    the value is the sum over the ranks
    PARTIAL_MAX "M"  the value is the elementwise maximum over the ranks
    (dim, factor)    the factor is split evenly; factor 0 of a dim is DTensor's `Shard(dim)`
"""
from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from passes.json_records import FrozenMap
from passes.op_rules.sum_dtypes import keeps_sums

REPLICATE, PARTIAL, PARTIAL_MAX = "R", "P", "M"
Placement = str | tuple[int, int]
Letter = Hashable
Letters = tuple[tuple[Letter, ...], ...]
"""Letters of one tensor: per dim, outer letter first."""
Factors = tuple[tuple[int, ...], ...]
"""Factors of one tensor: per dim, outer factor first; a dim of size 1 has none."""


@dataclass(frozen=True)
class Spec:
    """Shape, dtype name (`float32`) and item size in bytes of a tensor."""

    shape: tuple[int, ...]
    dtype: str
    itemsize: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * self.itemsize


@dataclass(frozen=True)
class Call:
    """One call of an operator: the argument of a rule function.

    `operands` are the tensors among the arguments, in the order of `torch.utils._pytree.tree_leaves((args, kwargs))`;
    `results` the tensors it returns. `args` and `kwargs` hold `Operand(i)` where operand `i` stands.
    """

    target: Any
    args: tuple
    kwargs: Mapping[str, Any]
    operands: tuple[Spec, ...]
    results: tuple[Spec, ...]
    strides: tuple[tuple[int, ...], ...] = ()
    """Strides of the operands, in elements; needed by ops that address memory rather than dims (`as_strided`)."""

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        if position < len(self.args):
            return self.args[position]
        return self.kwargs.get(name, default)


@dataclass(frozen=True)
class Operand:
    index: int


@dataclass(frozen=True)
class Rule:
    """Letters of operands and results, and the meaning of splitting a letter.

    summed:   letters over which the operator adds up; split, the result is `PARTIAL`.
    maxed:    letters over which it takes the maximum; split, the result is `PARTIAL_MAX`.
    blocked:  letters that must stay whole.
    linear:   sets of operands in which the operator is jointly linear: with these `PARTIAL` and the others
              replicated, the result is `PARTIAL`.
    addends:  operands that are added to a sum (a bias): with a summed letter split they must be `PARTIAL` too, or they
              would be added once per rank.
    indexed:  letters that an integer operand points into (a vocabulary): split, the rank handles only its own range.
              Letter -> operand that holds the indices, which the rewrite shifts and masks.
    ordered:  letters whose positions count (an iota): split, the rank handles one contiguous range and is told which.
    repeated: letter -> results that it does not touch: split, every rank computes these whole.
    aside:    results that no letter touches (a generator state): replicated whatever is split.
    roles:    letter -> what people call a dim with it ("heads", "vocabulary"); see `passes.sharding.dim_roles`.
    """

    inputs: tuple[Letters, ...]
    outputs: tuple[Letters, ...]
    sizes: FrozenMap[Letter, int]
    summed: frozenset[Letter] = frozenset()
    maxed: frozenset[Letter] = frozenset()
    blocked: frozenset[Letter] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    addends: frozenset[int] = frozenset()
    indexed: FrozenMap[Letter, int] = FrozenMap()
    ordered: frozenset[Letter] = frozenset()
    repeated: FrozenMap[Letter, frozenset[int]] = FrozenMap()
    aside: frozenset[int] = frozenset()
    roles: FrozenMap[Letter, str] = FrozenMap()


@dataclass(frozen=True)
class Strategy:
    """Placements of all operands and results of one call on one mesh axis."""

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]

    @property
    def splits(self) -> bool:
        return any(isinstance(p, tuple) for p in self.inputs + self.outputs)


RuleFunction = Callable[[Call], Rule | None]


def aligned(letters: Sequence[Any], own: Sequence[int], full: Sequence[int]) -> list[Any]:
    """Letters of an operand of shape `own` that is broadcast to `full`, whose dims have `letters`; lined up at the right."""
    shift = len(full) - len(own)
    return [letters[d + shift] if size == full[d + shift] else None for d, size in enumerate(own)]


def make_rule(
    call: Call,
    inputs: Sequence[Sequence[Any]],
    outputs: Sequence[Sequence[Any]],
    *,
    summed: Sequence[Letter] = (),
    maxed: Sequence[Letter] = (),
    blocked: Sequence[Letter] = (),
    linear: Sequence[Sequence[int]] = (),
    addends: Sequence[int] = (),
    indexed: Mapping[Any, int] | None = None,
    ordered: Sequence[Letter] = (),
    repeated: Mapping[Letter, Sequence[int]] | None = None,
    aside: Sequence[int] = (), roles: Mapping[Any, str] | None = None, sizes: Mapping[Any, int] | None = None,
) -> Rule:
    """Build a rule from one entry per dim: a letter, a list of letters (outer first), or None (not split).

    Sizes of letters that stand alone in a dim are read off the tensors; others must be given in `sizes`.
    A letter of size 1 is dropped, and so is a linear group that a change of dtype makes nonlinear. Raises ValueError if
    the entries do not fit the shapes.
    """
    found: dict[Letter, int] = dict(sizes or {})
    for specs, entries in ((call.operands, inputs), (call.results, outputs)):
        if len(specs) != len(entries):
            raise ValueError(f"{call.target}: rule names {len(entries)} tensors, the call has {len(specs)}")
        for spec, dims in zip(specs, entries):
            if len(dims) != len(spec.shape):
                raise ValueError(f"{call.target}: rule names {len(dims)} dims for shape {spec.shape}")
            for size, entry in zip(spec.shape, dims):
                if entry is None:
                    continue
                product = math.prod(found[x] for x in entry) if isinstance(entry, list) else found.setdefault(entry, size)
                if product != size:
                    raise ValueError(f"{call.target}: letters {entry!r} have the size {product} in a dim of {size}")

    def letters(dims: Sequence[Any]) -> Letters:
        return tuple(
            tuple(x for x in (() if e is None else e if isinstance(e, list) else (e,)) if found[x] > 1) for e in dims
        )

    kept = [
        group for group in linear
        if all(keeps_sums(call.operands[i].dtype, r.dtype) for i in group for k, r in enumerate(call.results) if k not in aside)
    ]

    return Rule(
        inputs=tuple(letters(d) for d in inputs),
        outputs=tuple(letters(d) for d in outputs),
        sizes=FrozenMap({k: v for k, v in found.items() if v > 1}),
        summed=frozenset(summed),
        maxed=frozenset(maxed),
        blocked=frozenset(blocked),
        linear=tuple(frozenset(s) for s in kept),
        addends=frozenset(addends),
        indexed=FrozenMap(indexed or {}),
        ordered=frozenset(ordered),
        repeated=FrozenMap({letter: frozenset(results) for letter, results in (repeated or {}).items()}),
        aside=frozenset(aside),
        roles=FrozenMap(roles or {}),
    )


def letter_segments(letters: Letters, sizes: Mapping[Letter, int], factors: Factors):
    """Yield (letter, dim, first factor index, factors of the letter) for every letter whose bounds are factor bounds.

    A letter that does not align with the factors of its dim yields an empty factor tuple, unless it is the outermost
    one of the dim and the first factor divides it: then that still means a contiguous split of the letter.
    """
    for dim, row in enumerate(letters):
        position, own = 0, factors[dim]
        aligned = True
        for letter in row:
            size, start, product = sizes[letter], position, 1
            while aligned and product < size and position < len(own):
                product *= own[position]
                position += 1
            if aligned and product == size:
                yield letter, dim, start, own[start:position]
            else:
                aligned = False
                yield letter, dim, start, own[:1] if start == 0 and size % own[0] == 0 else ()


def strategies(rule: Rule | None, operands: Sequence[Factors], results: Sequence[Factors]) -> tuple[Strategy, ...]:
    """All strategies of a call on one axis of any size, the replicated one first.

    Divisibility of factors by the size of the axis is for the caller to check: `Strategy` names factors, not sizes.
    """
    whole = Strategy((REPLICATE,) * len(operands), (REPLICATE,) * len(results))
    if rule is None:
        return (whole,)
    found = [whole]
    where: dict[Letter, list[tuple[bool, int, int, int, tuple[int, ...]]]] = {}
    for is_input, tensors, all_factors in ((True, rule.inputs, operands), (False, rule.outputs, results)):
        for index, letters in enumerate(tensors):
            for letter, dim, start, own in letter_segments(letters, rule.sizes, all_factors[index]):
                where.setdefault(letter, []).append((is_input, index, dim, start, own))
    for letter, places in where.items():
        if letter in rule.blocked:
            continue
        alike = len({own for *_, own in places}) == 1
        count = len(places[0][4]) if alike else min(1, *(len(own) for *_, own in places))
        if letter in rule.indexed or letter in rule.ordered:  # a range is contiguous only along the outermost factor
            count = min(count, 1)
        untouched = rule.aside | rule.repeated.get(letter, frozenset())
        for k in range(count):
            inputs: list[Placement] = [REPLICATE] * len(operands)
            outputs: list[Placement] = [REPLICATE] * len(results)
            twice = False
            seen_output = False
            for is_input, index, dim, start, _ in places:
                side = inputs if is_input else outputs
                twice = twice or side[index] != REPLICATE
                side[index] = (dim, start + k)
                seen_output = seen_output or not is_input
            if twice:  # the letter stands twice in one tensor (a diagonal): no even split
                continue
            reduced = PARTIAL if letter in rule.summed else PARTIAL_MAX if letter in rule.maxed else None
            if reduced is None and not all(isinstance(p, tuple) or i in untouched for i, p in enumerate(outputs)):
                continue
            if reduced is not None:
                outputs = [p if isinstance(p, tuple) or i in untouched else reduced for i, p in enumerate(outputs)]
                if reduced == PARTIAL:
                    for i in rule.addends:
                        if inputs[i] == REPLICATE:
                            inputs[i] = PARTIAL
            found.append(Strategy(tuple(inputs), tuple(outputs)))
    for group in rule.linear:
        found.append(
            Strategy(
                tuple(PARTIAL if i in group else REPLICATE for i in range(len(operands))), (PARTIAL,) * len(results)
            )
        )
    return tuple(dict.fromkeys(found))


def format_placement(placement: Placement) -> str:
    if isinstance(placement, str):
        return placement
    dim, factor = placement
    return f"S({dim})" if factor == 0 else f"S({dim}.{factor})"


def parse_placement(text: str) -> Placement:
    """Inverse of `format_placement`; raises ValueError."""
    if text in (REPLICATE, PARTIAL, PARTIAL_MAX):
        return text
    if not (text.startswith("S(") and text.endswith(")")):
        raise ValueError(f"not a placement: {text!r}; one of R, P, M, S(dim), S(dim.factor)")
    dim, _, factor = text[2:-1].partition(".")
    return int(dim), int(factor or 0)
