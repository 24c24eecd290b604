"""A decode step of experts: the product, and what brings those that are not in their pool from pinned host memory."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn.functional import silu

from benchmarks.gpu_cases.case import LIMITS, Aim, Case, Place, Work, checked, normal, relative_error
from forebay.kernels.formats.slot_state import slot_state
from forebay.kernels.products.expert_slots import reference as slot
from forebay.kernels.products.experts import reference as expert

AIM = (Aim("bandwidth", 0.75),)
MEMCPY = (Aim("cudaMemcpyAsync", 0.9),)  # the link's rate, but for what a kernel loses


def experts_work(place: Place, tokens: int) -> Work:
    """As Qwen3-30B-A3B has them: 8 of 128 for each token."""
    from forebay.kernels.products.experts.gpu import bind_experts

    tokens, hidden, inner = place.size(tokens, 3), place.size(2048, 32), place.size(768, 16)
    count, picks = place.size(128, 4), place.size(8, 2)
    x = normal(place, tokens, hidden, scale=hidden**-0.5)
    up = normal(place, count, 2 * inner, hidden, scale=hidden**-0.5)
    down = normal(place, count, hidden, inner, scale=inner**-0.5)
    drawn = torch.rand(tokens, count, generator=torch.Generator().manual_seed(tokens))
    order = drawn.argsort(1)[:, :picks].contiguous()
    index, shares = order.to(place.device), normal(place, tokens, picks).abs()
    held, out = expert.Experts(up, None, down, None), torch.empty_like(x)
    read = len(set(order.flatten().tolist())) * 3 * inner * hidden * 2
    call = bind_experts(x, index, shares, held, expert.Form(), expert.Storage(), out)
    verify = checked(call, out, lambda: expert.reference(x, index, shares, held))

    def grouped() -> Tensor:
        picked, by = index.flatten().sort()
        ends = torch.searchsorted(picked, torch.arange(count, device=x.device), right=True, out_int32=True)
        gate, more = torch._grouped_mm(x[by // picks], up.mT, offs=ends).chunk(2, -1)
        made = torch._grouped_mm(silu(gate) * more, down.mT, offs=ends) * shares.flatten()[by, None]
        return torch.zeros_like(x).index_add_(0, by // picks, made)

    return Work(f"{tokens} tokens, {picks} of {count} x 3x{inner}x{hidden}", [call],
                lambda: max(verify(), relative_error(grouped(), out)), LIMITS[x.dtype], read,
                flops=6 * tokens * picks * inner * hidden, aims=AIM if tokens < 8 else (),
                rivals={"torch._grouped_mm": [grouped]})  # fmt: skip


def assign_work(place: Place, tokens: int) -> Work:
    """Slots for the experts that so many tokens pick of 128. 40 are present, and each call ages their counts."""
    from forebay.kernels.products.expert_slots.gpu import bind_assign_slots

    experts, picks, slots = place.size(128, 9), place.size(8, 2), place.size(40, 3)
    sizes = slot_state(slots, experts, tokens * picks, True)
    drawn = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(tokens)).argsort(1)
    index = drawn[:, :picks].contiguous().to(place.device)
    state, told = (torch.zeros(n, dtype=torch.int64, device=place.device) for n in (sizes.numbers, sizes.told))
    call = bind_assign_slots(index, state, told, sizes)

    def verify() -> float:
        want = slot.reference(index.cpu(), state.cpu(), sizes)
        call()
        return float(sum((got.cpu() != each).sum() for got, each in zip((state, told), want, strict=True)))

    return Work(f"{tokens} tokens, {picks} of {experts}, {slots} slots", [call], verify, 0.0, sizes.nbytes)


def fetch_work(place: Place, picks: int) -> Work:
    """Experts of Qwen3-30B-A3B in 4 bits, of which a step misses so many, from pinned host memory to their slots."""
    from forebay.kernels.products.expert_slots.gpu import bind_fetch_rows

    row, experts, slots = place.size(5 << 19, 4104), place.size(128, 5), place.size(40, 4)
    picks = min(picks, slots)
    generator = torch.Generator().manual_seed(picks)
    table = torch.randint(0, 256, (experts, row), dtype=torch.uint8, generator=generator)
    table = table.pin_memory() if place.device.type == "cuda" else table
    named, into = (torch.randperm(n, generator=generator)[:picks] for n in (experts, slots))
    index = torch.full((slots,), -1)
    index[into] = named
    out = torch.zeros(slots, row, dtype=torch.uint8, device=place.device)
    fetch = bind_fetch_rows(table.view(-1), index.to(place.device), out.view(-1), row)

    def verify() -> float:
        out.fill_(7)
        fetch()
        want = torch.full((slots, row), 7, dtype=torch.uint8)
        want[into] = table[named]
        return float((out.cpu() != want).sum())

    def one_by_one() -> None:
        for source, target in zip(named.tolist(), into.tolist(), strict=True):
            out[target].copy_(table[source], non_blocking=True)

    return Work(f"{picks} of {experts} x {row} bytes", [fetch], verify, 0.0, picks * row,
                rivals={"cudaMemcpyAsync": [one_by_one]}, aims=MEMCPY)  # fmt: skip


def cases(tiny: bool) -> list[Case]:
    """Steps of Qwen3-30B-A3B over one token and more."""
    return [*(Case("experts", functools.partial(experts_work, tokens=tokens)) for tokens in (1, 64, 1024)),
            *(Case("expert_slots", functools.partial(fetch_work, picks=picks)) for picks in (5, 40)),
            *(Case("expert_slots", functools.partial(assign_work, tokens=tokens)) for tokens in (1, 16))]
