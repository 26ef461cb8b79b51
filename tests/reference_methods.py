"""The other merge methods as their papers' code writes them: whole streams, float64, one tensor at a time.

Slow on purpose and written apart from the package, which must equal it. The one thing borrowed is the random start of
NUFILT's ``A``, because those numbers are data. Section numbers are those of METHODS.

Every twin folds a stream of state dicts (name -> tensor, each parameter once) into ``pretrained`` and returns the
merged state dict after every task. Keyword arguments are the package's settings; ``linear`` names the weights of all
linear layers, ``selected`` maps the weights of attention and first feed-forward layers to canonical layer names.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from safemerge_pl.maths.recovery import initial_factors

State = dict[str, Tensor]
Stream = Sequence[Mapping[str, Tensor]]


def doubled(state: Mapping[str, Tensor]) -> State:
    return {name: tensor.detach().double() for name, tensor in state.items()}


def difference(state: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> State:
    return {name: state[name].double() - tensor.double() for name, tensor in other.items()}


def frobenius(state: Mapping[str, Tensor]) -> float:
    """Length of a whole state dict."""
    return torch.cat([tensor.flatten() for tensor in state.values()]).norm().item()


# --- Task Arithmetic (2) and naive accumulation ----------------------------------------------------------------------


def task_arithmetic(pretrained: State, stream: Stream, *, scaling: float) -> list[State]:
    merged, found = doubled(pretrained), []
    for theta in stream:
        tau = difference(theta, pretrained)
        merged = {name: merged[name] + scaling * tau[name] for name in merged}
        found.append(merged)
    return found


def naive_accumulation(
    pretrained: State, stream: Stream, *, selected: Mapping[str, str], scaling: float
) -> list[State]:
    """Only the selected weights get their task vectors."""
    seen = [{name: theta[name] if name in selected else pretrained[name] for name in pretrained} for theta in stream]
    return task_arithmetic(pretrained, seen, scaling=scaling)


# --- Ties-Merging (3) ------------------------------------------------------------------------------------------------


def ties(rows: Tensor, top_k: float) -> Tensor:
    """Trim, elect, disjoint sum of ``(2, D)``."""
    size = rows.shape[1]
    keep = int(size * top_k)
    trimmed = torch.zeros_like(rows)
    for row, vector in enumerate(rows):
        threshold = vector.abs().kthvalue(max(size - keep, 1)).values
        trimmed[row][vector.abs() >= threshold] = vector[vector.abs() >= threshold]
    sign = trimmed.sum(0).sign()
    sign[sign == 0] = sign.sum().sign()
    merged = torch.zeros(size, dtype=rows.dtype)
    for vector in trimmed:
        agrees = ((sign > 0) & (vector > 0)) | ((sign < 0) & (vector < 0))
        merged[agrees] += vector[agrees]
    return merged


def ties_merging(pretrained: State, stream: Stream, *, scaling: float, top_k: float) -> list[State]:
    names = sorted(pretrained)
    theta0 = torch.cat([pretrained[name].double().flatten() for name in names])
    merged, found = theta0, []
    for index, theta in enumerate(stream, start=1):
        tau = torch.cat([theta[name].double().flatten() for name in names]) - theta0
        merged = merged + scaling * (tau if index == 1 else ties(torch.stack([merged - theta0, tau]), top_k))
        parts = merged.split([pretrained[name].numel() for name in names])
        found.append({name: part.view(pretrained[name].shape) for name, part in zip(names, parts, strict=True)})
    return found


# --- methods of section 1.2: 2-D tensors by a rule, all others by the mean, the first task whole ---------------------


def by_matrix(
    pretrained: State, stream: Stream, merge: Callable[[Tensor, Tensor], Tensor], rest_scaling: float = 1.0
) -> list[State]:
    merged, found = doubled(pretrained), []
    for index, theta in enumerate(stream, start=1):
        if index == 1:
            merged = doubled({name: theta[name] for name in pretrained})
        else:
            tau_bar, tau = difference(merged, pretrained), difference(theta, pretrained)
            merged = {
                name: base.double()
                + (
                    merge(tau_bar[name], tau[name])
                    if base.ndim == 2
                    else rest_scaling * (tau_bar[name] + tau[name]) / 2
                )
                for name, base in pretrained.items()
            }
        found.append(merged)
    return found


def wudi_objective(x: Tensor, vectors: Sequence[Tensor]) -> Tensor:
    """Section 4 as it stands, with the ``o x o`` product; an empty vector has no term (trap 15.5)."""
    terms = [(((x - tau) @ tau.T) ** 2).sum() / (tau**2).sum() for tau in vectors if tau.any()]
    return torch.stack(terms).sum() if terms else (0 * x).sum()


def wudi_merging(pretrained: State, stream: Stream, *, lr: float, num_steps: int) -> list[State]:
    def merge(tau_bar: Tensor, tau: Tensor) -> Tensor:
        x = (tau_bar + tau).requires_grad_()
        optimizer = torch.optim.Adam([x], lr=lr)
        for _ in range(num_steps):
            optimizer.zero_grad()
            wudi_objective(x, [tau_bar, tau]).backward()
            optimizer.step()
        return x.detach()

    return by_matrix(pretrained, stream, merge)


def iso_c(pretrained: State, stream: Stream, *, scaling: float, inflate: bool = False) -> list[State]:
    """Section 5; the same for both values of ``inflate`` where every sum has full rank, as here."""

    def merge(tau_bar: Tensor, tau: Tensor) -> Tensor:
        u, s, vh = torch.linalg.svd(tau_bar + tau, full_matrices=False)
        return scaling * s.mean() * u @ vh

    return by_matrix(pretrained, stream, merge, rest_scaling=scaling)


def tsv_m(pretrained: State, stream: Stream, *, scaling: float) -> list[State]:
    """Section 7, with its padding; a zero vector has no directions (trap 15.1)."""

    def merge(tau_bar: Tensor, tau: Tensor) -> Tensor:
        rank = min(tau.shape)
        u_all, v_all = (torch.zeros(side, rank, dtype=tau.dtype) for side in tau.shape)
        s_all = torch.zeros(rank, dtype=tau.dtype)
        k = rank // 2
        for place, vector in enumerate((tau_bar, tau)):
            if vector.any():
                u, s, vh = torch.linalg.svd(vector, full_matrices=False)
                span = slice(place * k, (place + 1) * k)
                u_all[:, span], s_all[span], v_all[:, span] = u[:, :k], s[:k], vh[:k].T
        polar = []
        for side in (u_all, v_all):
            p, _, qh = torch.linalg.svd(side, full_matrices=False)
            polar.append(p @ qh)
        return scaling * polar[0] @ torch.diag(s_all) @ polar[1].T

    return by_matrix(pretrained, stream, merge)


# --- KnOTS-TIES (6) --------------------------------------------------------------------------------------------------


def knots_ties(
    pretrained: State,
    stream: Stream,
    *,
    linear: Sequence[str],
    scaling: float,
    top_k: float,
    scale_before_ties: bool,
    min_singular_value: float,
) -> list[State]:
    merged, found = doubled(pretrained), []
    for index, theta in enumerate(stream, start=1):
        tau_bar, tau = difference(merged, pretrained), difference(theta, pretrained)
        merged = dict(merged)
        for name in linear:
            if index == 1:
                merged[name] = merged[name] + scaling * tau[name]
                continue
            u, s, vh = torch.linalg.svd(torch.cat([tau_bar[name], tau[name]], dim=1), full_matrices=False)
            rank = int((s > min_singular_value).sum())
            if rank == 0:
                continue
            u, s, vh = u[:, :rank], torch.diag(s[:rank]), vh[:rank]
            d_in = tau[name].shape[1]
            seen = s @ vh if scale_before_ties else vh
            rows = torch.stack([seen[:, :d_in].flatten(), seen[:, d_in:].flatten()])
            v_ties = ties(rows, top_k).view(rank, d_in)
            merged[name] = merged[name] + scaling * (u @ v_ties if scale_before_ties else u @ s @ v_ties)
        found.append(merged)
    return found


# --- OPCM (8) --------------------------------------------------------------------------------------------------------


def opcm_clean(tau: Tensor, tau_bar: Tensor, alpha: float, *, zero_diagonal: bool) -> Tensor:
    """Projection with full bases; a zero accumulated vector protects nothing."""
    if not tau_bar.any():
        return tau
    u, s, vh = torch.linalg.svd(tau_bar, full_matrices=True)
    crossed = s.cumsum(0) / s.sum() > alpha
    split = int(crossed.int().argmax())  # of equal values the first
    p = u.T @ tau @ vh.T
    if zero_diagonal:
        for i in range(min(p.shape)):
            p[i, i] = 0
    p[:split, :split] = 0
    return u @ p @ vh


def opcm(
    pretrained: State, stream: Stream, *, linear: Sequence[str], alpha: float, zero_diagonal: bool
) -> tuple[list[State], list[tuple[float, float]]]:
    """The merged states, and lambda and the mean length after every task."""
    merged, scale, found, scales = doubled(pretrained), 1.0, [], []
    norms: list[float] = []
    for index, theta in enumerate(stream, start=1):
        tau_bar, tau = difference(merged, pretrained), difference(theta, pretrained)
        norms.append(frobenius(tau))
        mean = sum(norms) / len(norms)
        if index == 1:
            merged = doubled({name: theta[name] for name in pretrained})
        else:
            delta = {
                name: scale * tau_bar[name]
                + (
                    opcm_clean(tau[name], tau_bar[name], alpha, zero_diagonal=zero_diagonal)
                    if name in linear
                    else tau[name]
                )
                for name in pretrained
            }
            length = frobenius(delta)
            scale = length / mean if length and mean else 1.0  # trap 15.5
            merged = {name: base.double() + delta[name] / scale for name, base in pretrained.items()}
        found.append(merged)
        scales.append((scale, mean))
    return found, scales


# --- NUFILT (9) ------------------------------------------------------------------------------------------------------


def nufilt_objective(tau: Tensor, tau_bar: Tensor, v_o: Tensor, v_n: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Section 9.2 as it stands, with the filter ``P`` built whole."""
    p = torch.eye(tau.shape[1], dtype=tau.dtype) - v_o @ v_o.T
    delta = tau @ (p + b @ a)
    return ((tau @ v_n - (tau_bar + delta) @ v_n) ** 2).sum() + ((tau_bar @ v_o - (tau_bar + delta) @ v_o) ** 2).sum()


def leading(matrix: Tensor, rank: int) -> Tensor:
    """Right singular vectors; a zero matrix has none (trap 15.1)."""
    vh = torch.linalg.svd(matrix, full_matrices=False).Vh
    return vh[: rank if matrix.any() else 0].T


def nufilt(
    pretrained: State,
    stream: Stream,
    *,
    selected: Mapping[str, str],
    null_rank: int,
    recovery_rank: int,
    task_rank: int,
    num_steps: int,
    lr: float,
    filter_first: bool,
    seed: int,
) -> list[State]:
    merged, found = doubled(pretrained), []
    for index, theta in enumerate(stream, start=1):
        tau_bar_all, tau_all = difference(merged, pretrained), difference(theta, pretrained)
        merged = dict(merged)
        for name, layer in selected.items():
            tau_bar, tau = tau_bar_all[name], tau_all[name]
            if index == 1:
                first = min(null_rank, *tau.shape) if filter_first else 0
                v_o = torch.eye(tau.shape[1], dtype=tau.dtype)[:, :first]
                merged[name] = merged[name] + tau - tau @ v_o @ v_o.T
                continue
            v_o, v_n = leading(tau_bar, null_rank), leading(tau, task_rank)
            rank = min(recovery_rank, *tau.shape)
            a = initial_factors([layer], rank, tau.shape[1], seed=seed, index=index)[0].double().requires_grad_()
            b = torch.zeros(tau.shape[1], rank, dtype=tau.dtype, requires_grad=True)
            optimizer = torch.optim.Adam([a, b], lr=lr)
            for _ in range(num_steps):
                optimizer.zero_grad()
                nufilt_objective(tau, tau_bar, v_o, v_n, a, b).backward()
                optimizer.step()
            p = torch.eye(tau.shape[1], dtype=tau.dtype) - v_o @ v_o.T
            merged[name] = merged[name] + tau @ (p + b.detach() @ a.detach())
        found.append(merged)
    return found
