"""Decoding a model that fits the GPU: transformers, eager and by Inductor, and Forebay with and without graphs."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_cases import offloaded
from benchmarks.gpu_cases.large_steps import prompts
from benchmarks.gpu_cases.offloaded import Row, begin_peak, model_nbytes, saved_model, step_row, token_times
from benchmarks.models import RandomShape

SHAPES = {  # of SmolLM2-135M and Llama-3-8B, with random weights in bf16
    "135M": RandomShape(576, 30, 9, 3, 1536, 49152), "8B": RandomShape(4096, 32, 32, 8, 14336, 128256),
    "8B, 8 layers": RandomShape(4096, 8, 32, 8, 14336, 128256)}
PROMPT, STEPS, WARM = 64, 32, 4  # tokens of a prompt, steps that are timed, steps before that
OURS = "forebay, launches", "forebay, graphs", "forebay, overlapped graphs", "forebay, unjoined graphs"


def jobs() -> list[Row]:
    """Each contestant takes its turn at a shape and batch."""
    return [{"part": "resident", "shape": shape, "batch": batch, "contestant": name}
            for shape in SHAPES for batch in (1, 16) for name in ("eager", "inductor", *OURS)]


def by_transformers(folder: Path, job: Row) -> list[float]:
    """Times at which tokens came, through transformers' static cache; compiled by Inductor with CUDA graphs of its own
    where that is asked for (the first decode steps compile)."""
    from transformers import LlamaForCausalLM, StaticCache

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(offloaded.GPU).eval()
    cache = StaticCache(model.config, max_cache_len=PROMPT + WARM + STEPS + 1)
    step: Any = model
    if job["contestant"] == "inductor":
        how: Any = {"mode": "reduce-overhead"} if torch.cuda.is_available() else {"backend": "eager"}
        step = torch.compile(model, dynamic=False, **how)
    times = []
    with torch.inference_mode():
        ids = prompts(SHAPES[job["shape"]], job["batch"], PROMPT).to(offloaded.GPU)
        token = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1:].argmax(-1)
        for _ in range(WARM + STEPS + 1):
            token.cpu()  # known on the host
            times.append(time.perf_counter())
            token = step(input_ids=token.clone(), past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
    return times


def by_forebay(folder: Path, machine: Any, job: Row) -> list[float]:
    """Times at which tokens came, with all weights on the GPU; AssertionError where the plan streams any."""
    from forebay.api import wrap

    os.environ["FOREBAY_PDL"] = "1" if "overlapped" in job["contestant"] else "0"
    os.environ["FOREBAY_SKIP"] = "join_launches" if "unjoined" in job["contestant"] else ""
    os.environ["FOREBAY_GRAPHS"] = "1" if job["contestant"].endswith("graphs") else "0"
    nbytes = model_nbytes(folder)
    budget = {"device": 2 * nbytes + (1 << 30), "host": nbytes + (1 << 30)}
    steps = WARM + STEPS + 1
    with wrap(folder, budget, batch=job["batch"], prompt=PROMPT, new_tokens=steps, machine=machine) as lm:
        assert lm.plan.prediction.streamed_nbytes == 0, "the plan streams weights of a model that fits"
        return token_times(lm, prompts(SHAPES[job["shape"]], job["batch"], PROMPT), steps)


def measure_resident(scratch: Path, machine: Any, job: Row) -> Row:
    """Decode steps of one contestant: their median and spread, and the weights' bytes that a step reads per second
    beside the rate at which a sum reads the GPU's memory."""
    sizes = SHAPES[job["shape"]]
    folder = saved_model(scratch, sizes, torch.bfloat16)
    _, held = begin_peak()
    ours = job["contestant"].startswith("forebay")
    times = by_forebay(folder, machine, job) if ours else by_transformers(folder, job)
    row = step_row(times[WARM:], job["batch"])
    read_nbytes = model_nbytes(folder) - 2 * sizes.vocab * sizes.hidden  # one row of the embedding
    return row | {"weight_bytes_per_s": read_nbytes / row["step_s"],
                  "peak_nbytes": torch.cuda.max_memory_reserved() - held,
                  "memory_bytes_per_s": machine.tiers["device"].bandwidth_bytes_per_s}  # fmt: skip
