"""Steps of the large models of `benchmarks.gpu_offload`: Forebay's, and its peers'."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_cases import flexgen, offloaded
from benchmarks.gpu_cases.offloaded import Row, begin_peak, peak_within, saved_model, step_row, token_times
from benchmarks.models import RandomShape
from benchmarks.page_cache import StepClock
from benchmarks.peers import decode, installed
from benchmarks.probes import crossing_nbytes

BLOCK: dict[str, Any] = {"batch": 128, "prompt": 512, "new_tokens": 8}  # whose cache is beyond the device


def kind_of(job: Row) -> tuple[RandomShape, torch.dtype]:
    """The shape and dtype of a job's large model."""
    return (offloaded.OPT, torch.float16) if job.get("shape") == "opt" else (offloaded.LARGE, torch.bfloat16)


def prompts(shape: RandomShape, batch: int, length: int) -> torch.Tensor:
    """Random prompts [batch, length], the same each time."""
    return torch.randint(3, shape.vocab, (batch, length), generator=torch.Generator().manual_seed(3))


def measure_throughput(scratch: Path, machine: Any, job: Row) -> Row:
    """Decode tokens/s of the large model under the device budget, from host memory or from disk."""
    shape, dtype = kind_of(job)
    folder = saved_model(scratch, shape, dtype, job["weights"])
    return decode_row(folder, shape, machine, job["batch"], job["source"])


def decode_row(folder: Path, shape: RandomShape, machine: Any, batch: int, source: str, ranks: int = 1,
               look: Callable[[Any], Row] = lambda _: {}, **options: Any) -> Row:
    """Decode steps of a model whose weights stream from `source`, with the link's bandwidth. Each of `ranks` has its
    share of the budget. `look` describes the open model."""
    from forebay.api import wrap

    nbytes = offloaded.model_nbytes(folder) // ranks
    budget = {"device": int(offloaded.DEVICE_SHARE * nbytes)}
    if source == "host":
        budget["host"] = nbytes + (1 << 30)
    before = begin_peak()
    with wrap(folder, budget, batch=batch, prompt=64, new_tokens=12, machine=machine, **options) as lm:
        ids = prompts(shape, batch, 64)
        lm.generate(ids, max_new_tokens=3, eos_token_id=None)
        row, p = step_row(token_times(lm, ids, 12), batch) | look(lm), lm.plan.prediction
    link = machine.link("host", "device") if source == "host" else machine.link("disk", "host")
    row |= {"moved_nbytes": p.streamed_nbytes, "bytes_per_s": p.streamed_nbytes / row["step_s"],
            "link_bytes_per_s": link.bandwidth_bytes_per_s, "predicted_step_s": p.decode_time_s,
            "plan_nbytes": p.peak_nbytes} | peak_within(budget["device"], before)  # fmt: skip
    return row if p.streamed_nbytes else row | {"failed": "nothing streamed"}


def measure_peer(scratch: Path, machine: Any, job: Row) -> Row:
    """The same by transformers with Accelerate's hooks: as much on the GPU as the budget holds, the rest in host
    memory."""
    from transformers import LlamaForCausalLM

    folder, batch = saved_model(scratch, offloaded.LARGE, torch.bfloat16), job["batch"]
    _, held = begin_peak()
    limits = {0: int(offloaded.DEVICE_SHARE * offloaded.model_nbytes(folder)), "cpu": "100GB"}
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map="auto", max_memory=limits).eval()
    ids = prompts(offloaded.LARGE, batch, 64).to(offloaded.GPU)
    with torch.inference_mode():
        decode(model, ids, 12, clock := StepClock())
    row = step_row([*itertools.accumulate(clock.times_s[1:])], batch)
    return row | {"peak_nbytes": torch.cuda.max_memory_reserved() - held}


def measure_flexgen(scratch: Path, machine: Any, job: Row) -> Row:
    """FlexGen on the OPT shape, with 5 % of it less on the GPU than the budget holds, for its buffers; or a block of
    eight batches of it with its cache in host memory. The process ends with it: torch draws no numbers on the GPU
    behind it."""
    if not installed("flexgen"):
        return {"skipped": flexgen.MISSING}
    _, held = begin_peak()
    percent = int(100 * offloaded.DEVICE_SHARE) - 5
    batch, prompt, new = BLOCK.values() if "attention" in job else (job["batch"], 64, 12)
    block = {"micro_batches": 8, "cache_on_host": True, "cpu_attention": job["attention"] == "host"} \
        if "attention" in job else {}
    prefill_s, *steps = flexgen.step_times(offloaded.OPT, batch, prompt, new - 1, percent, **block)
    return step_row([*itertools.accumulate(steps, initial=0.0)], batch) | {
        "prefill_s": prefill_s, "peak_nbytes": torch.cuda.max_memory_reserved() - held, "lost": True}


def measure_blocks(scratch: Path, machine: Any, job: Row) -> Row:
    """Prefill and decode of a batch whose weights and cache are beyond the device budget, as the planner blocks it."""
    from forebay.api import wrap

    shape, dtype = kind_of(job)
    folder = saved_model(scratch, shape, dtype)
    budget = {"device": int(offloaded.DEVICE_SHARE * offloaded.model_nbytes(folder)), "host": 80 << 30}
    before, began = begin_peak(), time.perf_counter()
    with wrap(folder, budget, **BLOCK, machine=machine, slot_nbytes=job.get("slot_nbytes"),
              cpu_attention=job["attention"] == "host" or None) as lm:
        planned_s = time.perf_counter() - began
        p, s = lm.plan.prediction, lm.plan.schedule
        ids = prompts(shape, BLOCK["batch"], BLOCK["prompt"])
        lm.generate(ids, max_new_tokens=2, eos_token_id=None)
        began = time.perf_counter()
        times = token_times(lm, ids, BLOCK["new_tokens"])
        moved, items = crossing_nbytes(lm), Counter(type(item).__name__ for item in lm.session.bound(1).program.step)
    bound_s = max(nbytes / machine.link(*way.split("->")).bandwidth_bytes_per_s for way, nbytes in moved.items()
                  if way != "host->host")
    row = step_row(times, BLOCK["batch"]) | {
           "prefill_s": times[0] - began, "moved_nbytes": moved, "bound_s": bound_s, "planned_s": planned_s,
           "predicted_step_s": p.decode_time_s, "predicted_prefill_s": p.prefill_time_s, "busy_s": p.busy_time_s,
           "block": str(s.batching), "items": dict(items), "slots": s.slots, "slot_nbytes_planned": s.slot_nbytes,
           "prefill_chunk": s.prefill_chunk, "plan_nbytes": p.peak_nbytes}  # fmt: skip
    return row | peak_within(budget["device"], before)
