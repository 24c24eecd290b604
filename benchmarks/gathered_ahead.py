"""Simulated prompts of ranks that gather weights ahead, or inputs in chunks: `python -m benchmarks.gathered_ahead`.

Plans all ranks of a Llama of 6 layers (hidden 4096, feed-forward 11008, bfloat16) without its weights, for GPUs of a
preset joined by links that work by themselves, and simulates the step over all prompts of all ranks together: weights
gathered right before they are read and ahead (`gather_buffers`), inputs in 1, 2 and 4 chunks (`gather_chunks`). Beside
it the seconds of products and of exchanges alone; no step is faster than the longer of both.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.command import arguments, print_table, write_json
from benchmarks.models import RandomShape, config_of
from forebay.read_mesh import read_mesh
from forebay.rewriter.capture.language_model import capture_model
from forebay.rewriter.ir.graph import CapturedModel
from forebay.rewriter.ir.plan import Budget, Workload
from forebay.rewriter.ir.program import FileSlice
from forebay.rewriter.machine.mesh_links import RING_STEPS, ExchangeLink, MeshLinks
from forebay.rewriter.machine.presets import PRESETS
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.pipeline.plan_ranks import plan_together, rank_planners
from forebay.rewriter.planning.options import Options
from forebay.rewriter.predict.ranks import RankLine, simulate_ranks

LLAMA = RandomShape(4096, 6, 32, 8, 11008)
WAYS = [f"{mesh},gather_buffers={n}" for mesh in ("tensor=2,layout=xyz", "tensor=2x2,layout=x", "tensor=2x2,layout=xyz")
        for n in (0, 2, 4)] + [f"tensor=2x2,layout=2d,gather_chunks={n}" for n in (1, 2, 4)]


def simulated(captured: CapturedModel, mesh: str, work: Workload, machine: Machine) -> RankLine:
    """The step over all prompts, of rank 0 beside the others."""
    files = {name: FileSlice(name, 0, spec.nbytes) for name, spec in captured.weights.items()}
    budget = Budget(int(machine.tiers["device"].capacity_nbytes), 0)
    planners = rank_planners(captured, "", files, read_mesh(mesh), budget, work,
                             Options(prefill_chunk=work.prompt), machine)
    planned = plan_together([planner for _, planner in planners])
    return simulate_ranks([pipeline.program(plan, work.prompt) for pipeline, plan in planned], machine)[0]


def main() -> None:
    asked = arguments(__doc__, machine=("h100", "preset"), batch=(16, "prompts"), prompt=(512, "tokens of each"),
                      gb_per_s=(200.0, "of a link"), latency_us=(10.0, "of a collective"))
    links = tuple(ExchangeLink(kind, 2, 1e9 * asked.gb_per_s, 1e-6 * asked.latency_us) for kind in RING_STEPS)
    machine = replace(PRESETS[asked.machine], mesh=MeshLinks(2, "nccl", "", links, overlap_penalty=0.0))
    captured, work, rows = capture_model(config_of(LLAMA)), Workload(asked.batch, asked.prompt, 2), []
    for mesh in WAYS:
        line = simulated(captured, mesh, work, machine)
        rows.append({"mesh": mesh, "step_ms": 1e3 * line.time_s, "products_ms": 1e3 * line.compute_s,
                     "exchanges_ms": 1e3 * line.exchange_s})
    print_table(rows)
    write_json(asked, rows)


if __name__ == "__main__":
    main()
