"""Codebooks: the number that each code stands for, in formats whose codes are no whole numbers.

    e4m3    fp8 as OCP has it, E4M3FN: no infinities, and two codes for NaN, which no row holds
    e2m1    fp4 of MXFP4 and NVFP4
    nf4     quantiles of normal values in [-1, 1] (QLoRA, appendix E)
    fp4     bitsandbytes' fp4: its numbers over the largest
    iq1     odd numbers up to 15 over 16, with both signs: those of GGUF's IQ1 and IQ3_S
    iq2     the three magnitudes of GGUF's IQ2 over 64, with both signs
    iq3     those of its IQ3_XXS

Sources: OCP 8-bit Floating Point (OFP8) v1.0; OCP Microscaling Formats (MX) v1.0, 5.3.3; bitsandbytes' `functional.py`.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FP4 = (0.0, 0.005208333333333333, 0.6666666666666666, 1.0, 0.3333333333333333, 0.5, 0.16666666666666666, 0.25)
_IQ1 = tuple(v / 16 for v in range(1, 16, 2))
_IQ2 = (*(v / 64 for v in (8, 25, 43)), 0.0, 0.0, 0.0, 0.0, 0.0)
_IQ3 = tuple(v / 64 for v in (4, 12, 20, 28, 36, 44, 52, 62))


def _both_signs(half: tuple[float, ...]) -> tuple[float, ...]:
    return *half, *(-v for v in half)


FOURS = {"e2m1": _both_signs(_E2M1), "nf4": NF4, "fp4": _both_signs(_FP4), "iq1": _both_signs(_IQ1),
         "iq2": _both_signs(_IQ2), "iq3": _both_signs(_IQ3)}
GRIDS = ("iq1", "iq2", "iq3")  # whose codes were chosen for several values at a time
IN_BYTES = ("e2m1", *GRIDS)  # whose numbers are multiples, of at most 127, of one of them
# By their numbers in the C++ and Triton kernels; 0: codes are whole numbers.
CODEBOOKS = ("", "e4m3", *FOURS)


@functools.cache
def codebook_values(codebook: str) -> Tensor:
    """Return the value of each code, in fp32."""
    if codebook == "e4m3":
        return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    return torch.tensor(FOURS[codebook], dtype=torch.float32)


def largest(codebook: str) -> float:
    """The largest number of a codebook."""
    return float(codebook_values(codebook).nan_to_num(0.0).max())


def nearest_codes(x: Tensor, codebook: str) -> Tensor:
    """uint8 codes of the numbers nearest to fp32 x, of which none exceeds the largest by more than rounding."""
    if codebook == "e4m3":
        most = largest(codebook)
        return x.clamp(-most, most).to(torch.float8_e4m3fn).view(torch.uint8)
    values, order = codebook_values(codebook).to(x.device).sort(stable=True)
    return order[torch.bucketize(x, (values[1:] + values[:-1]) / 2)].to(torch.uint8)


def split_scales(scale: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 scales as two bf16 of the upper and lower halves of their bits, for `packing.pack_rows`."""
    bits = scale.float().contiguous().view(torch.int32)
    return (bits >> 16).to(torch.int16).view(torch.bfloat16), bits.to(torch.int16).view(torch.bfloat16)


def joined_scales(upper: Tensor, lower: Tensor | None) -> Tensor:
    """The fp32 scales of rows with a codebook."""
    if lower is None:
        return upper.float()
    high, low = (part.contiguous().view(torch.int16).int() for part in (upper, lower))
    return (high << 16 | low & 0xFFFF).view(torch.float32)
