"""Offloading on a GPU: correctness first, then throughput beside the link's ceiling and a peer. From a bare checkout:

    PYTHONPATH=src python -m benchmarks.gpu_offload

Writes JSON to $OUT (or benchmarks/results/) after every job, and prints a line for each. Needs torch with CUDA and
transformers; Accelerate and FlexGen, where they are installed, are the peers. Jobs run in a process apart, so that one
that faults or hangs is one failed row. A job of Forebay's that takes more of the device than its budget has failed:
what torch's allocator reserved is counted, what CUDA itself takes (`context_nbytes` in a row) is not.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_cases import flexgen
from benchmarks.gpu_cases.isolated import IsolatedWorker, check_gpu, serve

STARTED = time.monotonic()
LIMIT_S = 520.0  # of the whole run: a job that is begun late gets what is left of it
JOB_S = 100.0  # a job that says nothing for so long is killed
LEAST_S = 20.0  # with less than this left none is begun
SMALL = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
         "intermediate_size": 704, "vocab_size": 2048}  # fmt: skip
FORMATS = SMALL | {"num_hidden_layers": 16}  # whose weights in 4 bits are larger than what products take beside them
WINDOWED = SMALL | {"sliding_window": 16}  # a Mistral
WAYS: tuple[dict[str, Any], ...] = (  # in which caches and steps differ
    {"cache_tier": "host"}, {"cache_tier": "disk"}, {"cache_tier": "host", "cpu_attention": True},
    {"cache_tier": "disk", "micro_batches": 3, "order": "row"}, {"cache_tier": "host", "checkpoints": (1, 2)},
    {"places": 2}, {"places": 2, "cache_tier": "disk"}, {"prompt_lookup_num_tokens": 4}, {"draft": "w8"})
LARGE = {"hidden_size": 4096, "num_hidden_layers": 8, "num_attention_heads": 32, "num_key_value_heads": 8,
         "intermediate_size": 14336, "vocab_size": 32000}  # fmt: skip
OPT = {"hidden_size": 4096, "num_hidden_layers": 10, "num_attention_heads": 32, "ffn_dim": 16384,
       "vocab_size": 50272, "word_embed_proj_dim": 4096}  # fmt: skip
GPU = "cuda"
# What generating takes on the caller's stream beside what is planned: logits and chosen tokens, one small segment.
CALLER_NBYTES = 2 << 20
DEVICE_SHARE = 0.375  # of the large model's bytes (4 GB in bf16), for Forebay and the peer
LOGITS_LIMIT = 3e-2  # relative, between the GPU's and the CPU's kernels over equal bits, in bf16
FORMATS_WORK: dict[str, Any] = {"batch": 3, "prompt": 40, "new_tokens": 8}
Row = dict[str, Any]


def jobs() -> list[Row]:
    """Everything that is checked and measured, in order: what comes last may be left out."""
    tokens = [{"part": "tokens", "share": share, "host": host, "slots": slots}
              for share, host in ((2.0, 0.0), (0.5, 0.0), (0.5, 1.0), (0.3, 0.5)) for slots in (1, 2, 3)]
    formats = [{"part": "formats", "weights": weights, "cache": cache}
               for weights, cache in (("native", "native"), ("w4g64", "native"), ("w8", "native"), ("native", "kv8"),
                                      ("native", "kv4"), ("w4g32", "kv4"))]  # fmt: skip
    ways = [{"part": "ways", "way": way, "windowed": windowed}
            for way in range(len(WAYS)) for windowed in (False, True)]
    speed = [{"part": "throughput", "source": source, "batch": batch, "weights": weights}
             for source, weights in (("host", "native"), ("host", "w4g64"), ("disk", "native")) for batch in (1, 8, 32)]
    peers = [{"part": "peer", "batch": batch} for batch in (1, 8, 32)]
    opt = [job for batch in (1, 32) for job in (
        {"part": "throughput", "source": "host", "batch": batch, "weights": "native", "shape": "opt"},
        {"part": "flexgen", "batch": batch})]  # fmt: skip
    return tokens + ways + formats + speed[:3] + peers + opt + speed[3:]


def say(text: str) -> None:
    print(f"[{time.monotonic() - STARTED:6.1f} s] {text}", flush=True)


def saved_model(scratch: Path, shape: dict[str, int], dtype: torch.dtype, weights: str = "native") -> Path:
    """A random-weight Llama (or OPT, or Mistral) of this shape as a safetensors checkpoint, made once; quantised, where
    weights say so."""
    kind_of = "opt" if "ffn_dim" in shape else "mistral" if "sliding_window" in shape else "llama"
    name = f"{kind_of}-{shape['hidden_size']}-{shape['num_hidden_layers']}-{str(dtype)[6:]}"
    folder = scratch / name
    if not (folder / "config.json").exists():
        import transformers as of

        torch.manual_seed(0)
        kind: Any = {"opt": (of.OPTConfig, of.OPTForCausalLM), "llama": (of.LlamaConfig, of.LlamaForCausalLM),
                     "mistral": (of.MistralConfig, of.MistralForCausalLM)}[kind_of]
        config = kind[0](**shape, tie_word_embeddings=False, max_position_embeddings=2048)
        config.dtype = dtype
        before = torch.get_default_dtype()
        with torch.device(GPU):
            torch.set_default_dtype(dtype)
            model = kind[1](config)
            torch.set_default_dtype(before)
        model.save_pretrained(folder)
        del model
        torch.cuda.empty_cache()
    if weights == "native":
        return folder
    from forebay.rewriter.checkpoints.quantize import Wish, quantize_model

    packed = scratch / f"{name}-{weights}"
    quantize_model(folder, packed, Wish(weights))  # goes on, or finds that it is done
    return packed


def weights_nbytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


@functools.cache
def reference_tokens(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts [3, 12] and transformers' greedy answers to them on the GPU, [3, 36]."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(GPU).eval()
    ids = torch.randint(3, SMALL["vocab_size"], (3, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return ids, model.generate(ids.to(GPU), max_new_tokens=24, do_sample=False, pad_token_id=0,
                                   eos_token_id=None).cpu()  # fmt: skip


def check_tokens(scratch: Path, machine: Any, job: Row) -> Row:
    """Greedy tokens under a budget that streams from disk or host memory, against transformers on the GPU."""
    from forebay.api import wrap

    folder = saved_model(scratch, SMALL, torch.float32)
    ids, expected = reference_tokens(folder)
    nbytes = weights_nbytes(folder)
    from forebay.rewriter.planning.launch_memory import least_gpu_nbytes

    budget = {"device": int(nbytes * job["share"]) + (least_gpu_nbytes() if GPU == "cuda" else 0)}
    if job["host"]:
        budget["host"] = int(nbytes * job["host"]) + (8 << 20)
    before = begin_peak()
    with wrap(folder, budget, batch=3, prompt=12, new_tokens=24, machine=machine, slots=job["slots"]) as lm:
        ours = lm.generate(ids, max_new_tokens=24, eos_token_id=None)
        row: Row = {"streamed_nbytes": lm.plan.prediction.streamed_nbytes, "same": bool(torch.equal(ours, expected))}
    row |= peak_within(budget["device"], before)
    if job["share"] < 1 and not row["streamed_nbytes"]:
        return row | {"failed": "nothing streamed"}
    return row if row["same"] else row | {"failed": "other tokens than transformers'"}


def check_ways(scratch: Path, machine: Any, job: Row) -> Row:
    """Greedy tokens by every way of keeping caches and of making steps, what is let go poisoned, against transformers
    on the GPU; twice, as the second answer finds what the first left."""
    from forebay.api import wrap

    folder = saved_model(scratch, WINDOWED if job["windowed"] else SMALL, torch.float32)
    ids, expected = reference_tokens(folder)
    nbytes = weights_nbytes(folder)
    budget = {"device": 4 * nbytes + (64 << 20), "host": 4 * nbytes + (64 << 20)}
    before, os.environ["FOREBAY_POISON"] = begin_peak(), "1"
    try:
        with wrap(folder, budget, batch=3, prompt=12, new_tokens=24, machine=machine, **WAYS[job["way"]]) as lm:
            same = all(torch.equal(lm.generate(ids, max_new_tokens=24, eos_token_id=None), expected) for _ in range(2))
            row: Row = {"streamed_nbytes": lm.plan.prediction.streamed_nbytes, "same": same, "asked": WAYS[job["way"]]}
    finally:
        del os.environ["FOREBAY_POISON"]
    row |= peak_within(budget["device"], before)
    return row if same else row | {"failed": f"other tokens than transformers' with {WAYS[job['way']]}"}


def check_formats(scratch: Path, machine: Any, job: Row) -> Row:
    """Logits of the GPU's kernels over quantised weights and cache, half of the weights streamed, beside the CPU's
    kernels over the same bits. A plan that streams nothing has failed: it would check nothing."""
    from forebay.api import wrap
    from forebay.rewriter.machine.profile import Machine

    folder = saved_model(scratch, FORMATS, torch.bfloat16, job["weights"])
    nbytes = weights_nbytes(folder)
    ids = torch.randint(3, SMALL["vocab_size"], (3, 40), generator=torch.Generator().manual_seed(2))
    logits, streamed = [], []
    half = {"device": half_resident(folder, machine, job["cache"]), "host": nbytes + (8 << 20)}
    peak: Row = {}
    for place, budget in ((machine, half), (Machine.default(), {"device": 4 * nbytes + (16 << 20)})):
        before = begin_peak()
        with wrap(folder, budget, machine=place, cache=job["cache"], **FORMATS_WORK) as lm:
            lm.generate(ids[:, :32], max_new_tokens=8, eos_token_id=None)  # decode steps too
            logits.append(lm.next_logits(ids).double())
            streamed.append(lm.plan.prediction.streamed_nbytes)
        peak = peak or peak_within(half["device"], before)
    error = float((logits[0] - logits[1]).norm() / logits[1].norm())
    row: Row = {"error": error, "limit": LOGITS_LIMIT, "streamed_nbytes": streamed[0], "weights_nbytes": nbytes}
    row |= peak
    if not streamed[0]:
        return row | {"failed": "nothing streamed"}
    return row if error <= LOGITS_LIMIT else row | {"failed": f"logits differ by {error:.1e}"}


def half_resident(folder: Path, machine: Any, cache: str) -> int:
    """A device budget under which about half of what a step reads of the weights streams; found by planning alone."""
    from forebay.api import wrap

    device = 1 << 40
    for _ in range(8):  # with less, the planner shrinks activations first
        with wrap(folder, {"device": device, "host": 1 << 40}, machine=machine, cache=cache, **FORMATS_WORK) as lm:
            missing = sum(w.nbytes for w in lm.plan.weights if not w.gather) // 2 - lm.plan.prediction.streamed_nbytes
            if missing <= 0:
                break
            device = lm.plan.prediction.peak_nbytes["device"] - missing
    return device


def measure_throughput(scratch: Path, machine: Any, job: Row) -> Row:
    """Decode tokens/s of the large model under the device budget, from host memory or from disk."""
    from forebay.api import wrap

    shape, dtype = (OPT, torch.float16) if job.get("shape") == "opt" else (LARGE, torch.bfloat16)
    folder, batch = saved_model(scratch, shape, dtype, job["weights"]), job["batch"]
    budget = {"device": int(DEVICE_SHARE * weights_nbytes(folder))}
    if job["source"] == "host":
        budget["host"] = weights_nbytes(folder) + (1 << 30)
    before = begin_peak()
    with wrap(folder, budget, batch=batch, prompt=64, new_tokens=12, machine=machine) as lm:
        ids = torch.randint(3, shape["vocab_size"], (batch, 64), generator=torch.Generator().manual_seed(3))
        lm.generate(ids, max_new_tokens=3, eos_token_id=None)
        times: list[float] = []
        lm.generate(ids, max_new_tokens=12, eos_token_id=None, on_token=lambda _: times.append(time.perf_counter()))
        moved = lm.plan.prediction.streamed_nbytes
        planned, predicted = lm.plan.prediction.peak_nbytes, lm.plan.prediction.decode_time_s
    peak = peak_within(budget["device"], before)
    step_s, spread_s = _steps(times)
    link = machine.link("host", "device") if job["source"] == "host" else machine.link("disk", "host")
    row = {"step_s": step_s, "spread_s": spread_s, "tokens_per_s": batch / step_s, "moved_nbytes": moved,
           "bytes_per_s": moved / step_s, "link_bytes_per_s": link.bandwidth_bytes_per_s,
           "predicted_step_s": predicted, "plan_nbytes": planned} | peak  # fmt: skip
    return row if moved else row | {"failed": "nothing streamed"}


def measure_peer(scratch: Path, machine: Any, job: Row) -> Row:
    """The same by transformers with Accelerate's hooks: as much on the GPU as the budget holds, the rest in host
    memory."""
    from transformers import LlamaForCausalLM

    folder, batch = saved_model(scratch, LARGE, torch.bfloat16), job["batch"]
    _, held = begin_peak()
    limits = {0: int(DEVICE_SHARE * weights_nbytes(folder)), "cpu": "100GB"}
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map="auto", max_memory=limits).eval()
    ids = torch.randint(3, LARGE["vocab_size"], (batch, 64), generator=torch.Generator().manual_seed(3)).to(GPU)
    times, cache = [], None
    with torch.inference_mode():
        for _ in range(12):
            result = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            ids, cache = result.logits[:, -1:].argmax(-1).to(GPU), result.past_key_values
            torch.cuda.synchronize()
            times.append(time.perf_counter())
    step_s, spread_s = _steps(times[1:])
    return {"step_s": step_s, "spread_s": spread_s, "tokens_per_s": batch / step_s,
            "peak_nbytes": torch.cuda.max_memory_reserved() - held}  # fmt: skip


def measure_flexgen(scratch: Path, machine: Any, job: Row) -> Row:
    """FlexGen on the OPT shape, with 5 % of it less on the GPU than the budget holds, for its buffers."""
    if not flexgen.installed():
        return {"skipped": flexgen.MISSING}
    _, held = begin_peak()
    steps = flexgen.step_times(OPT, job["batch"], 64, 11, int(100 * DEVICE_SHARE) - 5)[1:]
    step_s = statistics.median(steps)
    return {"step_s": step_s, "spread_s": [min(steps), max(steps)], "tokens_per_s": job["batch"] / step_s,
            "peak_nbytes": torch.cuda.max_memory_reserved() - held}  # fmt: skip


def begin_peak() -> tuple[int, int]:
    """Begin to count what the allocator reserves; returns what else is taken of the GPU (contexts of processes), and
    what this process holds already: torch keeps a workspace of cuBLAS for each stream that ever multiplied."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    free, total = torch.cuda.mem_get_info()
    held = torch.cuda.memory_reserved()
    return total - free - held, held


def peak_within(budget: int, before: tuple[int, int]) -> Row:
    """What was reserved at most since `begin_peak`; a failure where the budget, and what generating takes, is less."""
    context_nbytes, held = before
    peak = torch.cuda.max_memory_reserved() - held
    row: Row = {"peak_nbytes": peak, "budget_nbytes": budget, "context_nbytes": context_nbytes}
    over = peak > budget + CALLER_NBYTES
    return row | ({"failed": f"took {peak} bytes of the device, the budget is {budget}"} if over else {})


def _steps(times: list[float]) -> tuple[float, list[float]]:
    steps = [b - a for a, b in itertools.pairwise(times)]
    return statistics.median(steps), [min(steps), max(steps)]


PARTS: dict[str, Callable[[Path, Any, Row], Row]] = {
    "tokens": check_tokens, "ways": check_ways, "formats": check_formats, "throughput": measure_throughput,
    "peer": measure_peer, "flexgen": measure_flexgen,
}


def answer(scratch: Path) -> None:
    """Do the jobs whose numbers come on standard input."""
    from forebay.rewriter.machine.profile import load_machine

    machine, known = load_machine(scratch / "machine.json"), jobs()
    serve(lambda number: PARTS[known[number]["part"]](scratch, machine, known[number]), check_gpu)


def line(job: Row, row: Row) -> str:
    """A job and what came of it."""
    head = ", ".join(str(value) if key in ("part", "source", "weights", "shape") else f"{key} {value}"
                     for key, value in job.items())  # fmt: skip
    if "failed" in row or "skipped" in row:
        return f"{head}: {row.get('skipped') or 'FAILED: ' + row['failed']}"
    if "same" in row:
        return f"{head}: transformers' tokens; {row['streamed_nbytes'] >> 10} KiB streamed a step"
    if "error" in row:
        return f"{head}: logits differ by {row['error']:.1e}; {row['streamed_nbytes'] >> 10} KiB streamed a step"
    link = "" if "bytes_per_s" not in row else (
        f", {row['bytes_per_s'] / 1e9:.1f} GB/s of the link's {row['link_bytes_per_s'] / 1e9:.1f}, predicted "
        f"{1e3 * row['predicted_step_s']:.1f} ms")
    return (f"{head}: {row['tokens_per_s']:.1f} tokens/s, step {1e3 * row['step_s']:.1f} ms{link}, peak "
            f"{row['peak_nbytes'] >> 20} MiB")  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help="only these, by comma; default: %(default)s")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for the whole run")
    parser.add_argument("--answer", metavar="FOLDER", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    parts = options.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts: {', '.join(sorted(unknown))} is none of {', '.join(PARTS)}")
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.gpu_offload: torch finds no GPU here")
    if options.answer:
        answer(options.answer)
        return 0
    from forebay.rewriter.machine.profile import save_machine
    from forebay.runtime.measure.machine import measure_machine

    result: Row = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
                   "date": datetime.date.today().isoformat(), "rows": []}  # fmt: skip
    folder = Path(os.environ.get("OUT") or "benchmarks/results")
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{result['gpu'].replace(' ', '-')}-offload-{result['date']}.json"
    with tempfile.TemporaryDirectory() as scratch:
        machine = measure_machine(scratch, quick=True)
        save_machine(machine, Path(scratch) / "machine.json")
        result["links"] = [f"{x.src}->{x.dst} {x.method} {x.bandwidth_bytes_per_s / 1e9:.2f} GB/s"
                           for x in machine.links]  # fmt: skip
        say("; ".join(result["links"]))
        worker = IsolatedWorker([sys.executable, "-m", "benchmarks.gpu_offload", "--answer", scratch])
        try:
            for number, job in enumerate(jobs()):
                if job["part"] not in parts:
                    continue
                left = STARTED + options.limit - time.monotonic()
                row = worker.ask(number, JOB_S, left) if left > LEAST_S else {"skipped": "left out, no time left"}
                result["rows"].append(job | row)
                say(line(job, row))
                target.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        finally:
            worker.close()
    say(f"written to {target}")
    return int(any("failed" in row for row in result["rows"]))


if __name__ == "__main__":
    sys.exit(main())
