"""What `decode_in_ram` and `gguf_offload` run in processes of their own, and how they are asked."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

NEW, BUDGET = 32, "8GB"
# What peers need.
MODULES = {"llama.cpp": "xllamacpp", "openvino": "openvino_genai", "onnxruntime": "onnxruntime_genai"}
LIBGOMP_SPINS = "300000"  # its default, with which llama.cpp is several times faster than without spinning
Turn = tuple[float, float]  # prefill_s, and time_s of each token after the first


def started(module: str, name: str, path: str, threads: int, *more: str) -> subprocess.Popen[str] | None:
    """A process that has loaded a contestant and takes turns, one for each line; None where it does not load."""
    spins = {"GOMP_SPINCOUNT": LIBGOMP_SPINS} if name.startswith("llama.cpp") else {}
    command = [sys.executable, "-m", f"benchmarks.{module}", "--serve", name, "--path", path, "--threads", str(threads)]
    process = subprocess.Popen([*command, *more], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                               env={**os.environ, "OMP_NUM_THREADS": str(threads), **spins})
    if ask(process) is not None:
        return process
    process.wait()
    return None


def ask(process: subprocess.Popen[str], line: str | None = None) -> dict[str, Any] | None:
    """The answer to a line, or what is said unasked; None where the process has ended."""
    assert process.stdin is not None and process.stdout is not None
    if line is not None:
        print(line, file=process.stdin, flush=True)
    answer = process.stdout.readline()
    return json.loads(answer) if answer else None


def some_ids(count: int) -> list[int]:
    """Random tokens of SmolLM2's vocabulary."""
    return torch.randint(5, 49000, (count,), generator=torch.Generator().manual_seed(1)).tolist()


def timed_answer(lm: Any, ids: list[int], new: int) -> Turn:
    seen = [time.perf_counter()]
    lm.generate(torch.tensor([ids]), max_new_tokens=new, eos_token_id=None,
                on_token=lambda token: seen.append(time.perf_counter()))
    return seen[1] - seen[0], (seen[-1] - seen[1]) / (new - 1)


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
    """Bytes of this process: VmRSS now, VmHWM at most since `forget_peak`."""
    found = re.search(rf"{which}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


class ForebayInRam:
    def __init__(self, name: str, path: str, prompt: int, threads: int) -> None:
        import forebay.api

        self.lm = forebay.api.wrap(path, {"device": BUDGET}, batch=1, prompt=prompt, new_tokens=NEW,
                                   activations="int8" if "int8" in name else "native")
        streamed = self.lm.plan.prediction.streamed_nbytes
        if streamed > self.lm.captured.vocab_size:  # a row of the embedding comes from the file, and nothing else
            raise SystemExit(f"{BUDGET} do not hold {path}: {streamed} bytes are streamed")

    def turn(self, ids: list[int]) -> Turn:
        return timed_answer(self.lm, ids, NEW)


class Transformers:
    def __init__(self, name: str, path: str, prompt: int, threads: int) -> None:
        import transformers

        self.model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()

    @torch.inference_mode()
    def turn(self, ids: list[int]) -> Turn:
        """A bare loop over the model's forward: what transformers' generate does beside it is not counted."""
        token, cache, seen = torch.tensor([ids]), None, [time.perf_counter()]
        for _ in range(NEW):
            result = self.model(input_ids=token, past_key_values=cache, use_cache=True, logits_to_keep=1)
            token, cache = result.logits[:, -1].argmax(-1, keepdim=True), result.past_key_values
            seen.append(time.perf_counter())
        return seen[1] - seen[0], (seen[-1] - seen[1]) / (NEW - 1)


class LlamaCpp:
    def __init__(self, name: str, path: str, prompt: int, threads: int) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path, params.n_ctx, params.n_parallel = path, prompt + NEW + 64, 1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        self.server = xllamacpp.Server(params)

    def turn(self, ids: list[int]) -> Turn:
        answer: Any = self.server.handle_completions(
            {"prompt": ids, "max_tokens": NEW, "temperature": 0.0, "ignore_eos": True, "cache_prompt": False})
        timings = answer["timings"]
        assert timings["predicted_n"] == NEW and timings["prompt_n"] == len(ids)
        return timings["prompt_ms"] / 1e3, timings["predicted_ms"] / 1e3 / NEW


class OpenVino:
    def __init__(self, name: str, path: str, prompt: int, threads: int) -> None:
        import openvino
        import openvino_genai as genai

        self.genai, self.tensor = genai, openvino.Tensor
        precision = "bf16" if "bf16" in name else "f32" if "float32" in name else None
        exact = {"DYNAMIC_QUANTIZATION_GROUP_SIZE": 0, "INFERENCE_PRECISION_HINT": precision} if precision else {}
        scheduler = genai.SchedulerConfig()
        scheduler.enable_prefix_caching, scheduler.max_num_batched_tokens = False, prompt + NEW
        scheduler.cache_size = 2
        self.pipe = genai.LLMPipeline(path, "CPU", scheduler_config=scheduler, INFERENCE_NUM_THREADS=threads, **exact)

    def turn(self, ids: list[int]) -> Turn:
        import numpy as np

        tokens = np.array([ids], dtype=np.int64)
        given = self.genai.TokenizedInputs(self.tensor(tokens), self.tensor(np.ones_like(tokens)))
        config = self.genai.GenerationConfig(max_new_tokens=NEW, min_new_tokens=NEW, ignore_eos=True, do_sample=False)
        metrics = self.pipe.generate(given, config).perf_metrics
        assert metrics.get_num_generated_tokens() == NEW
        return metrics.get_ttft().mean / 1e3, metrics.get_tpot().mean / 1e3


class OnnxRuntime:
    """onnxruntime-genai with what its own builder makes of the checkpoint in 4 bits."""

    def __init__(self, name: str, path: str, prompt: int, threads: int) -> None:
        import onnxruntime_genai as genai

        self.genai, self.model = genai, open_onnx(path, threads)

    def turn(self, ids: list[int]) -> Turn:
        import numpy as np

        options = self.genai.GeneratorParams(self.model)
        whole = len(ids) + NEW
        options.set_search_options(max_length=whole, min_length=whole, do_sample=False)
        generator = self.genai.Generator(self.model, options)
        began = time.perf_counter()
        generator.append_tokens(np.array([ids], np.int32))
        generator.generate_next_token()
        first = time.perf_counter()
        for _ in range(NEW - 1):
            generator.generate_next_token()
        return first - began, (time.perf_counter() - first) / (NEW - 1)


CONTESTANTS: dict[str, Any] = {"forebay": ForebayInRam, "llama.cpp": LlamaCpp, "openvino": OpenVino,
                               "onnxruntime": OnnxRuntime, "transformers": Transformers}
