"""Bases of stacked matrices: leading input directions, complements, numerical rank.

Everything works on stacks ``(L, d_out, d_in)`` in the layout of ``nn.Linear`` and returns bases ``(L, d_in, r)``.
A direction that does not exist (a matrix of lower rank, a zero matrix) is a **zero column**: layers of different rank
can share one stack, and a product with a zero column contributes nothing to any projection or loss.
"""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from safemerge_pl.maths.leading import decompose_on_cores, leading_eigenvectors

__all__ = [
    "complement_basis",
    "numerical_rank_tolerance",
    "orthogonalize_jointly",
    "polar_factor",
    "right_singular_basis",
    "thin_svd",
]

_LARGE = 512
"""Side from which a Gram matrix is worth cutting up, or on a GPU its leading eigenvectors worth an iteration."""

_ITERATED_ON = ("cuda",)
"""Kinds of devices on which leading vectors are iterated; elsewhere full decompositions cost no more."""


def numerical_rank_tolerance(shape: tuple[int, ...], dtype: torch.dtype) -> float:
    """Compute the relative size below which a singular value counts as zero: ``max(m, n) * eps``.

    This is the rule of ``numpy.linalg.matrix_rank``, with the rounding error ``eps`` of the dtype the data came in.

    Args:
        shape: ``(..., m, n)`` of the matrix.
        dtype: of the data.

    Example:
        >>> numerical_rank_tolerance((4, 8), torch.float64) == 8 * torch.finfo(torch.float64).eps
        True
    """
    return max(shape[-2:]) * torch.finfo(dtype).eps


def right_singular_basis(matrices: Tensor, rank: int) -> Tensor:
    r"""Compute the leading right singular vectors of each matrix (:math:`V`, paper section 4.1), cut at numerical rank.

    Single-precision input is decomposed through the Gram matrix of its shorter side in double precision, which resolves
    singular values down to ``1e-8`` of the largest one, far below the numerical rank of single precision.
    Double-precision input takes the full SVD.

    Args:
        matrices: stack ``(L, d_out, d_in)``, float32 or float64, finite.
        rank: number of directions wanted, at least 1; clamped to ``min(d_out, d_in)``.

    Returns:
        ``(L, d_in, min(rank, d_out, d_in))`` in the input's dtype. Orthonormal columns in order of falling singular
        value, then zero columns where a matrix has no further direction.

    Raises:
        ValueError: if ``rank`` is below 1 or ``matrices`` is not a stack of matrices.

    Example:
        >>> stack = torch.tensor([[[0.0, 3.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]]])
        >>> right_singular_basis(stack, 2).abs().tolist()
        [[[0.0, 0.0], [1.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]]]
    """
    if rank < 1:
        raise ValueError(f"`rank` must be at least 1, got {rank}.")
    if matrices.ndim != 3:
        raise ValueError(f"`matrices` must be a stack (L, d_out, d_in), got shape {tuple(matrices.shape)}.")
    rank = min(rank, *matrices.shape[1:])
    if _is_iterated(matrices, rank):
        try:
            return _leading_basis(matrices, rank).to(matrices.dtype)
        except RuntimeError:  # as in `_gram_svd`
            pass  # the full decomposition below tells, and has another way
    if matrices.dtype == torch.float64 or matrices.shape[1] < matrices.shape[2]:
        return thin_svd(matrices, lambda _: rank)[2].to(matrices.dtype)
    values, vectors = _gram_svd(matrices.double())
    real = _real(values, numerical_rank_tolerance(tuple(matrices.shape), matrices.dtype))[:, None, :rank]
    return torch.where(real, vectors[:, :, :rank], 0.0).to(matrices.dtype)


def complement_basis(vectors: Tensor, basis: Tensor) -> Tensor:
    r"""Compute an orthonormal basis of :math:`(I - QQ^\top)V` (Eq. 5), rank-revealing.

    What remains of ``vectors`` outside the span of ``basis`` may have lower rank than ``vectors``. A plain QR would
    fill the missing columns with arbitrary directions; here they are zero.

    Args:
        vectors: ``(L, d, r)`` with orthonormal or zero columns.
        basis: ``(L, d, q)`` with orthonormal or zero columns.

    Returns:
        ``(L, d, r)`` in the dtype of ``vectors``: orthonormal columns orthogonal to ``basis``, then zero columns.

    Example:
        >>> q0 = torch.tensor([[[1.0], [0.0], [0.0]]])
        >>> v = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]])  # the first column lies inside q0
        >>> complement_basis(v, q0).abs().tolist()
        [[[0.0, 0.0], [1.0, 0.0], [0.0, 0.0]]]
    """
    wide, base = vectors.double(), basis.double()
    residual = wide - base @ (base.mT @ wide)
    residual = residual - base @ (base.mT @ residual)  # a second pass removes what rounding left of the first
    tolerance = numerical_rank_tolerance(tuple(vectors.shape), vectors.dtype)
    if vectors.dtype == torch.float64:
        left, values, _ = _svd(residual)
    else:  # the columns are lengths of at most 1: there is no larger one to hide behind
        values, right = _gram_svd(residual)
        left = residual @ (right / torch.where(values > tolerance, values, 1.0)[:, None])
    return torch.where((values > tolerance)[:, None, :], left, 0.0).to(vectors.dtype)


def thin_svd(matrices: Tensor, rank: Callable[[Tensor], int] | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the thin SVD of each matrix in double precision.

    Components beyond the numerical rank are zero, vectors as well as values. Single-precision input goes through the
    Gram matrix of its shorter side, as in :func:`right_singular_basis`, in a third of the time.

    Args:
        matrices: ``(L, d_out, d_in)``.
        rank: gets the singular values ``(L, k)`` and gives the number ``r`` of leading vectors; all if left out.

    Returns:
        ``U (L, d_out, r)``, ``S (L, k)`` and ``V (L, d_in, r)`` with ``k = min(d_out, d_in)``.

    Example:
        >>> u, s, v = thin_svd(torch.tensor([[[0.0, 2.0]]]))
        >>> s.tolist(), ((u * s[:, None]) @ v.mT).tolist()
        ([[2.0]], [[[0.0, 2.0]]])
    """
    single = matrices.dtype != torch.float64
    if single and matrices.shape[1] < matrices.shape[2]:
        v, s, u = thin_svd(matrices.mT, rank)
        return u, s, v
    wide = matrices.double()
    if single:
        s, v = _gram_svd(wide)
    else:
        u, s, vh = _svd(wide)
        v = vh.mT
    real = _real(s, numerical_rank_tolerance(tuple(matrices.shape), matrices.dtype))
    s = torch.where(real, s, 0.0)
    columns = slice(None if rank is None else rank(s))
    real, v = real[:, None, columns], v[:, :, columns]
    if single:
        u = wide @ (v / torch.where(real, s[:, None, columns], 1.0))
    return torch.where(real, u[:, :, columns], 0.0), s, torch.where(real, v, 0.0)


def polar_factor(matrices: Tensor, tolerance: float | None = None) -> tuple[Tensor, Tensor]:
    r"""Compute the singular values and the polar factor :math:`UV^\top` of each matrix.

    Args:
        matrices: ``(L, d_out, d_in)``.
        tolerance: directions of singular values up to this share of the largest are left out of the factor; by default
            the numerical rank decides. 0 keeps arbitrary directions of a rank-deficient matrix.

    Returns:
        Values ``(L, k)`` and factor ``(L, d_out, d_in)``, in the input's dtype.

    Example:
        >>> polar_factor(torch.tensor([[[0.0, 2.0], [0.0, 0.0]]]))[1].tolist()
        [[[0.0, 1.0], [0.0, 0.0]]]
    """
    if matrices.shape[1] < matrices.shape[2]:
        values, factor = polar_factor(matrices.mT, tolerance)
        return values, factor.mT
    wide = matrices.double()
    kind = matrices.dtype
    limit = numerical_rank_tolerance(tuple(matrices.shape), kind) if tolerance is None else tolerance
    if kind == torch.float64 or limit == 0:
        u, s, vh = _svd(wide)
        factor = (u * ((s >= 0) if limit == 0 else _real(s, limit))[:, None]) @ vh
    else:  # A V S^-1 V^T
        s, v = _gram_svd(wide)
        real = _real(s, limit)
        factor = wide @ ((v * torch.where(real, 1 / s, 0.0)[:, None]) @ v.mT)
    return s.to(matrices.dtype), factor.to(matrices.dtype)


def orthogonalize_jointly(first: Tensor, second: Tensor, precision: torch.dtype) -> Tensor:
    r"""Replace two bases by the nearest columns that are all orthogonal: the polar factor of both side by side.

    It is :math:`[A\,B]\,([A\,B]^\top[A\,B])^{-1/2}`, and the SVD :math:`A^\top B = P\,\mathrm{diag}(\sigma)\,Q^\top` of
    half the size gives it: :math:`[P; \pm Q]/\sqrt2` are the eigenvectors of the Gram matrix and
    :math:`1 \pm \sigma` its eigenvalues. A direction that both bases have is shared between its two columns.

    Args:
        first: ``A``, ``(L, d, h)`` with orthonormal or zero columns, float64.
        second: ``B``, likewise.
        precision: dtype of the data that both come from; it decides which directions count as the same.

    Returns:
        ``(L, d, 2 h)``; zero columns stay zero.

    Example:
        >>> a, b = torch.tensor([[[1.0], [0.0]]]).double(), torch.tensor([[[0.6], [0.8]]]).double()
        >>> c = orthogonalize_jointly(a, b, torch.float64)
        >>> [[round(x, 4) for x in row] for row in c[0].tolist()]
        [[0.9487, 0.3162], [-0.3162, 0.9487]]
    """
    p, sigma, qh = _svd(first.mT @ second)
    p, gap, qh = _refine_near_ones(first, second, p, sigma, qh, precision)
    sizes = torch.stack([2 - gap, gap]).sqrt()
    shape = (first.shape[1], 2 * first.shape[2])
    tolerance = max(numerical_rank_tolerance(shape, precision), 1e-7)  # rounding leaves the root of 1e-16
    inverse = torch.where(sizes > tolerance * sizes[:1, :, :1], 1 / sizes, 0.0)
    even, odd = (inverse[0] + inverse[1])[:, None] / 2, (inverse[0] - inverse[1])[:, None] / 2
    upper = torch.cat([p * even @ p.mT, p * odd @ qh], dim=2)
    lower = torch.cat([qh.mT * odd @ p.mT, qh.mT * even @ qh], dim=2)
    return torch.cat([first, second], dim=2) @ torch.cat([upper, lower], dim=1)


def _refine_near_ones(
    first: Tensor, second: Tensor, p: Tensor, sigma: Tensor, qh: Tensor, precision: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Vectors of the SVD of :math:`A^\top B`, and :math:`1 - \sigma` without cancellation.

    For two directions that nearly coincide ``1 - sigma`` has lost its digits, and vectors of neighbouring values are
    mixed. What remains of ``B`` outside of ``A`` has them: its singular values are the sines :math:`\rho`, and
    :math:`1 - \sigma = \rho^2 / (1 + \sigma)`. Few layers have such directions, so they are taken one by one.
    """
    gap = (1 - sigma).clamp(min=0)
    eps = torch.finfo(torch.float64).eps
    near = gap < min(0.1, 1e4 * eps / torch.finfo(precision).eps)
    if not near.any():
        return p, gap, qh
    p, qh = p.clone(), qh.clone()
    for layer in near.any(1).nonzero().flatten().tolist():
        columns = near[layer].nonzero().flatten()
        a, b = first[layer], second[layer]
        right = qh[layer, columns].T
        along = a.T @ (b @ right)
        residual = b @ right - a @ along
        residual = residual - a @ (a.T @ residual)  # rounding left a part of `A` in it
        _, sines, turn = torch.linalg.svd(residual, full_matrices=False)
        cosines = (1 - sines.square()).clamp(min=0).sqrt()
        p[layer, :, columns] = (along @ turn.T) / cosines
        qh[layer, columns] = turn @ qh[layer, columns]
        gap[layer, columns] = sines.square() / (1 + cosines)
    return p, gap, qh


def _real(values: Tensor, tolerance: float) -> Tensor:
    """Find which of the falling singular values ``(L, k)`` belong to a direction that a matrix has."""
    return (values > tolerance * values[:, :1]) & (values > 0)


def _is_iterated(matrices: Tensor, rank: int) -> bool:
    """Whether leading vectors are found by iteration, which pays where full decompositions wait for one another."""
    if matrices.device.type not in _ITERATED_ON or matrices.dtype == torch.float64:
        return False
    return min(matrices.shape[1:]) >= _LARGE and rank < min(matrices.shape[1:]) / 2


def _leading_basis(matrices: Tensor, rank: int) -> Tensor:
    """What :func:`right_singular_basis` returns, in double precision."""
    turned = matrices.shape[1] < matrices.shape[2]
    wide = (matrices.mT if turned else matrices).double()
    tolerance = numerical_rank_tolerance(tuple(matrices.shape), matrices.dtype)
    values, vectors = leading_eigenvectors(wide.mT @ wide, rank, tolerance**2)
    values = values.clamp(min=0).sqrt()
    real = _real(values, tolerance)[:, None]
    if turned:
        vectors = wide @ (vectors / torch.where(real, values[:, None], 1.0))
    return torch.where(real, vectors, 0.0)


def _gram_svd(wide: Tensor) -> tuple[Tensor, Tensor]:
    """Compute singular values ``(L, k)``, falling, and right vectors ``(L, d_in, k)`` of double-precision matrices.

    Exact to ``1e-8`` of the largest value, which is far below the numerical rank of single precision.
    """
    try:
        # beyond 32 columns cuSOLVER takes matrices one after another, small ones more slowly than a core of the CPU
        alone = wide.is_cuda and 32 < wide.shape[-1] < _LARGE
        decompose = decompose_on_cores if alone else torch.linalg.eigh
        eigenvalues, vectors = decompose(_lower_gram(wide))
    except RuntimeError as error:  # torch.linalg.LinAlgError, or a cuSOLVER failure
        warnings.warn(
            f"the eigensolver failed ({error}); the slower SVD takes its place.", RuntimeWarning, stacklevel=3
        )
        _, values, right = _svd(wide)
        return values, right.mT
    return eigenvalues.flip(-1).clamp_(min=0).sqrt_(), vectors.flip(-1)


def _lower_gram(wide: Tensor) -> Tensor:
    """Compute ``A^T A`` from the diagonal down, all that ``eigh`` reads: 5/8 of the work for large matrices."""
    size = wide.shape[-1]
    if size < _LARGE:
        return wide.mT @ wide
    gram, step = wide.new_zeros(*wide.shape[:-2], size, size), -(-size // 4)
    for start in range(0, size, step):
        rows, columns = slice(start, None), slice(start, start + step)
        gram[..., rows, columns] = wide[..., rows].mT @ wide[..., columns]
    return gram


def _svd(matrices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the thin SVD of the whole stack, or of each matrix on the CPU if that fails."""
    try:
        u, s, vh = torch.linalg.svd(matrices, full_matrices=False)
    except RuntimeError:
        parts = [_svd_alone(matrix.cpu(), index) for index, matrix in enumerate(matrices)]
        u, s, vh = (torch.stack(part).to(matrices.device) for part in zip(*parts, strict=True))
    return u, s, vh


def _svd_alone(matrix: Tensor, index: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the SVD of one matrix, or of its transpose, on which a failing solver may succeed."""
    try:
        u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    except RuntimeError:
        try:
            v, s, uh = torch.linalg.svd(matrix.mT.contiguous(), full_matrices=False)
        except RuntimeError as error:
            raise ArithmeticError(f"the SVD of matrix {index} of the stack does not converge") from error
        u, vh = uh.mT, v.mT
    return u, s, vh
