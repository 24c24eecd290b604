"""What a case of `benchmarks.gpu` is made of: calls over rotating buffers, a check, rivals, and aims."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from forebay.kernels.operator import Call

# Relative error allowed against float64, by dtype of the result.
LIMITS = {torch.float32: 1e-4, torch.float16: 1e-3, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Place:
    """Where cases run: the GPU at full size, or the CPU under Triton's interpreter at tiny sizes."""

    device: torch.device
    tiny: bool
    l2_nbytes: int = 0

    def size(self, full: int, tiny: int) -> int:
        """The one of two sizes that applies here."""
        return tiny if self.tiny else full

    def copies(self, nbytes: int) -> int:
        """Buffer sets of so many bytes that together are twice the L2, at most 64; one where nothing is timed."""
        return 1 if self.tiny else max(2, min(64, -(-2 * self.l2_nbytes // max(1, nbytes))))


@dataclass(frozen=True)
class Aim:
    """A target: `bandwidth` as a share of the measured copy rate, or how many times as fast as a rival."""

    what: str
    least: float


@dataclass
class Work:
    """One case, made: ours[i] works on buffer set i; verify() runs once what is timed and gives the error.

    candidates are other ways to do the same, of which the fastest counts, and whose times make the table of `key`.
    """

    shape: str
    ours: list[Call]
    verify: Callable[[], float]
    limit: float
    nbytes: int
    flops: int = 0
    rivals: dict[str, list[Call]] = field(default_factory=dict)
    aims: tuple[Aim, ...] = ()
    candidates: dict[str, list[Call]] = field(default_factory=dict)
    key: tuple[str, int, int, int] | None = None  # (kind, m, n, k) of products/linear/selection.py


@dataclass(frozen=True)
class Case:
    """An operator and how to make its work; made late, so that one case's memory is gone before the next."""

    op: str
    make: Callable[[Place], Work]


def relative_error(got: Tensor, want: Tensor) -> float:
    """Norm of the difference over the norm of want; infinite where got is not finite."""
    difference = (got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-30)
    return float(difference) if bool(got.isfinite().all()) else float("inf")


def checked(call: Call, out: Tensor, want: Callable[[], Tensor]) -> Callable[[], float]:
    """A verify(): poison out with NaN, call, compare with want()."""

    def verify() -> float:
        expected = want()
        out.fill_(torch.nan)
        call()
        return relative_error(out, expected)

    return verify


def normal(place: Place, *shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
    """Seeded normal numbers at this place."""
    made = torch.empty(shape, dtype=torch.float32, device=place.device)
    return made.normal_(generator=torch.Generator(place.device).manual_seed(sum(shape))).mul_(scale).to(dtype)


def repeated(make: Callable[[], Tensor], count: int) -> Iterator[Tensor]:
    """The first tensor and copies of it, each in memory of its own."""
    first = make()
    yield first
    for _ in range(count - 1):
        yield first.clone(memory_format=torch.preserve_format)
