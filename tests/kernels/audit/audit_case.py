"""One kernel configuration, as `tests.kernels.audit` compiles it ahead of time and counts the bytes it moves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple


class HeadShape(NamedTuple):
    """Query heads, heads of keys and values, and their dimension."""

    heads: int
    kv_heads: int
    dim: int


LLAMA_3_8B = HeadShape(32, 8, 128)
OPT_30B = HeadShape(56, 56, 128)
GEMMA_2_9B = HeadShape(16, 8, 256)
SMOLLM2_135M = HeadShape(9, 3, 64)
PHI_2 = HeadShape(32, 32, 80)
PHI_3_MINI = HeadShape(32, 32, 96)
GPT_OSS = HeadShape(64, 8, 64)
DEEPSEEK_V3, DEEPSEEK_V2_LITE = HeadShape(128, 1, 576), HeadShape(16, 1, 576)  # over latent rows
NEMOTRON_4_340B = HeadShape(96, 8, 192)
GEMMA_4 = HeadShape(16, 2, 512)  # its layers without a window


@dataclass(frozen=True)
class AuditCase:
    """What `triton.compile` needs to build one configuration without a GPU, and what is expected of the result.

    Every operator with a `gpu.py` has a file in `cases/`, with a function `audit_cases() -> list[AuditCase]`.
    """

    name: str  # "<op>/<implementation>/<configuration>", unique
    fn: Any  # the raw @triton.jit function
    signature: Mapping[str, str]  # run-time arguments in the order of fn: "*fp16", "*u8", "i32", "fp32", …
    constants: Mapping[str, Any]  # tl.constexpr arguments, by name
    num_warps: int = 4
    num_stages: int = 2
    max_registers: int = 0  # of a thread, which the compiler is held to on NVIDIA; 0: no limit
    amd_stages: int = 0  # on AMD, whose blocks have 64 KiB of shared memory; 0: as elsewhere
    divisible: tuple[str, ...] = ()  # run-time arguments that are multiples of 16 (pointers and strides)
    uses_dot: bool = False  # tl.dot is taken, so tensor-core instructions must appear
    main_operands: int = 1  # tensors of size in the bytes moved; each must be loaded 128 bits at a time
    load_nbytes: int = 16  # bytes of a main operand's loads, where its rows' alignment forbids 16 (4: not counted)
    bytes_moved: int = 0  # read and written by one call at the shape the case stands for, all programs together
    minimum_bytes: int = 0  # each input read once and each output written once, at that shape
    most_moved: float = 1.05  # times the minimum
    aim: float = 0.0  # share of a copy's bandwidth that `benchmarks.gpu` asks for; its hot loop must allow it
    # Bytes that one program's turn of the hot loop (one program, where it has no loop) moves from and to device memory:
    # not what programs share through L2. 0: not known.
    turn_nbytes: int = 0
    archs: tuple[str, ...] = ("sm_80", "sm_90", "gfx942")  # targets this configuration is meant for
    in_suite: bool = True  # built by the test suite too, not only on the command line
