"""Models on a GPU, offloaded or resident: correctness first, then throughput beside ceilings and peers. From a bare
checkout:

    PYTHONPATH=src python -m benchmarks.gpu_offload

Writes JSON to $OUT (or benchmarks/results/) after every job, and prints a line for each. Needs torch with CUDA and
transformers; Accelerate and FlexGen, where they are installed, are the peers. Jobs run in a process apart, so that one
that faults or hangs is one failed row. A job of Forebay's that takes more of the device than its budget has failed:
what torch's allocator reserved is counted, what CUDA itself takes (`context_nbytes` in a row) is not.
"""

from __future__ import annotations

import datetime
import functools
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.command import arguments, write_json
from benchmarks.gpu import STARTED, say
from benchmarks.gpu_cases import offloaded, ranked, resident, whole_steps
from benchmarks.gpu_cases.large_steps import measure_blocks, measure_flexgen, measure_peer, measure_throughput
from benchmarks.gpu_cases.offloaded import Row, begin_peak, peak_within, saved_model, step_row, token_times
from benchmarks.isolated import IsolatedRanks, IsolatedWorker, check_gpu, serve
from benchmarks.models import RandomShape

LIMIT_S = 520.0  # of the whole run: a job that begins late gets the rest
JOB_S = {"resident": 200.0}  # a job that says nothing for so long is killed; the first of 8B saves 16 GB
OTHERS_S = 100.0
LEAST_S = 20.0  # with less than this left none is begun
SMALL = RandomShape(256, 4, 8, 2, 704, 2048)
FORMATS = replace(SMALL, layers=16)  # whose weights in 4 bits are larger than what products take beside them
WINDOWED = replace(SMALL, family="mistral", window=16)
MIXTURE = replace(SMALL, family="qwen3_moe", experts=16, picks=2)
WAYS: tuple[dict[str, Any], ...] = (  # in which caches and steps differ
    {"cache_tier": "host"}, {"cache_tier": "disk"}, {"cache_tier": "host", "cpu_attention": True},
    {"cache_tier": "disk", "micro_batches": 3, "order": "row"}, {"cache_tier": "host", "checkpoints": (1, 2)},
    {"batch_slots": 2}, {"batch_slots": 2, "cache_tier": "disk"}, {"prompt_lookup_num_tokens": 4}, {"draft": "w8"})
# Relative, between the GPU's and the CPU's kernels over equal bits, in bf16; and in float32, where a cache has 4 bits:
# what rounds otherwise in bf16 becomes other codes (two implementations on one CPU: 3.5e-2, in float32 4e-7).
LOGITS_LIMIT, EXACT_LIMIT = 3e-2, 5e-3
FORMATS_WORK: dict[str, Any] = {"batch": 3, "prompt": 40, "new_tokens": 8}


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
    blocks: list[Row] = [job for attention in ("planned", "host") for job in (
        {"part": "blocks", "shape": "opt", "attention": attention},
        {"part": "flexgen", "attention": "GPU" if attention == "planned" else "host"},
        {"part": "blocks", "shape": "llama", "attention": attention})]  # fmt: skip
    blocks += [{"part": "blocks", "shape": shape, "attention": "planned", "slot_nbytes": 8 << 20}
               for shape in ("llama", "opt")]
    shared = [{"part": "shared", "weights": weights} for weights in ("w8", "w4")]
    routed = [{"part": "routed", "source": source, "slots": slots} for source in ("host", "disk") for slots in (3, 8)]
    last = whole_steps.jobs() + resident.jobs() + ranked.jobs()
    return tokens + routed + ways + shared + formats + speed[:3] + peers + opt + speed[3:] + blocks + last


@functools.cache
def reference_tokens(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts [3, 12] and transformers' greedy answers to them on the GPU, [3, 36]."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(offloaded.GPU).eval()
    ids = torch.randint(3, SMALL.vocab, (3, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return ids, model.generate(ids.to(offloaded.GPU), max_new_tokens=24, do_sample=False, pad_token_id=0,
                                   eos_token_id=None).cpu()  # fmt: skip


def compare_tokens(folder: Path, machine: Any, budget: dict[str, int], look: Callable[[Any], Row] = lambda _: {},
                   **options: Any) -> Row:
    """Whether two greedy answers on the GPU have transformers' tokens; the second begins with the state that the first
    left. `look` describes the model afterwards, and may say why it `failed`."""
    from forebay.api import wrap

    ids, expected = reference_tokens(folder)
    before = begin_peak()
    with wrap(folder, budget, batch=3, prompt=12, new_tokens=24, machine=machine, **options) as lm:
        same = all(torch.equal(lm.generate(ids, max_new_tokens=24, eos_token_id=None), expected) for _ in range(2))
        row: Row = {"streamed_nbytes": lm.plan.prediction.streamed_nbytes, "same": same}
        wrong: Row = {} if same else {"failed": f"other tokens than transformers' with {options}"}
        return row | wrong | look(lm) | peak_within(budget["device"], before)


def streams(lm: Any) -> Row:
    """A failure where the plan streams nothing."""
    return {} if lm.plan.prediction.streamed_nbytes else {"failed": "nothing streamed"}


def check_tokens(scratch: Path, machine: Any, job: Row) -> Row:
    """Tokens under a budget that streams from disk or host memory."""
    folder = saved_model(scratch, SMALL, torch.float32)
    nbytes = offloaded.model_nbytes(folder)
    budget = {"device": int(nbytes * job["share"]) + offloaded.workspace_nbytes()}
    if job["host"]:
        budget["host"] = int(nbytes * job["host"]) + (8 << 20)
    return compare_tokens(folder, machine, budget, streams if job["share"] < 1 else lambda _: {}, slots=job["slots"])


def check_ranks(scratch: Path, machine: Any, job: Row) -> Row:
    """Tokens of ranks whose parts stream; decode steps of the large model where the job has a batch."""
    if "batch" in job:
        return ranked.measure_ranks(scratch, machine, job)
    machine = ranked.joined(scratch, machine)
    folder = ranked.shared_model(scratch, SMALL, torch.float32)
    part = offloaded.model_nbytes(folder) // ranked.RANKS
    budget = {"device": part // 2 + offloaded.workspace_nbytes(),
              "host": (part if job["source"] == "host" else part // 3) + (8 << 20)}
    return ranked.of_all(compare_tokens(folder, machine, budget, streams, mesh=job["mesh"]))


def check_routed(scratch: Path, machine: Any, job: Row) -> Row:
    """Tokens where decode steps fetch the experts that the router names, from host memory or from disk. With the bytes
    of a step as they were counted, of three sequences, and its time."""
    from forebay.rewriter.ir.program import RETURN

    folder = saved_model(scratch, MIXTURE, torch.float32)
    ids, _ = reference_tokens(folder)
    nbytes = offloaded.model_nbytes(folder)
    budget = {"device": nbytes * job["slots"] // MIXTURE.experts + (24 << 20) + offloaded.workspace_nbytes(),
              "host": nbytes // 2 if job["source"] == "disk" else nbytes + (24 << 20)}

    def look(lm: Any) -> Row:
        tiers = {w.tier for w in lm.plan.weights if w.pool_slots}
        steps = step_row(token_times(lm, ids, 24), 3)
        lm.start_trace()
        lm.generate(ids, max_new_tokens=24, eos_token_id=None)
        fetched = sum(n for (lane, _, _), _, _, n in lm.trace._kept() if lane == RETURN) / 23  # decode steps
        row = steps | {"tiers": sorted(tiers), "fetched_nbytes": fetched,
                       "predicted_step_s": lm.plan.prediction.decode_time_s}
        return row if job["source"] in tiers else row | {"failed": f"pools of tables on {sorted(tiers)}"}

    return compare_tokens(folder, machine, budget, look, expert_slots=job["slots"])


def check_ways(scratch: Path, machine: Any, job: Row) -> Row:
    """Tokens for each placement of caches and kind of step; freed memory is poisoned."""
    folder, way = saved_model(scratch, WINDOWED if job["windowed"] else SMALL, torch.float32), WAYS[job["way"]]
    with patch.dict(os.environ, FOREBAY_POISON="1"):
        budget = dict.fromkeys(("device", "host"), 4 * offloaded.model_nbytes(folder) + (64 << 20))
        return compare_tokens(folder, machine, budget, lambda _: {"asked": way}, **way)


def check_formats(scratch: Path, machine: Any, job: Row) -> Row:
    """Logits of the GPU's kernels over quantized weights and cache, half of the weights streamed, beside the CPU's
    kernels over the same bits. A plan that streams nothing has failed: it would check nothing."""
    from forebay.api import wrap
    from forebay.rewriter.machine.profile import Machine

    exact = job["cache"] == "kv4"
    folder = saved_model(scratch, FORMATS, torch.float32 if exact else torch.bfloat16, job["weights"])
    nbytes, limit = offloaded.model_nbytes(folder), EXACT_LIMIT if exact else LOGITS_LIMIT
    ids = torch.randint(3, SMALL.vocab, (3, 40), generator=torch.Generator().manual_seed(2))
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
    row: Row = {"error": error, "limit": limit, "streamed_nbytes": streamed[0], "weights_nbytes": nbytes}
    row |= peak
    if not streamed[0]:
        return row | {"failed": "nothing streamed"}
    return row if error <= limit else row | {"failed": f"logits differ by {error:.1e}"}


def check_shared(scratch: Path, machine: Any, job: Row) -> Row:
    """Tokens where steps of the model itself draft in its memory, by weights in fewer bits."""
    from forebay import drafted
    from forebay.rewriter.ir.plan import PlanError
    from forebay.runtime.run.draft_choice import DraftChoice

    folder = saved_model(scratch, FORMATS, torch.float32)
    nbytes = offloaded.model_nbytes(folder)
    budget = {"device": half_resident(folder, machine, "native") + nbytes // 3, "host": nbytes + (8 << 20)}

    def look(lm: Any) -> Row:
        tally = lm.tally
        row: Row = {"offered": tally.offered, "accepted": tally.accepted, "told": lm.steps.drafts.split.told}
        return row | streams(lm) | ({} if tally.offered else {"failed": f"no drafts: {tally}"})

    with (patch.object(drafted, "draft_apart", side_effect=PlanError("no copy has memory of its own")),
          patch.object(DraftChoice, "_worth", lambda *_: (3, 0.0))):
        return compare_tokens(folder, machine, budget, look, draft=job["weights"], prompt_lookup_num_tokens=3)


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


PARTS: dict[str, Callable[[Path, Any, Row], Row]] = {
    "tokens": check_tokens, "routed": check_routed, "ways": check_ways, "shared": check_shared,
    "formats": check_formats, "throughput": measure_throughput, "peer": measure_peer, "flexgen": measure_flexgen,
    "blocks": measure_blocks, "resident": resident.measure_resident, "whole_steps": whole_steps.measure_whole_steps,
    "ranks": check_ranks,
}


def answer(scratch: Path) -> None:
    """Do the jobs whose numbers come on standard input."""
    from forebay.rewriter.machine.profile import load_machine

    machine, known = load_machine(scratch / "machine.json"), jobs()
    serve(lambda number: PARTS[known[number]["part"]](scratch, machine, known[number]), check_gpu)


WORDS = ("part", "source", "weights", "shape", "attention", "contestant")  # told without their names


def name_of(job: Row) -> str:
    """A job in words."""
    return ", ".join(str(value) if key in WORDS else f"{key} {value}" for key, value in job.items())


def line(job: Row, row: Row) -> str:
    """A job and what came of it: its numbers and words."""
    if "failed" in row or "skipped" in row:
        return f"{name_of(job)}: {row.get('skipped') or 'FAILED: ' + row['failed']}"
    shown = {key: f"{value:.4g}" if isinstance(value, float) else str(value) for key, value in row.items()
             if isinstance(value, (int, float, str))}
    return f"{name_of(job)}: {', '.join(f'{key} {value}' for key, value in shown.items())}"


def main() -> int:
    options = arguments(
        __doc__, parts=([*PARTS], "only these"), match=("", "only jobs in whose line this regular expression is found"),
        limit=(LIMIT_S, "seconds for the whole run"), answer=(Path, "folder of a process that is asked"))
    if unknown := {*options.parts} - {*PARTS}:
        raise SystemExit(f"--parts: {', '.join(sorted(unknown))} is none of {', '.join(PARTS)}")
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.gpu_offload: torch finds no GPU here")
    if options.answer:
        answer(options.answer)
        return 0
    if torch.cuda.device_count() < ranked.RANKS and "ranks" in options.parts:
        say(f"ranks: left out, a model is shared by {ranked.RANKS} GPUs and {torch.cuda.device_count()} is here")
        options.parts.remove("ranks")
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
        command = [sys.executable, "-m", "benchmarks.gpu_offload", "--answer", scratch]
        worker, ranks = IsolatedWorker(command), IsolatedRanks(command, ranked.RANKS)
        try:
            for number, job in enumerate(jobs()):
                if job["part"] not in options.parts or not re.search(options.match, name_of(job)):
                    continue
                left = STARTED + options.limit - time.monotonic()
                row: Row = {"skipped": "left out, no time left"}
                if left > LEAST_S:
                    asked = ranks if job["part"] == "ranks" else worker
                    row = asked.ask(number, JOB_S.get(job["part"], OTHERS_S), left)
                result["rows"].append(job | row)
                say(line(job, row))
                target.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
                write_json(options, result)
        finally:
            worker.close()
            ranks.close()
    say(f"written to {target}")
    return int(any("failed" in row for row in result["rows"]))


if __name__ == "__main__":
    sys.exit(main())
