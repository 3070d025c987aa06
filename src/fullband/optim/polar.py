"""The orthogonal factor of a matrix by a fixed odd polynomial: matrix products only, no SVD.

A matrix M = P diag(s) Q^T has the polar factor P Q^T: the same directions with every singular value at 1. Five quintic steps
x -> a x + b x^3 + c x^5, each of which costs products of X with its Gram matrix, bring the singular values close to 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Polar = Literal["polar-express", "quintic"]


class Polynomial(NamedTuple):
    """Coefficients (a, b, c) of each step; the input is divided by `safety` x its Frobenius norm first."""

    steps: tuple[tuple[float, float, float], ...]
    safety: float


# polar-express  Amsel et al. 2025 (arXiv:2505.16932, Alg. 1) for 5 iterations, cushion 2: the constants microsoft/dion uses by default.
#                Each triple is the best quintic for the interval the ones before it leave: 0.84 to 1.15 from 1e-3 on. The safety factor
#                keeps rounding from lifting a singular value above 1.
# quintic        Muon's Newton-Schulz, which NorMuon was published with: one triple five times, 0.68 to 1.21 from 1e-2 on, below that less.
POLYNOMIALS: dict[str, Polynomial] = {
    "polar-express": Polynomial(
        (
            (8.156554524902461, -22.48329292557795, 15.878769915207462),
            (4.042929935166739, -2.808917465908714, 0.5000178451051316),
            (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
            (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
            (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
        ),
        safety=1.02,
    ),
    "quintic": Polynomial(((3.4445, -4.7750, 2.0315),) * 5, safety=1.0),
}

# From this ratio of long to short side on, iterate on the small Gram matrix: 17 + 2r products of short^3 instead of 5 + 10r.
GRAM_RATIO = 3


def polar_factor(matrices: Tensor, epsilon: float = 1e-8, dtype: torch.dtype | None = None, polar: Polar = "polar-express") -> Tensor:
    """Approximate polar factors of a stack of matrices [N, rows, columns], one batched product for all of them.

    The iteration runs in `dtype` (default: that of `matrices`); the result has that dtype. All-zero matrices and rows stay zero.
    Raises ValueError for an unknown polynomial.
    """
    steps, safety = polynomial(polar)
    rows, columns = matrices.shape[-2:]
    norm = torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True)
    scaled = (matrices / (norm * safety + epsilon)).to(dtype or matrices.dtype)
    x = scaled if rows >= columns else scaled.mT  # [N, long, short]: the Gram matrix is then the small one
    # Squaring singular values into the Gram matrix costs half the digits: harmless from float32 up (tested), not in bfloat16.
    wide_enough = max(rows, columns) >= GRAM_RATIO * min(rows, columns)
    precise = x.dtype in (torch.float32, torch.float64)
    x = _iterate_on_gram(x, steps) if wide_enough and precise else _iterate(x, steps)
    return x if rows >= columns else x.mT


def polynomial(polar: str) -> Polynomial:
    """The polynomial of this name. Raises ValueError for an unknown one."""
    if polar not in POLYNOMIALS:
        raise ValueError(f"NorMuon: polar must be {' or '.join(map(repr, POLYNOMIALS))}, got {polar!r}")
    return POLYNOMIALS[polar]


def _iterate(x: Tensor, steps: Sequence[tuple[float, float, float]]) -> Tensor:
    """X <- X (a + b G + c G^2) with G = X^T X, for each triple; x is [N, long, short]."""
    for a, b, c in steps:
        gram = torch.bmm(x.mT, x)
        x = torch.baddbmm(x, x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), beta=a)
    return x


def _iterate_on_gram(x: Tensor, steps: Sequence[tuple[float, float, float]]) -> Tensor:
    """The same polynomial through G alone: every factor is a polynomial in G, so all of them commute and G <- G F^2."""
    gram = torch.bmm(x.mT, x)
    product: Tensor | None = None
    for step, (a, b, c) in enumerate(steps):
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        factor.diagonal(dim1=-2, dim2=-1).add_(a)
        product = factor if product is None else torch.bmm(product, factor)
        if step < len(steps) - 1:
            gram = torch.bmm(factor, torch.bmm(gram, factor))
    assert product is not None
    return torch.bmm(x, product)


def polar_factor_reference(matrix: Tensor, epsilon: float = 1e-8, polar: Polar = "polar-express") -> Tensor:
    """What `polar_factor` computes, for one matrix [rows, columns], by SVD: the polynomial acts on the singular values alone."""
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = values / (matrix.norm() * POLYNOMIALS[polar].safety + epsilon)
    for a, b, c in POLYNOMIALS[polar].steps:
        values = a * values + b * values**3 + c * values**5
    return left @ torch.diag(values) @ right
