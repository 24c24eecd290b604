"""What launches take outside the arenas is what torch's allocator would give them, and what is kept adds up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from tiny import aten, tiny

from forebay.kernels.products.linear import choices
from forebay.rewriter.ir.plan import Budget, Workload
from forebay.rewriter.ir.program import COMPUTE, SCRATCH, Launch, TensorRef, workspace_nbytes
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.pipeline.step_pipeline import Pipeline
from forebay.rewriter.planning.launch_memory import product_launch
from forebay.rewriter.switches import Switches
from forebay.runtime.devices.cpu.kind import CPU
from forebay.runtime.devices.cuda.kind import CUDA
from forebay.runtime.devices.cuda.memory import least_workspace_nbytes, reserved_nbytes

MIB = 1 << 20


def ref(*shape: int, dtype: str = "float16") -> TensorRef:
    return TensorRef("device", 0, dtype, shape, (shape[-1], 1), "")


def product(impl: str, m: int = 4, n: int = 4096, k: int = 4096, dtype: str = "float16") -> Launch:
    args = ref(m, k, dtype=dtype), ref(n, k, dtype=dtype), None
    return Launch(COMPUTE, "forebay.linear", args, {"form": "nk", "accumulate": False}, (ref(m, n, dtype=dtype),),
                  (), (), "y", flops=2 * m * n * k, impl=impl)


def torchs(nbytes: int, flops: int = 0) -> Launch:
    return Launch(COMPUTE, "call:aten.bmm.default", (), {}, (), (), (), "z", flops=flops, workspace_nbytes=nbytes)


def test_segments_are_those_of_torchs_allocator() -> None:
    sizes = 0, 1, MIB, MIB + 1, 10 * MIB - 1, 10 * MIB, 10 * MIB + 1, 33 * MIB
    assert [reserved_nbytes(n) // MIB for n in sizes] == [0, 2, 2, 20, 20, 10, 12, 34]


def test_kernels_share_a_scratch_and_torchs_products_cublas_workspace() -> None:
    split, few = (CUDA.with_memory(product("flat_64x128_s4", m)) for m in (16, 4))
    own = choices.workspace_nbytes("flat_64x128_s4", choices.Product("float16", 16, 4096, 4096))
    assert own > MIB and dict(split.held)[SCRATCH] == own and split.workspace_nbytes == 0
    assert own + dict(split.held)["rounding of the scratch"] == 20 * MIB
    by_torch = CUDA.with_memory(product("aten", 512))
    apart = 2 * 2 * 512 * 4096  # the result, and again with what follows it
    assert by_torch.workspace_nbytes == dict(by_torch.held)["graphs"] == reserved_nbytes(apart)
    assert dict(by_torch.held)["cuBLAS"] == reserved_nbytes(choices.cublas_nbytes())
    assert SCRATCH not in dict(by_torch.held)
    other = CUDA.with_memory(torchs(3 * MIB, flops=1))  # no product of ours
    assert dict(other.held)["cuBLAS"] == dict(by_torch.held)["cuBLAS"]
    assert dict(split.held)["cuBLAS"] == dict(by_torch.held)["cuBLAS"], "held where no product is torch's too"
    together = workspace_nbytes((split, few, by_torch, other))
    assert together == 2 * MIB + 20 * MIB + reserved_nbytes(choices.cublas_nbytes()) + 2 * reserved_nbytes(20 * MIB)


def test_on_a_cpu_nothing_is_kept() -> None:
    assert CPU.with_memory(torchs(3 * MIB, flops=1)) == torchs(3 * MIB, flops=1)
    launch = CPU.with_memory(product("upcast", 300, dtype="bfloat16"))
    assert launch.held == () and launch.workspace_nbytes > 0
    assert workspace_nbytes((launch, torchs(7))) == max(launch.workspace_nbytes, 7)


def test_plans_for_a_gpu_count_torchs_products_that_are_none_of_ours(tmp_path: Path) -> None:
    """x xT of a graph in fp32 runs as aten.bmm, and takes cuBLAS's workspace beside its operands."""
    model = tiny(tmp_path, lambda g, n: (g.call_function(aten.bmm.default, (n["x"], n["x"])),),
                 {"x": torch.ones(2, 8, 8)}, {"w": torch.zeros(1)})
    found = {}
    for kind in ("cpu", "NVIDIA H200"):
        machine = replace(Machine.default(), device_kind=kind)
        pipeline = Pipeline(model.source(), Workload(1, 1, 1), machine, Switches())
        plan = pipeline.plan(Budget(100 * MIB))
        program = pipeline.program(plan, 1)
        found[kind] = plan.prediction.peak_nbytes["device"] - plan.arenas["device"]
        assert found[kind] == program.workspace_nbytes()
    assert found["cpu"] == 0
    assert found["NVIDIA H200"] == reserved_nbytes(choices.cublas_nbytes()) + 2 * MIB <= least_workspace_nbytes()


def test_a_product_alone_counts_what_its_launch_would() -> None:
    plain = product_launch(choices.Product("float16", 512, 4096, 4096), "aten", CUDA)
    assert (plain.workspace_nbytes, plain.held) == (CUDA.with_memory(product("aten", 512)).workspace_nbytes,
                                                   CUDA.with_memory(product("aten", 512)).held)
    packed = dict(product_launch(choices.Product("w4g64", 512, 4096, 4096), "aten", CUDA).held)
    assert packed[SCRATCH] == 2 * 4096 * 4096 and packed["cuBLAS"] == dict(plain.held)["cuBLAS"]
    assert product_launch(choices.Product("w4g64", 512, 4096, 4096), "int16", CPU).workspace_nbytes == 0
