r"""Leading eigenvectors of many symmetric matrices at once, by iteration, with a proof that they are the right ones.

On a GPU the full decompositions of a stack are what a fold waits for, while matrix products cost next to nothing. So
a block of somewhat more columns than wanted is multiplied by polynomials of the matrices until it spans the leading
directions. Polynomials that separate eigenvalues next to each other let the largest ones grow beyond all bounds; two
measures keep the columns apart:

- **Flattening.** :math:`H = I - (I - G/(2^k c))^{2^k} \approx I - e^{-G/c}` takes ``k`` products. It keeps the order of
  the eigenvalues, is close to :math:`G/c` up to ``c`` (the size of the last wanted eigenvalue) and never above 1.
- **Short filters.** Chebyshev polynomials of ``H`` that stay below 1 on the unwanted eigenvalues (Zhou, Saad, Tiago and
  Chelikowsky 2006), as long as their growth allows, and Cholesky QR between them.

Rayleigh and Ritz then give eigenvalues and vectors, and :func:`is_certain` says of which matrices they are proved. The
small eigenproblems of this go to the CPU's cores, because cuSOLVER takes the matrices of a stack one after another.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor

from safemerge_pl.runtime.cores import map_on_cores

__all__ = ["decompose_on_cores", "is_certain", "leading_eigenvectors"]

ANGLE = 1e-6
"""Largest angle to the exact leading space; single precision resolves less."""

_ROUNDS = 2
"""Attempts before the full decomposition; the second is for the matrices that the first did not settle."""

_START_STEPS = 3
"""Plain multiplications before eigenvalues are estimated for the first time."""

_DAMPING = 1e-13
"""What a round has to make of unwanted directions, where the estimated eigenvalues hold."""

_GROWTH = 1e7
"""Most that a filter may spread the lengths of orthonormal columns; Cholesky QR takes the root of ``1e16``."""

_FLATTENINGS = 20
"""Most squarings of a matrix: eigenvalues from ``2^-20`` of the largest become equal in size."""


def leading_eigenvectors(gram: Tensor, rank: int, floor: float = 1e-10) -> tuple[Tensor, Tensor]:
    r"""The ``rank`` leading eigenpairs of each matrix, to an angle of :data:`ANGLE` between exact and found space.

    The same input gives the same bits. Where the proof fails, because the last wanted eigenvalue and the next are
    too close or eigenvalues are spread too widely, that matrix is decomposed in full.

    Args:
        gram: stack ``(L, n, n)``, float64, symmetric, positive semi-definite, finite.
        rank: number of eigenpairs wanted, at least 1 and at most ``n``.
        floor: share of a matrix's largest eigenvalue below which its eigenvectors are of no interest: they come back
            orthonormal, but need not be the right ones.

    Returns:
        Eigenvalues ``(L, rank)``, falling, and orthonormal eigenvectors ``(L, n, rank)``.

    Raises:
        RuntimeError: if a full decomposition is needed and fails (``torch.linalg.LinAlgError``).

    Example:
        >>> values, vectors = leading_eigenvectors(torch.diag(torch.arange(20.0, 0.0, -1).double())[None], 2)
        >>> [round(value, 9) for value in values[0].tolist()], vectors[0, :2].abs().round(decimals=6).tolist()
        ([20.0, 19.0], [[1.0, 0.0], [0.0, 1.0]])
    """
    count, size = gram.shape[:2]
    block = -(-(rank + max(8, rank // 3)) // 8) * 8  # a third more: small problems grow faster than filters get shorter
    if block >= size or not count:
        return _decompose(gram, rank)
    basis = _start(gram, block)
    small = (basis.mT @ (gram @ basis)).cpu()
    values = torch.stack(list(map_on_cores(torch.linalg.eigvalsh, list(small)))).flip(-1).to(gram.device)
    flat, scale = _flatten(gram, values[:, 0], _last_wanted(values, rank, floor))
    found_values, found = gram.new_empty(count, rank), gram.new_empty(count, size, rank)
    places = torch.arange(count, device=gram.device)  # in the stack, of what is still to be settled
    for _ in range(_ROUNDS):
        basis = _filter(flat, basis, -torch.expm1(-values / scale[:, None]), rank)
        values, basis, images = _rotate(gram, basis)
        done = is_certain(gram, values, basis, images, rank, floor)
        found_values[places], found[places] = values[:, :rank], basis[:, :, :rank]
        left = (~done).nonzero()[:, 0]
        if not len(left):
            return found_values, found
        gram, flat, scale, values, basis, places = (x[left] for x in (gram, flat, scale, values, basis, places))
    found_values[places], found[places] = _decompose(gram, rank)
    return found_values, found


def is_certain(gram: Tensor, values: Tensor, vectors: Tensor, images: Tensor, rank: int, floor: float) -> Tensor:
    r"""Of which matrices the leading vectors are proved to span the leading eigenspace, ``(L,)`` bool.

    Let :math:`X` be the leading columns with Ritz values :math:`\Theta`, and let :math:`\sigma` lie between the last of
    them and the next. If :math:`\sigma I - (G - X \Theta X^\top)` has a Cholesky factor, no vector orthogonal to
    :math:`X` has a Rayleigh quotient above :math:`\sigma`: nothing was missed. The sine of the angle between both
    spaces is then at most :math:`\|GX - X\Theta\|_F / (\theta_{min} - \sigma)` (Davis and Kahan 1970).

    Args:
        gram: ``(L, n, n)``.
        values: Ritz values, falling, ``(L, b)`` with ``b > rank``.
        vectors: orthonormal Ritz vectors, ``(L, n, b)``.
        images: ``gram @ vectors``.
        rank: number of leading vectors in question; fewer where the others' values are too small to matter.
        floor: as in :func:`leading_eigenvectors`.

    Example:
        >>> gram, eye = torch.diag(torch.tensor([3.0, 2.0, 1.0]).double())[None], torch.eye(3).double()[None]
        >>> right, wrong = eye[:, :, :2], eye[:, :, 1:]
        >>> is_certain(gram, torch.tensor([[3.0, 2.0]]), right, gram @ right, 1, 0.0).tolist()
        [True]
        >>> is_certain(gram, torch.tensor([[2.0, 1.0]]), wrong, gram @ wrong, 1, 0.0).tolist()  # e2 is not the leading
        [False]
    """
    wanted = (values > floor * values[:, :1])[:, :rank] & (values[:, :rank] > 0)
    number = wanted.sum(1, keepdim=True)
    last, following = values.gather(1, (number - 1).clamp(min=0)), values.gather(1, number)
    between = torch.where(number < rank, floor * values[:, :1], (last + following) / 2)  # fewer: no other is to matter
    leading, kept = vectors[:, :, :rank], torch.where(wanted, values[:, :rank], 0.0)[:, None]
    missed = torch.where(wanted[:, None], images[:, :, :rank] - leading * kept, 0.0).flatten(1).norm(dim=1)
    rest = torch.baddbmm(gram, leading * kept, leading.mT, beta=-1)
    rest.diagonal(dim1=1, dim2=2).add_(between)
    whole = torch.linalg.cholesky_ex(rest).info == 0
    close = missed <= ANGLE * (last - between)[:, 0]
    apart = leading.mT @ leading
    apart.diagonal(dim1=1, dim2=2).sub_(1)
    orthonormal = apart.flatten(1).norm(dim=1) <= ANGLE / 1000
    nothing = gram.diagonal(dim1=1, dim2=2).sum(1) == 0  # a zero matrix has no leading directions to miss
    proved: Tensor = orthonormal & (nothing | (whole & close & (number[:, 0] > 0)))
    return proved


def decompose_on_cores(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """``torch.linalg.eigh`` of each of many small matrices ``(L, n, n)`` on the CPU, one a core.

    Example:
        >>> decompose_on_cores(torch.diag(torch.tensor([3.0, 2.0]))[None])[0].tolist()
        [[2.0, 3.0]]
    """
    parts = list(map_on_cores(torch.linalg.eigh, list(matrices.cpu())))
    values, vectors = (torch.stack(part).to(matrices.device) for part in zip(*parts, strict=True))
    return values, vectors


def _decompose(gram: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The leading part of the full decomposition."""
    values, vectors = torch.linalg.eigh(gram)
    return values.flip(-1)[:, :rank], vectors.flip(-1)[:, :, :rank]


@lru_cache(maxsize=16)
def _noise(size: int, block: int, device: torch.device) -> Tensor:
    """The same random columns ``(size, block)`` for every matrix and in every run."""
    generator = torch.Generator("cpu").manual_seed(size)
    return torch.randn(size, block, generator=generator, dtype=torch.float64, device="cpu").to(device)


def _start(gram: Tensor, block: int) -> Tensor:
    """Random columns turned towards the leading directions, ``(L, n, b)``, orthonormal."""
    size = gram.flatten(1).norm(dim=1)[:, None, None]
    size = torch.where(size > 0, size, 1.0)
    basis = _noise(gram.shape[1], block, gram.device).expand(len(gram), -1, -1)
    for _ in range(_START_STEPS):  # the small share of itself keeps what the matrix maps to zero from vanishing
        basis = _orthonormalize(1e-6 * basis + (gram @ basis) / size)
    return _orthonormalize(basis)


def _orthonormalize(columns: Tensor) -> Tensor:
    """One step of Cholesky QR; a second one makes up for the rounding of the first."""
    columns = columns / columns.norm(dim=1, keepdim=True)
    factor, failed = torch.linalg.cholesky_ex(columns.mT @ columns)
    eye = torch.eye(factor.shape[1], dtype=factor.dtype, device=factor.device)
    factor = torch.where((failed == 0)[:, None, None], factor, eye)  # such columns fail the proof; others must not
    basis: Tensor = columns @ torch.linalg.solve_triangular(factor, eye.expand_as(factor), upper=False).mT
    return basis


def _last_wanted(values: Tensor, rank: int, floor: float) -> Tensor:
    """The smallest of the wanted eigenvalues that matters, ``(L,)``."""
    number = (values[:, :rank] > floor * values[:, :1]).sum(1, keepdim=True)
    return values.gather(1, (number - 1).clamp(min=0))[:, 0]


def _flatten(gram: Tensor, first: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """``H`` and its ``c``, so that the largest eigenvalue ``first`` and ``last`` become similar in size."""
    ceiling = 1.2 * first  # an estimate from below
    scale = torch.maximum(last, ceiling / 2**_FLATTENINGS)
    scale = torch.where(scale > 0, scale, 1.0)
    times = max(0, math.ceil(math.log2(max(1.0, float((ceiling / scale).max())))))
    flat = gram * (-1 / (2**times * scale))[:, None, None]
    diagonal = flat.diagonal(dim1=1, dim2=2)
    diagonal += 1
    for _ in range(times):
        flat = flat @ flat
    flat.neg_().diagonal(dim1=1, dim2=2).add_(1)
    return flat, scale


def _filter(flat: Tensor, basis: Tensor, values: Tensor, rank: int) -> Tensor:
    """Turn the columns, which are overwritten, to the leading directions of ``flat``; ``values`` estimate its own."""
    values = values.clamp(min=0)
    # Estimates come out too small, so what the middle of the surplus columns is given fits their end.
    edge = values[:, (rank + values.shape[1]) // 2].clamp(min=0.02)[:, None, None]
    growth, gain = (float(x) for x in _rates(values, edge[:, 0, 0], rank))
    degree = max(2, min(12, int(math.log(2 * _GROWTH) / growth)))
    segments = max(1, min(8, math.ceil(-math.log(_DAMPING) / (gain * degree))))
    doubled = flat * (4 / edge)  # twice what maps the unwanted interval [0, edge] to [-1, 1]
    doubled.diagonal(dim1=1, dim2=2).sub_(2)
    for _ in range(segments):
        before, basis = basis, torch.bmm(doubled, basis).div_(2)
        for _ in range(degree - 1):
            before, basis = basis, before.baddbmm_(doubled, basis, beta=-1)
        basis = _orthonormalize(basis)
    return _orthonormalize(basis)


def _rates(values: Tensor, edge: Tensor, rank: int) -> Tensor:
    """By how much a filter's logarithm grows a degree: at the largest eigenvalue at most, and at the last wanted."""
    largest = torch.arccosh((2 * 1.0 / edge - 1).clamp(min=1.001)).max()
    last = torch.arccosh((2 * values[:, rank - 1] / edge - 1).clamp(min=1.001))
    return torch.stack([largest, torch.where(values[:, rank - 1] > edge, last, largest).min()]).cpu()


def _rotate(gram: Tensor, basis: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rayleigh and Ritz: values ``(L, b)``, falling, vectors ``(L, n, b)``, and their images under ``gram``."""
    images = gram @ basis
    values, turn = decompose_on_cores(basis.mT @ images)
    turn = turn.flip(-1)
    return values.flip(-1), basis @ turn, images @ turn
