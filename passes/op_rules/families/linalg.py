"""Sharding rules for matrix decompositions and solvers: batch dims can be sharded, matrices stay whole.

The tables list, per operator, the number of trailing matrix dims of each operand and result; the dims before are batch
dims, which are broadcast. A result that was not requested has the shape (0,).
"""
from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import Node

from passes.op_rules.base import Call, Rule, aligned, make_rule
from passes.op_rules.local_call import Insert, LocalCall, column_major, is_contiguous, packed_copy
from passes.op_rules.rule_table import rule

DIMS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "linalg_qr": ((2,), (2, 2)),
    "geqrf": ((2,), (2, 1)),
    "_linalg_svd": ((2,), (2, 1, 2)),
    "_linalg_eigh": ((2,), (1, 2)),
    "linalg_eig": ((2,), (1, 2)),
    "linalg_eigvals": ((2,), (1,)),
    "_linalg_eigvals": ((2,), (1,)),
    "linalg_cholesky_ex": ((2,), (2, 0)),
    "cholesky": ((2,), (2,)),
    "cholesky_inverse": ((2,), (2,)),
    "linalg_inv_ex": ((2,), (2, 0)),
    "linalg_lu_factor_ex": ((2,), (2, 1, 0)),
    "linalg_lu": ((2,), (2, 2, 2)),
    "lu_unpack": ((2, 1), (2, 2, 2)),
    "linalg_ldl_factor_ex": ((2,), (2, 1, 0)),
    "linalg_matrix_exp": ((2,), (2,)),
    "_linalg_det": ((2,), (0, 2, 1)),
    "_linalg_slogdet": ((2,), (0, 0, 2, 1)),
    "linalg_householder_product": ((2, 1), (2,)),
    "ormqr": ((2, 1, 2), (2,)),
}
SOLVERS: dict[str, tuple[tuple[int, ...], tuple[int, ...], int]] = {
    "linalg_solve_triangular": ((2, 2), (2,), 1),
    "linalg_lu_solve": ((2, 1, 2), (2,), 2),
    "linalg_ldl_solve": ((2, 1, 2), (2,), 2),
    "cholesky_solve": ((2, 2), (2,), 0),
    "triangular_solve": ((2, 2), (2, 2), 0),
}
"""As in DIMS, and the index of the operand with the right-hand side."""


def _batched(call: Call, operands: tuple[int, ...], results: tuple[int, ...], linear: tuple[list[int], ...] = ()) -> Rule:
    there = [k for k, (own, r) in enumerate(zip(results, call.results)) if r.shape != (0,) or own == 0]
    shapes = [o.shape[: len(o.shape) - own] for own, o in zip(operands, call.operands, strict=True)]
    batch = torch.broadcast_shapes(*shapes)
    letters = list(range(len(batch)))
    inputs = [[*aligned(letters, shape, batch), *[None] * own] for shape, own in zip(shapes, operands)]
    outputs = [[*letters, *[None] * own] if k in there else [None] * len(call.results[k].shape)
               for k, own in enumerate(results)]
    return make_rule(call, inputs, outputs, linear=linear, aside=[k for k in range(len(results)) if k not in there])


def _name(call: Call) -> str:
    return call.target._schema.name.removeprefix("aten::")


@rule(*(f"aten::{name}" for name in DIMS))
def decomposition(call: Call) -> Rule | None:
    operands, results = DIMS[_name(call)]
    return _batched(call, operands, results) if len(call.results) == len(results) else None


@rule(*(f"aten::{name}" for name in SOLVERS))
def solver(call: Call) -> Rule:
    """Linear in the right-hand side, except `triangular_solve`, whose second result is the matrix."""
    operands, results, right = SOLVERS[_name(call)]
    return _batched(call, operands, results, ([right],) if len(results) == 1 else ())


@rule("aten::_linalg_solve_ex")
def solve(call: Call) -> Rule:
    """matrices, right-hand sides (vectors if they have one dim less) -> solutions, LU, pivots, errors"""
    a, b = call.operands[0].shape, call.operands[1].shape
    own = 1 if len(b) == 1 or len(b) == len(a) - 1 and b == a[:-1] else 2
    return _batched(call, (2, own), (own, 2, 1, 0))


def _local_factorization(factors: int) -> Callable[[LocalCall, Insert], Node]:
    """Local call of operators that factorize the transpose of a contiguous operand: backward was traced for the strides of the
    whole operand, so the local one is made contiguous if that was, and only then. factors: the result with the factors."""
    def local(call: LocalCall, insert: Insert) -> Node:
        x, value = call.args[0], call.args[0].meta["val"]
        if call.strides:
            whole = is_contiguous(call.global_shapes[factors], call.strides[0])
            if whole and not value.is_contiguous():
                x = packed_copy(insert, x)
            elif not whole and value.is_contiguous():
                x = column_major(insert, x)
        return insert(call.target, x, *call.args[1:], **call.kwargs)

    return local


rule("aten::_linalg_det", "aten::_linalg_solve_ex", local=_local_factorization(1))
rule("aten::_linalg_slogdet", local=_local_factorization(2))
rule("aten::linalg_matrix_exp", layout=torch.Tensor.is_contiguous)
