"""Rewrite `as_strided`, which addresses memory, into equivalent views, which name dims and have rules.

An operand without gaps, in any order of its dims, is a mixed-radix number: each of its dims is a digit. Strides of operand and
result split it into finer digits. A dim of the result runs through one of them, or part of it, or through several neighbors;
the offset fixes the digits that no dim runs through. Two overlapping dims are a sliding window.
"""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from passes.transforms.rewriting.call_inserter import CallInserter

aten = torch.ops.aten


@dataclass
class _Digit:
    """`stride`, `size` and the offset's digit; `length`: extent in the result, None if the digit is fixed; `window`: the
    length and step of a sliding window."""

    stride: int
    size: int
    start: int
    length: int | None = None
    window: tuple[int, int] | None = None


@dataclass
class StridedReading:
    """order: dims of the operand, outer ones first; digits: outer ones first; dims: for each dim of the result, its digits
    (position, whether it is the window) from the outer one on, or None where its stride is 0."""

    order: list[int]
    digits: list[_Digit]
    dims: list[list[tuple[int, bool]] | None] = field(default_factory=list)


def read(shape: Sequence[int], strides: Sequence[int], size: Sequence[int], stride: Sequence[int], offset: int
         ) -> StridedReading | None:
    """How a result of `size` and `stride` reads an operand of `shape` and `strides`; None if views cannot express it."""
    order = sorted((d for d, n in enumerate(shape) if n != 1), key=lambda d: -strides[d])
    total = math.prod(shape)
    expected = 1
    for d in reversed(order):
        if strides[d] != expected:
            return None  # broadcast, or with gaps
        expected *= shape[d]
    if total == 0 or 0 in size or offset < 0:
        return None
    runs = [(k, n, t) for k, (n, t) in enumerate(zip(size, stride)) if n > 1 and t > 0]
    sliding = {k: (n, t, t2) for k, n, t in runs for k2, n2, t2 in runs
               if k2 != k and t2 < t < n2 * t2 and t % t2 == 0 and not any(t3 == t for k3, _, t3 in runs if k3 != k)}
    bounds = sorted({1, total, *(strides[d] for d in order), *(t for k, _, t in runs if k not in sliding)})
    if bounds[-1] != total or any(b % a for a, b in zip(bounds, bounds[1:])):
        return None
    digits = [_Digit(a, b // a, offset // a % (b // a)) for a, b in zip(bounds, bounds[1:])]
    found = _run(digits, runs, sliding) if offset < total else None
    if found is None:
        return None
    count = len(digits)
    dims = [[] if n == 1 else None if t == 0 else [(count - 1 - d, w) for d, w in reversed(found[k])]
            for k, (n, t) in enumerate(zip(size, stride))]
    rest = [d for d, n in enumerate(shape) if n == 1]
    return StridedReading([*order, *rest], digits[::-1], dims)


def _run(digits: list[_Digit], runs: list[tuple[int, int, int]], sliding: dict[int, tuple[int, int, int]]
         ) -> dict[int, list[tuple[int, bool]]] | None:
    """Dim of the result -> its digits, inner ones first. Records in each digit how it is read."""
    at = {digit.stride: position for position, digit in enumerate(digits)}
    found: dict[int, list[tuple[int, bool]]] = {}
    for k, n, t in runs:
        if k in sliding:
            continue
        own: list[tuple[int, bool]] = []
        position, left = at[t], n
        while left > 1:
            if position == len(digits) or digits[position].length is not None:
                return None
            digit = digits[position]
            digit.length = min(left, digit.size)
            windows = [(k2, *rest) for k2, rest in sliding.items() if rest[2] == digit.stride]
            if windows and not own:
                if len(windows) > 1 or n > digit.size:
                    return None
                ((k2, count, step, _),) = windows
                step //= digit.stride
                digit.window, digit.length = (n, step), (count - 1) * step + n
                found[k2] = [(position, False)]
            if digit.start + digit.length > digit.size or left > digit.size and (left % digit.size or digit.start):
                return None
            own.append((position, bool(windows) and not own))
            left //= digit.size if left > digit.size else left
            position += 1
        found[k] = own
    return found if all(k in found for k, _, _ in runs) else None


def as_views(node: Node, insert: CallInserter) -> bool:
    """args: self, size, stride, storage offset"""
    x, size, stride = node.args[:3]
    reading = _reading(node, x, size, stride, 3)
    if reading is None:
        return False
    node.replace_all_uses_with(_back(insert, _narrowed(insert, _apart(insert, x, reading), reading)[-1], reading, list(size)))
    return True


def _reading(node: Node, x: Node, size: Sequence[int], stride: Sequence[int], at: int) -> StridedReading | None:
    """`at`: position of the storage offset among the arguments; offsets count from the start of the storage."""
    value = x.meta["val"]
    offset: Any = node.args[at] if len(node.args) > at else node.kwargs.get("storage_offset")
    known = [*value.shape, *value.stride(), *size, *stride, value.storage_offset(), 0 if offset is None else offset]
    if not all(type(number) is int for number in known):
        return None
    own = int(value.storage_offset())
    return read(value.shape, value.stride(), size, stride, 0 if offset is None else offset - own)


def _apart(insert: CallInserter, x: Node, reading: StridedReading) -> Node:
    """View the operand with one dim for each digit, outer ones first."""
    if reading.order != sorted(reading.order):
        x = insert(aten.permute.default, x, reading.order)
    return insert(aten.view.default, x, [digit.size for digit in reading.digits])


def _narrowed(insert: CallInserter, x: Node, reading: StridedReading) -> list[Node]:
    """For each digit, the narrowed operand."""
    steps = [x]
    for d, digit in enumerate(reading.digits):
        length = digit.length or 1
        if length < digit.size:
            steps.append(insert(aten.slice.Tensor, steps[-1], d, digit.start, digit.start + length))
    return steps


def _back(insert: CallInserter, x: Node, reading: StridedReading, size: list[int]) -> Node:
    """Permute the digits into the order of the result's dims, without the fixed ones."""
    count = len(reading.digits)
    place: dict[tuple[int, bool], int] = {}
    for d, digit in enumerate(reading.digits):
        place[d, False] = d
        if digit.window is not None:
            place[d, True] = count + sum(other.window is not None for other in reading.digits[:d])
            x = insert(aten.unfold.default, x, d, *digit.window)
    wanted = [place[each] for own in reading.dims for each in own or []]
    still = [place[each] for each in place if place[each] not in wanted]
    order = [*wanted, *still]
    if order != sorted(order):
        x = insert(aten.permute.default, x, order)
    whole = [1 if own is None else n for n, own in zip(size, reading.dims)]
    if tuple(x.meta["val"].shape) != tuple(whole):
        x = insert(aten.view.default, x, whole)
    return x if whole == size else insert(aten.expand.default, x, size)


def scattered(node: Node, insert: CallInserter) -> bool:
    """as_strided_scatter. args: self, source, size, stride, storage offset"""
    x: Any
    x, source, size, stride = node.args[:4]
    value = x.meta["val"]
    reading = _reading(node, x, size, stride, 4)
    if reading is None or None in reading.dims or any(digit.window for digit in reading.digits):
        return False  # several elements of the source may be written to one place
    steps = _narrowed(insert, _apart(insert, x, reading), reading)
    wanted = [d for own in reading.dims for d, _ in own or ()]
    order = [*wanted, *(d for d in range(len(reading.digits)) if d not in wanted)]
    part = insert(aten.reshape.default, source, [reading.digits[d].length or 1 for d in order])
    if order != sorted(order):
        part = insert(aten.permute.default, part, [order.index(d) for d in range(len(order))])
    cut = [d for d, digit in enumerate(reading.digits) if (digit.length or 1) < digit.size]
    for d, before in reversed([*zip(cut, steps[:-1])]):
        digit = reading.digits[d]
        part = insert(aten.slice_scatter.default, before, part, d, digit.start, digit.start + (digit.length or 1))
    part = insert(aten.reshape.default, part, [int(value.shape[d]) for d in reading.order])
    if reading.order != sorted(reading.order):
        part = insert(aten.permute.default, part, [reading.order.index(d) for d in range(len(reading.order))])
    node.replace_all_uses_with(part)
    return True
