"""Placement of weights, cache and activations: the placement LP, and an exact pass over whole tensors and blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from forebay.rewriter.policy.block_costs import BlockCosts
from forebay.rewriter.policy.shares import INDEX, TIERS, Affine, N
from forebay.rewriter.predict.model_shapes import ATTENTION, MLP, ModelShape

if TYPE_CHECKING:
    from scipy.optimize import OptimizeResult

CACHE_BLOCK_TOKENS = 16
INTEGER_GAP = 1e-3  # the exact pass may stop this close to its optimum
TIE = 1e-5  # of the time: what an equally fast placement on the next slower tier is charged
SLACK = 2e-6  # of a capacity: twice what the solver may overstep
Closed = frozenset[tuple[str, str]]  # (tensor, tier) pairs that may hold nothing
NO_CHECKPOINTS: Closed = frozenset(("checkpoint", tier) for tier in TIERS)


@dataclass(frozen=True)
class Placement:
    """Shares (N of them and a final 1) of every tensor on every tier, and the seconds the block then takes."""

    x: Affine
    time_s: float


@dataclass(frozen=True)
class Indivisible:
    """`count` equal things of `tensor`, each `share` of it, that lie whole on one tier."""

    tensor: str
    share: float
    count: int
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class RoundedPlacement(Placement):
    """A placement of whole things: how many of each item lie on device, host and disk."""

    items: tuple[tuple[Indivisible, tuple[int, int, int]], ...]


@dataclass(frozen=True)
class Goal:
    """The quantity to minimize: the time, or the bytes on `tier` (whose capacity then does not count) within
    `time_s`."""

    tier: str = ""
    time_s: float = np.inf


FASTEST = Goal()


@dataclass(frozen=True)
class _Constraints:
    """The problem in the N shares and one variable per piece of time: minimise cost @ y subject to a @ y <= b."""

    cost: Affine
    a: Affine
    b: Affine


def place(costs: BlockCosts, *, closed: Closed = NO_CHECKPOINTS, goal: Goal = FASTEST) -> Placement | None:
    """The best placement by fractions, or None when nothing fits; `closed` shares are 0."""
    rows = _rows(costs, goal)
    sums = np.zeros((len(_SUMS), N + len(costs.pieces)))
    for i, tensors in enumerate(_SUMS):
        for tensor in tensors:
            for tier in TIERS:
                sums[i, INDEX[tensor, tier]] = 1
    upper = np.append(_upper(costs, closed, goal), np.full(len(costs.pieces), np.inf))
    found = _solve(rows, rows.a, sums, np.ones(len(_SUMS)), upper, rows.cost, np.zeros_like(upper))
    if found.x is None:
        return None
    x = np.append(np.clip(found.x[:N], 0, 1), 1.0)
    return Placement(x, costs.time_s(x))


def round_placement(costs: BlockCosts, items: list[Indivisible], *, closed: Closed = NO_CHECKPOINTS,
                    goal: Goal = FASTEST) -> RoundedPlacement | None:
    """The best placement of whole items that respects every capacity exactly, or None when there is none.

    A mixed-integer program (HiGHS) over counts per tier: what it returns is feasible by construction, no better than
    the LP's placement, and within 0.1 % of the best whole placement.
    """
    rows = _rows(costs, goal)
    pieces, n_counts = len(costs.pieces), len(TIERS) * len(items)
    shares = np.zeros((N, n_counts))  # shares = this @ counts
    for i, item in enumerate(items):
        for j, tier in enumerate(TIERS):
            shares[INDEX[item.tensor, tier], 3 * i + j] = item.share

    def in_counts(matrix: Affine) -> Affine:
        return np.hstack([matrix[:, :N] @ shares, matrix[:, N:]])

    # Sums over tiers: exact per item, except that cache blocks are shared by K and V and checkpoints.
    sums, wanted = [], []
    for tensors in (("attention",), ("mlp",), ("outside",), ("activation",)):
        for i, item in enumerate(items):
            if item.tensor in tensors:
                row = np.zeros(n_counts + pieces)
                row[3 * i:3 * i + 3] = 1
                sums.append(row)
                wanted.append(item.count)
    cache = [i for i, item in enumerate(items) if item.tensor in ("kv", "checkpoint")]
    row = np.zeros(n_counts + pieces)
    for i in cache:
        row[3 * i:3 * i + 3] = 1
    sums.append(row)
    wanted.append(items[cache[0]].count)
    allowed = _upper(costs, closed, goal)
    upper = [item.count if allowed[INDEX[item.tensor, tier]] else 0 for item in items for tier in TIERS]
    integers = np.append(np.ones(n_counts), np.zeros(pieces))
    found = _solve(rows, in_counts(rows.a), np.array(sums), np.array(wanted, dtype=float),
                   np.append(upper, np.full(pieces, np.inf)), in_counts(rows.cost[None])[0], integers)
    if found.x is None:
        return None
    counts = np.rint(found.x[:n_counts]).astype(int)
    x = np.append(shares @ counts, 1.0)
    placed = tuple((item, (int(counts[3 * i]), int(counts[3 * i + 1]), int(counts[3 * i + 2])))
                   for i, item in enumerate(items))
    return RoundedPlacement(x, costs.time_s(x), placed)


def items_of(model: ModelShape, sequences: int, tokens: int) -> list[Indivisible]:
    """Return the tensors that may lie on different tiers: weights (equal ones together), cache blocks of 16 tokens of
    one sequence in every layer, and the activations of each sequence."""
    items = []
    for stage in (ATTENTION, MLP):
        total = sum(k.count * k.elements(stage) for k in model.layers)
        by_size: dict[int, list[str]] = {}
        for name, elements in _layer_tensors(model, stage):
            by_size.setdefault(elements, []).append(name)
        items += [Indivisible(stage, size / total, len(names), tuple(names)) for size, names in by_size.items()]
    outside = sum(t.elements for t in model.outside)
    items += [Indivisible("outside", t.elements / outside, 1, (t.name,)) for t in model.outside]
    blocks = sequences * -(-tokens // CACHE_BLOCK_TOKENS)
    items += [Indivisible("kv", 1 / blocks, blocks), Indivisible("checkpoint", 1 / blocks, blocks)]
    return [*items, Indivisible("activation", 1 / sequences, sequences)]


def tensor_tiers(placement: RoundedPlacement) -> dict[str, str]:
    """The tier of every weight; equal weights are spread so that neighbouring layers differ as little as possible."""
    tiers = {}
    for item, counts in placement.items:
        left = dict(zip(TIERS, counts, strict=True))
        for i, name in enumerate(item.names):
            done = {t: n - left[t] for t, n in zip(TIERS, counts, strict=True)}
            tier = max((t for t in TIERS if left[t]), key=lambda t: (counts[TIERS.index(t)] * (i + 1) / item.count
                                                                     - done[t]))
            left[tier] -= 1
            tiers[name] = tier
    return tiers


def _layer_tensors(model: ModelShape, stage: str) -> Iterator[tuple[str, int]]:
    first = 0
    for kind in model.layers:
        for layer in range(first, first + kind.count):
            for tensor in kind.attention if stage == ATTENTION else kind.mlp:
                yield f"layers.{layer}.{tensor.name}", tensor.elements
        first += kind.count


# Shares that add up to 1; a cache block holds K and V or checkpoints.
_SUMS = (("attention",), ("mlp",), ("outside",), ("kv", "checkpoint"), ("activation",))


def _upper(costs: BlockCosts, closed: Closed, goal: Goal) -> Affine:
    """1 for every share that may be above 0."""
    upper = np.ones(N)
    for (tensor, tier), i in INDEX.items():
        if (not costs.capacity[tier] and tier != goal.tier) or (tensor, tier) in closed:
            upper[i] = 0
    return upper


def _rows(costs: BlockCosts, goal: Goal) -> _Constraints:
    pieces = costs.pieces
    a, b = [], []
    for i, piece in enumerate(pieces):
        for row in piece.rows():
            if row.any():
                longest = np.zeros(N + len(pieces))
                longest[:N], longest[N + i] = row[:N], -1
                a.append(longest)
                b.append(-row[N])
    for tier in TIERS:
        if tier != goal.tier:
            row, limit = costs.memory[tier], float(costs.capacity[tier])
            scale = max(limit, 1.0)  # in shares of the tier, so that HiGHS sees numbers near 1
            a.append(np.append(row[:N] / scale, np.zeros(len(pieces))))
            b.append((limit - row[N]) / scale - (SLACK if limit else 0.0))
    time = np.append(np.zeros(N), [piece.count for piece in pieces])
    reference = costs.time_s(np.append(np.full(N, 1 / 3), 1.0))
    tie = np.array([TIE * TIERS.index(tier) / len(_SUMS) for _, tier in INDEX])
    if goal.tier:
        if np.isfinite(goal.time_s):
            a.append(time / goal.time_s)
            b.append(1.0)
        cost = np.append(costs.memory[goal.tier][:N] / 1e9 + tie, np.zeros(len(pieces)))
    else:
        cost = time / reference + np.append(tie, np.zeros(len(pieces)))
    return _Constraints(cost, np.array(a), np.array(b))


def _solve(rows: _Constraints, a: Affine, sums: Affine, wanted: Affine, upper: Affine, cost: Affine,
           integers: Affine) -> OptimizeResult:
    from scipy.optimize import Bounds, LinearConstraint, linprog, milp  # half a second, for searches of policies alone
    from scipy.sparse import csr_array

    if not integers.any():  # linprog: half of milp's overhead
        return linprog(cost, a, rows.b, sums, wanted, np.column_stack([np.zeros_like(upper), upper]), method="highs")
    return milp(cost, constraints=[LinearConstraint(csr_array(a), -np.inf, rows.b),
                                   LinearConstraint(csr_array(sums), wanted, wanted)],
                integrality=integers, bounds=Bounds(0, upper), options={"mip_rel_gap": INTEGER_GAP, "time_limit": 2.0})
