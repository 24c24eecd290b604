"""Who takes part in `benchmarks.gguf_speed`, each in a process of its own, and how it is asked and limited."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

IN_RAM = 8 * 10**9  # a budget that holds all of it
ROOM = 150 << 20  # beside a budget, in the kernel's limit
GROUPS = Path("/sys/fs/cgroup")
MODULES = {"forebay": "forebay.api", "llama.cpp": "xllamacpp", "openvino": "openvino_genai",
           "onnxruntime": "onnxruntime_genai", "exported": "onnxruntime_genai", "neurostream": "neurostream.api",
           "transformers": "transformers"}
LIBGOMP_SPINS = "300000"  # its default, with which llama.cpp is several times faster than without spinning
# Processors that are simulated: what oneDNN and torch call their instructions.
LESSER = {"haswell": ("AVX2", "avx2"), "skylake-avx512": ("AVX512_CORE", "avx512")}
Turn = tuple[float, float]  # prefill_s, and time_s of each token after the first


@dataclass(frozen=True)
class Asked:
    """What a contestant is to do; without a budget it runs wholly in RAM, and has no limit."""

    name: str
    path: str
    prompt: int
    new: int
    threads: int
    budget: int = 0
    processor: str | None = None

    @property
    def kind(self) -> str:
        return self.name.split()[0]


class Asking:
    """A process that has loaded a contestant and takes turns; `running` is false where it does not load."""

    def __init__(self, asked: Asked) -> None:
        spins = {"GOMP_SPINCOUNT": LIBGOMP_SPINS} if asked.kind == "llama.cpp" else {}
        held: dict[str, str] = {}
        if asked.processor is not None:
            held = dict(zip(("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY"), LESSER[asked.processor], strict=True))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gguf_contestants", json.dumps(asdict(asked))], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(asked.threads), **spins, **held})
        self.running = self._answer() is not None

    def turn(self) -> dict[str, Any] | None:
        """What a turn found; None where the process has ended."""
        assert self.process.stdin is not None
        print("turn", file=self.process.stdin, flush=True)
        found = self._answer()
        self.running = found is not None
        return found

    def _answer(self) -> dict[str, Any] | None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else None

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def serve(asked: Asked) -> None:
    """Load within the limit, then one turn for each line on stdin; an answer a line on stdout."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)  # libraries may print; the answers stay alone on the pipe
    quiet, peer = os.open(os.devnull, os.O_WRONLY), asked.kind not in ("forebay", "transformers")
    os.dup2(quiet if peer else 2, 1)
    if peer:
        os.dup2(quiet, 2)
    importlib.import_module(MODULES[asked.kind])
    if asked.kind in ("forebay", "transformers"):
        import transformers.models.llama.modeling_llama
        import transformers.models.qwen3.modeling_qwen3

        from forebay.kernels.cpu_support import native

        if asked.processor is not None:
            native.FLAGS = tuple(flag.replace("=native", f"={asked.processor}") for flag in native.FLAGS)
        transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(asked.threads)
    empty = resident("VmRSS")
    limited = asked.budget > 0 and enter_limit(asked.budget + ROOM)
    contestant = CONTESTANTS[asked.kind](asked)
    ids = torch.randint(5, 49000, (asked.prompt,), generator=torch.Generator().manual_seed(1)).tolist()
    if not asked.budget:
        contestant.turn(ids)
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
    print(json.dumps({"loaded": True}), file=answers)
    for _ in sys.stdin:
        prefill_s, time_s = contestant.turn(ids)
        peak = resident("VmHWM")
        print(json.dumps({"prefill_s": prefill_s, "time_s": time_s, "limited": limited, "peak": peak,
                          "above_empty": peak - empty}), file=answers)


def enter_limit(nbytes: int) -> bool:
    """From now on, what this process takes beside what it has, pages of files included, is at most `nbytes`: pages are
    dropped, and where that is not enough the process is killed. False where groups cannot be made here."""
    first = (GROUPS / "cgroup.controllers").exists()
    folder = (GROUPS if first else GROUPS / "memory") / f"forebay-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / ("memory.max" if first else "memory.limit_in_bytes")).write_text(str(nbytes))
        (folder / "cgroup.procs").write_text(str(os.getpid()))
    except OSError:
        return False
    return True


def remove_limits() -> None:
    """Take away the groups of processes that have ended."""
    for folder in (*GROUPS.glob("forebay-*"), *(GROUPS / "memory").glob("forebay-*")):
        if not (folder / "cgroup.procs").read_text():
            folder.rmdir()


def build_onnx(model: Path, out: Path, precision: str, cache: Path) -> None:
    """The model in a precision ("int4") by onnxruntime-genai's own builder."""
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(model), "-o", str(out), "-e", "cpu",
               "-p", precision, "-c", str(cache)]
    ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode:
        raise SystemExit(f"the builder failed (it needs: pip install onnx_ir): {ran.stderr.splitlines()[-1]}")


def onnx_nbytes(folder: Path) -> int:
    """Bytes of weights that a token reads: all but a table of embeddings that a lookup alone reads."""
    import onnx

    graph = onnx.load(folder / "model.onnx", load_external_data=False).graph
    looked_up = {node.input[0] for node in graph.node if node.op_type == "Gather"}
    looked_up -= {name for node in graph.node if node.op_type != "Gather" for name in node.input}
    tables = (tensor for tensor in graph.initializer if tensor.name in looked_up)
    beside = sum(int(entry.value) for tensor in tables for entry in tensor.external_data if entry.key == "length")
    return sum(path.stat().st_size for path in folder.glob("model.onnx*")) - beside


def open_onnx(folder: str | Path, threads: int) -> Any:
    """A model of onnxruntime-genai's."""
    import onnxruntime_genai as genai

    config = genai.Config(str(folder))
    options = {"intra_op_num_threads": threads, "inter_op_num_threads": 1}
    config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
    return genai.Model(config)


def resident(which: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at most."""
    found = re.search(rf"{which}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


class ForebayOnGguf:
    def __init__(self, asked: Asked) -> None:
        import forebay.api

        self.new = asked.new
        self.lm = forebay.api.wrap(asked.path, {"device": asked.budget or IN_RAM}, batch=1, prompt=asked.prompt,
                                   new_tokens=asked.new, activations="int8" if "int8" in asked.name else "native")
        streamed = self.lm.plan.prediction.streamed_nbytes
        # in RAM a row of the embedding comes from the file, and nothing else
        if not asked.budget and streamed > self.lm.captured.vocab_size:
            raise SystemExit(f"{IN_RAM} bytes do not hold {asked.path}: {streamed} bytes are streamed")

    def turn(self, ids: list[int]) -> Turn:
        seen = [time.perf_counter()]
        self.lm.generate(torch.tensor([ids]), max_new_tokens=self.new, eos_token_id=None,
                         on_token=lambda token: seen.append(time.perf_counter()))
        return seen[1] - seen[0], (seen[-1] - seen[1]) / (self.new - 1)


class NeuroStreamPeer:
    """Half of the budget for weights that it keeps, a quarter for its buffers."""

    def __init__(self, asked: Asked) -> None:
        from neurostream.api import NeuroStream as Model

        self.new = asked.new
        self.model = Model.load(asked.path, device="cpu", mem_budget=asked.budget // 4, ram_budget=asked.budget // 2)

    def turn(self, ids: list[int]) -> Turn:
        for _ in self.model.generate(ids, max_tokens=self.new, temperature=0.0, stop_on_eos=False):
            pass
        stats = self.model.stats
        return stats.prefill_seconds, stats.decode_seconds / (self.new - 1)


class Transformers:
    def __init__(self, asked: Asked) -> None:
        import transformers

        self.new = asked.new
        self.model = transformers.AutoModelForCausalLM.from_pretrained(asked.path, dtype=torch.bfloat16).eval()

    @torch.inference_mode()
    def turn(self, ids: list[int]) -> Turn:
        """A bare loop over the model's forward: what transformers' generate does beside it is not counted."""
        token, cache, seen = torch.tensor([ids]), None, [time.perf_counter()]
        for _ in range(self.new):
            result = self.model(input_ids=token, past_key_values=cache, use_cache=True, logits_to_keep=1)
            token, cache = result.logits[:, -1].argmax(-1, keepdim=True), result.past_key_values
            seen.append(time.perf_counter())
        return seen[1] - seen[0], (seen[-1] - seen[1]) / (self.new - 1)


class LlamaCpp:
    def __init__(self, asked: Asked) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        self.new = asked.new
        params.model.path, params.n_ctx, params.n_parallel = asked.path, asked.prompt + asked.new + 64, 1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = asked.threads
        self.server = xllamacpp.Server(params)

    def turn(self, ids: list[int]) -> Turn:
        answer: Any = self.server.handle_completions(
            {"prompt": ids, "max_tokens": self.new, "temperature": 0.0, "ignore_eos": True, "cache_prompt": False})
        timings = answer["timings"]
        assert timings["predicted_n"] == self.new and timings["prompt_n"] == len(ids)
        return timings["prompt_ms"] / 1e3, timings["predicted_ms"] / 1e3 / self.new


class OpenVino:
    def __init__(self, asked: Asked) -> None:
        import openvino
        import openvino_genai as genai

        self.genai, self.tensor, self.new = genai, openvino.Tensor, asked.new
        precision = "bf16" if "bf16" in asked.name else "f32" if "float32" in asked.name else None
        exact = {"DYNAMIC_QUANTIZATION_GROUP_SIZE": 0, "INFERENCE_PRECISION_HINT": precision} if precision else {}
        scheduler = genai.SchedulerConfig()
        scheduler.enable_prefix_caching, scheduler.max_num_batched_tokens = False, asked.prompt + asked.new
        scheduler.cache_size = 2
        self.pipe = genai.LLMPipeline(asked.path, "CPU", scheduler_config=scheduler,
                                      INFERENCE_NUM_THREADS=asked.threads, **exact)

    def turn(self, ids: list[int]) -> Turn:
        import numpy as np

        tokens = np.array([ids], dtype=np.int64)
        given = self.genai.TokenizedInputs(self.tensor(tokens), self.tensor(np.ones_like(tokens)))
        config = self.genai.GenerationConfig(max_new_tokens=self.new, min_new_tokens=self.new, ignore_eos=True,
                                             do_sample=False)
        metrics = self.pipe.generate(given, config).perf_metrics
        assert metrics.get_num_generated_tokens() == self.new
        return metrics.get_ttft().mean / 1e3, metrics.get_tpot().mean / 1e3


class OnnxRuntime:
    """onnxruntime-genai with what its own builder makes of the checkpoint, or `forebay export`."""

    def __init__(self, asked: Asked) -> None:
        import onnxruntime_genai as genai

        self.genai, self.model, self.new = genai, open_onnx(asked.path, asked.threads), asked.new

    def turn(self, ids: list[int]) -> Turn:
        import numpy as np

        options = self.genai.GeneratorParams(self.model)
        whole = len(ids) + self.new
        options.set_search_options(max_length=whole, min_length=whole, do_sample=False)
        generator = self.genai.Generator(self.model, options)
        began = time.perf_counter()
        generator.append_tokens(np.array([ids], np.int32))
        generator.generate_next_token()
        first = time.perf_counter()
        for _ in range(self.new - 1):
            generator.generate_next_token()
        return first - began, (time.perf_counter() - first) / (self.new - 1)


CONTESTANTS: dict[str, Any] = {
    "forebay": ForebayOnGguf, "llama.cpp": LlamaCpp, "openvino": OpenVino, "onnxruntime": OnnxRuntime,
    "exported": OnnxRuntime, "neurostream": NeuroStreamPeer, "transformers": Transformers}

if __name__ == "__main__":
    serve(Asked(**json.loads(sys.argv[1])))
