"""What launches take outside the arenas is what torch's allocator would give them, and what is kept adds up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import aten, tiny
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from forebay.kernels.products.linear import choices
from forebay.rewriter.ir.plan import Budget, PlanError, Workload
from forebay.rewriter.ir.program import COMPUTE, SCRATCH, Launch, TensorRef, workspace_nbytes
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.pipeline.step_pipeline import Pipeline
from forebay.rewriter.planning.launch_memory import product_launch
from forebay.rewriter.switches import Switches
from forebay.runtime.devices.cpu.kind import CPU
from forebay.runtime.devices.cuda.kind import CUDA
from forebay.runtime.devices.cuda.memory import DRAW_BLOCKS, draw_nbytes, least_workspace_nbytes, reserved_nbytes
from forebay.runtime.run.sampling import Sampling, choose, drawn

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


class HeldBlocks(TorchDispatchMode):
    """The most blocks of one row's size that operators hold at a time, by bytes for each of its words."""

    def __init__(self, words: int, *given: torch.Tensor) -> None:
        super().__init__()
        self.words, self.given = words, {t.untyped_storage()._cdata for t in given}
        self.live, self.most = dict[int, tuple[StorageWeakRef, int]](), Counter[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.live = {key: held for key, held in self.live.items() if not held[0].expired()}
        for t in tree_leaves(result):
            storage = t.untyped_storage() if isinstance(t, torch.Tensor) else None
            if storage is not None and storage._cdata not in self.given and storage.nbytes() >= self.words:
                assert storage.nbytes() % self.words == 0, f"{func} takes memory for more than a row"
                self.live[storage._cdata] = StorageWeakRef(storage), storage.nbytes() // self.words
        self.most |= Counter(each for _, each in self.live.values())
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("draw", [lambda logits, how: choose(logits, how, torch.Generator()),
                                  lambda logits, how: drawn(logits, how, torch.full((len(logits),), 0.5))])
def test_a_draw_takes_the_blocks_that_plans_for_a_gpu_count(
    draw: Callable[[torch.Tensor, Sampling], torch.Tensor], dtype: torch.dtype
) -> None:
    """Rows are drawn from one at a time. A number and two places are left to what a sort and a draw take inside."""
    logits = torch.randn(3, 50_003).to(dtype)
    with HeldBlocks(50_003, logits) as held:
        draw(logits, Sampling(True, 0.7, 50, 0.9, 0.1))
    assert set(held.most) <= {1, 2, 4, 8} and held.most[4] >= 3 and held.most[8] == 1
    assert held.most[1] <= DRAW_BLOCKS[1] and held.most[2] <= 1
    assert held.most[4] + held.most[2] <= DRAW_BLOCKS[4] - 1 and held.most[8] + 2 <= DRAW_BLOCKS[8]


def test_draws_share_segments_of_torchs_allocator() -> None:
    assert draw_nbytes(0) == 0 and draw_nbytes(1000) == 2 * MIB
    for words in (32_000, 128_256, 151_936, 262_144, 3_000_000):
        exact = sum(each * count * words for each, count in DRAW_BLOCKS.items())
        assert exact <= draw_nbytes(words) <= 1.5 * exact + 22 * MIB


def test_plans_for_a_gpu_count_a_draw(tmp_path: Path) -> None:
    """It runs after a step, so what launches take and give back does not add to it."""
    model = tiny(tmp_path, lambda g, n: (g.call_function(aten.bmm.default, (n["x"], n["x"])),),
                 {"x": torch.ones(2, 8, 8)}, {"w": torch.zeros(1)})
    for kind, words in (("cpu", 300_000), ("NVIDIA H200", 0), ("NVIDIA H200", 300_000)):
        machine = replace(Machine.default(), device_kind=kind)
        pipeline = Pipeline(replace(model.source(), words=words), Workload(1, 1, 1), machine, Switches())
        plan = pipeline.plan(Budget(100 * MIB))
        program = pipeline.program(plan, 1)
        taken = plan.prediction.peak_nbytes["device"] - plan.arenas["device"]
        assert taken == program.workspace_nbytes() == pipeline.needs.workspace(1)
        assert taken - sum(program.held_nbytes().values()) == (0 if kind == "cpu" else draw_nbytes(words))
    least = plan.arenas["device"] + taken
    with pytest.raises(PlanError, match="device"):
        pipeline.plan(Budget(least - draw_nbytes(300_000) // 2))
