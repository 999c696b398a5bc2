"""Decompositions of matrices and solvers: batches split, matrices do not."""
from __future__ import annotations

import pytest
import torch

from tests.passes.op_rules.families.harness import check, f, sample

aten = torch.ops.aten


def spd(*batch: int) -> torch.Tensor:
    """Symmetric, positive definite."""
    x = f(*batch, 3, 3)
    return x @ x.mT + 3 * torch.eye(3, dtype=x.dtype)


LU, PIVOTS, _ = torch.linalg.lu_factor_ex(spd(4, 6))
LD, LD_PIVOTS, _ = torch.linalg.ldl_factor_ex(spd(4, 6))
LOWER = torch.linalg.cholesky(spd(4, 6))
H, TAU = torch.geqrf(f(4, 6, 5, 3))
BATCH = "S(0) -> S(0)"

SAMPLES = [
    sample(aten.linalg_qr.default, f(4, 6, 5, 3), "reduced", expect="S(0) -> S(0) S(0); S(1) -> S(1) S(1)"),
    sample(aten.linalg_qr.default, f(4, 5, 3), "r", expect="S(0) -> R S(0)"),
    sample(aten.linalg_qr.default, f(5, 3), whole=True),
    sample(aten.geqrf.default, f(4, 5, 3), expect="S(0) -> S(0) S(0)"),
    sample(aten._linalg_svd.default, f(4, 6, 5, 3), False, True, expect="S(0) -> S(0) S(0) S(0)"),
    sample(aten._linalg_svd.default, f(4, 5, 3), False, False, expect="S(0) -> R S(0) R"),
    sample(aten._linalg_eigh.default, spd(4, 6), "L", True, expect="S(0) -> S(0) S(0); S(1) -> S(1) S(1)"),
    sample(aten._linalg_eigh.default, spd(4), "L", False, expect="S(0) -> S(0) R"),
    sample(aten.linalg_eig.default, spd(4), expect="S(0) -> S(0) S(0)"),
    sample(aten.linalg_eigvals.default, spd(4), expect=BATCH),
    sample(aten._linalg_eigvals.default, spd(4), expect=BATCH),
    sample(aten.linalg_cholesky_ex.default, spd(4, 6), expect="S(0) -> S(0) S(0); S(1) -> S(1) S(1)"),
    *([sample(aten.cholesky.default, spd(4), expect=BATCH)] if hasattr(aten, "cholesky") else []),  # gone in torch 2.15
    sample(aten.cholesky_inverse.default, LOWER, expect="S(0) -> S(0); S(1) -> S(1)"),
    sample(aten.linalg_inv_ex.default, spd(4, 6), expect="S(0) -> S(0) S(0); S(1) -> S(1) S(1)"),
    sample(aten.linalg_lu_factor_ex.default, spd(4), expect="S(0) -> S(0) S(0) S(0)"),
    sample(aten.linalg_lu.default, spd(4), expect="S(0) -> S(0) S(0) S(0)"),
    sample(aten.lu_unpack.default, LU, PIVOTS, expect="S(0) S(0) -> S(0) S(0) S(0)"),
    sample(aten.lu_unpack.default, LU, PIVOTS, False, True, expect="S(0) S(0) -> S(0) R R"),
    sample(aten.linalg_ldl_factor_ex.default, spd(4), expect="S(0) -> S(0) S(0) S(0)"),
    sample(aten.linalg_matrix_exp.default, f(4, 6, 3, 3), expect="S(0) -> S(0); S(1) -> S(1)"),
    sample(aten._linalg_det.default, spd(4, 6), expect="S(0) -> S(0) S(0) S(0)"),
    sample(aten._linalg_det.default, spd(4) + f(4, 3, 3), expect="S(0) -> S(0) S(0) S(0)"),
    sample(aten._linalg_det.default, (spd(4) + f(4, 3, 3)).mT, expect="S(0) -> S(0) S(0) S(0)"),
    sample(aten._linalg_slogdet.default, (spd(4) + f(4, 3, 3)).mT, expect="S(0) -> S(0) S(0) S(0) S(0)"),
    sample(aten._linalg_solve_ex.default, spd(4) + f(4, 3, 3), f(4, 3, 2), expect="S(0) S(0) -> S(0) S(0) S(0) S(0)"),
    sample(aten._linalg_solve_ex.default, (spd(4) + f(4, 3, 3)).mT, f(4, 3, 2), expect="S(0) S(0) -> S(0) S(0) S(0) S(0)"),
    sample(aten._linalg_slogdet.default, spd(4), expect="S(0) -> S(0) S(0) S(0) S(0)"),
    sample(aten.linalg_householder_product.default, H, TAU, expect="S(0) S(0) -> S(0); S(1) S(1) -> S(1)"),
    sample(aten.ormqr.default, H, TAU, f(4, 6, 5, 2), expect="S(0) S(0) S(0) -> S(0)"),
    sample(aten.linalg_solve_triangular.default, LOWER, f(4, 6, 3, 2), upper=False, expect="S(0) S(0) -> S(0); R P -> P"),
    sample(aten.linalg_solve_triangular.default, LOWER, f(6, 3, 2), upper=False, expect="S(0) R -> S(0); S(1) S(0) -> S(1)"),
    sample(aten.linalg_lu_solve.default, LU, PIVOTS, f(4, 6, 3, 2), expect="S(0) S(0) S(0) -> S(0); R R P -> P"),
    sample(aten.linalg_ldl_solve.default, LD, LD_PIVOTS, f(4, 6, 3, 2), expect="S(0) S(0) S(0) -> S(0); R R P -> P"),
    sample(aten.cholesky_solve.default, f(4, 6, 3, 2), LOWER, expect="S(0) S(0) -> S(0); P R -> P"),
    sample(aten.triangular_solve.default, f(4, 6, 3, 2), LOWER, False, expect="S(0) S(0) -> S(0) S(0)"),
    sample(aten._linalg_solve_ex.default, spd(4, 6), f(4, 6, 3, 2), expect="S(0) S(0) -> S(0) S(0) S(0) S(0)"),
    sample(aten._linalg_solve_ex.default, spd(4, 6), f(4, 6, 3), expect="S(0) S(0) -> S(0) S(0) S(0) S(0)"),
]


@pytest.mark.parametrize("case", SAMPLES, ids=str)
def test_sharded_equals_whole(case):
    assert check(case) > 0 or case.whole
