"""The engines that `benchmarks.offload` compares with, each with one call: a turn's seconds of prompt and steps."""

from __future__ import annotations

import functools
import gc
import importlib
import importlib.util
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.page_cache import PageCache, StepClock

MODULES = {"forebay": "forebay.api", "link": "forebay.runtime.measure.machine", "llama.cpp": "xllamacpp",
           "openvino": "openvino_genai", "neurostream": "neurostream.api",
           "disk-map": "accelerate", "accelerate": "accelerate", "ram": "transformers", "flexgen": "flexgen.flex_opt"}
LAYER_CLASSES = ["LlamaDecoderLayer", "OPTDecoderLayer"]  # which no map of devices may split
Order = dict[str, Any]


def installed(engine: str) -> bool:
    return importlib.util.find_spec(MODULES[engine].partition(".")[0]) is not None


def import_library(engine: str) -> None:
    """What an engine imports; what one of another project prints is not shown."""
    if engine not in ("forebay", "link"):
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
    importlib.import_module(MODULES[engine])
    import transformers.models.llama.modeling_llama
    import transformers.models.opt.modeling_opt
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401


def resident(which: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at most."""
    found = re.search(rf"{which}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def prompts(order: Order) -> torch.Tensor:
    """The same random prompts [B, T] for everyone."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(5, order["vocab"], (order["batch"], order["prompt"]), generator=generator)


def drawing(order: Order) -> Order:
    """How peers choose tokens: the likeliest, or (`draw`) any by its probability."""
    return {"temperature": 1.0, "top_p": 1.0} if order.get("draw") else {"temperature": 0.0}


def whole_answer(clock: StepClock) -> Order:
    return {"prefill_s": clock.times_s[0], "steps_s": clock.times_s[1:], "steady_s": clock.times_s[2:],
            "tokens": clock.tokens, "cached_peak": clock.cached_peak}


class PeerEngine:
    """An engine, made anew where a turn asks for a prompt or an answer of other lengths."""

    def __init__(self, engine: str, order: Order) -> None:
        self.engine = engine
        self.at: tuple[int, ...] | None = None
        self.made: Any = None

    def plan(self, order: Order) -> Order:
        return {"batch": order["batch"]}

    def ready(self, order: Order) -> None:
        at = () if self.engine in TRANSFORMERS else (order["prompt"], order["new"])
        if at != self.at:
            self.made = None
            gc.collect()
            self.made, self.at = ENGINES[self.engine](order), at
            if order["ram"] and at:
                self.made.turn(order)

    def turn(self, order: Order) -> Order:
        found: Order = self.made.turn(order)
        return found

    def rest(self, order: Order) -> Order:
        if order["capped"]:  # the memory is the next one's
            self.made = self.at = None
        gc.collect()
        return {}

    close = rest


def decode(model: Any, ids: torch.Tensor, new_tokens: int, clock: StepClock, cache: Any = None) -> None:
    """A bare loop over the forward of a transformers model: `generate` does more, which is not counted."""
    for _ in range(new_tokens):
        clock.begin()
        result = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        ids, cache = result.logits[:, -1].argmax(-1, keepdim=True).to(ids.device), result.past_key_values
        clock.end(ids[:, 0])


class Transformers:
    """A transformers model in bf16: `disk-map` by device_map="auto", `accelerate` by load_checkpoint_and_dispatch, both
    with the memory limit and disk offload; or wholly in memory. The page cache is dropped before every step."""

    def __init__(self, order: Order) -> None:
        import transformers

        transformers.utils.logging.disable_progress_bar()
        make, folder, name = transformers.AutoModelForCausalLM, order["path"], order["name"]
        self.folders = [folder]
        if order["ram"]:
            self.model = make.from_pretrained(folder, dtype=torch.bfloat16)
            for value in self.model.parameters():  # else they are a map of the file, whose pages cannot be dropped
                value.data = value.data.clone()
        else:
            offload, limit = str(Path(order["scratch"]) / f"{name}-offload"), {"cpu": order["budget"]}
            if name == "disk-map":
                self.model = make.from_pretrained(folder, dtype=torch.bfloat16, device_map="auto", max_memory=limit,
                                                  offload_folder=offload)
            else:
                import accelerate

                config = transformers.AutoConfig.from_pretrained(folder)
                with accelerate.init_empty_weights():
                    model = make.from_config(config, dtype=torch.bfloat16)
                places = accelerate.infer_auto_device_map(
                    model, max_memory=limit, no_split_module_classes=LAYER_CLASSES, dtype=torch.bfloat16)
                self.model = accelerate.load_checkpoint_and_dispatch(
                    model, folder, device_map=places, offload_folder=offload, dtype=torch.bfloat16)
            self.folders.append(offload)
        self.model.eval()

    def turn(self, order: Order) -> Order:
        ids, cache = prompts(order), PageCache(self.folders)
        clock = StepClock(cache)
        with torch.inference_mode():
            if order["whole"]:
                cache.drop()
                decode(self.model, ids[:, :2], 2, StepClock(cache))  # leaves its pages in the page cache from now on
                decode(self.model, ids, order["new"], clock)
                return whole_answer(clock)
            count = min(order["steps"], order["new"] - 2)
            at = order["prompt"] + (order["new"] - count - 1) // 2
            decode(self.model, ids[:, :1], count + 1, clock, self.made_cache(order["batch"], at))
            return {"steps_s": clock.times_s[1:], "cached_peak": clock.cached_peak}

    def made_cache(self, batch: int, tokens: int) -> Any:
        import transformers

        config = self.model.config
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        cache = transformers.DynamicCache()
        for layer in range(config.num_hidden_layers):
            side = torch.full((batch, heads, tokens, config.hidden_size // config.num_attention_heads), 0.01,
                              dtype=torch.bfloat16)
            cache.update(side, side.clone(), layer)
        return cache


class NeuroStream:
    """Half of the budget for weights that it keeps, a quarter for its buffers."""

    def __init__(self, order: Order) -> None:
        from neurostream.api import NeuroStream as Model

        self.model = Model.load(order["path"], device="cpu", mem_budget=order["budget"] // 4,
                                ram_budget=order["budget"] // 2)

    def turn(self, order: Order) -> Order:
        ids = prompts(order)[0].tolist()
        for _ in self.model.generate(ids, max_tokens=order["new"], stop_on_eos=False, **drawing(order)):
            pass
        stats = self.model.stats
        return {"prefill_s": stats.prefill_seconds, "steps_s": [stats.decode_seconds / (order["new"] - 1)]}


class LlamaCpp:
    """The file mapped. Where it exceeds the budget its matrices are not repacked, as that would copy all to memory."""

    def __init__(self, order: Order) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path, params.n_parallel, params.cache_ram_mib = order["path"], order["batch"], 0
        params.n_ctx = order["batch"] * (order["prompt"] + order["new"] + 64)
        params.no_extra_bufts = not order["ram"] and os.path.getsize(order["path"]) > order["budget"]
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = torch.get_num_threads()
        self.server = xllamacpp.Server(params)

    def turn(self, order: Order) -> Order:
        """All prompts at once: a step's time is that of the sequence whose prompt ends last, as others decode before.
        Its clock of decoding begins when the first token is there, as ours does."""
        began = time.perf_counter()
        with ThreadPoolExecutor(order["batch"]) as pool:
            timings = list(pool.map(functools.partial(self.timings, order), prompts(order).tolist()))
        decode = min(t["predicted_ms"] for t in timings) / 1e3
        return {"prefill_s": time.perf_counter() - began - decode, "steps_s": [decode / (order["new"] - 1)]}

    def timings(self, order: Order, ids: list[int]) -> Any:
        answer: Any = self.server.handle_completions(
            {"prompt": ids, "max_tokens": order["new"], "ignore_eos": True, "cache_prompt": False,
             "min_p": 0.0, "top_k": 0, **drawing(order)})
        timings = answer["timings"]
        assert timings["predicted_n"] == order["new"] and timings["prompt_n"] == len(ids)
        return timings


class OpenVino:
    def __init__(self, order: Order) -> None:
        import openvino
        import openvino_genai as genai

        self.genai, self.tensor = genai, openvino.Tensor
        precision = order["options"].get("precision")
        exact = {"DYNAMIC_QUANTIZATION_GROUP_SIZE": 0, "INFERENCE_PRECISION_HINT": precision} if precision else {}
        scheduler = genai.SchedulerConfig()
        scheduler.enable_prefix_caching, scheduler.cache_size = False, 2
        scheduler.max_num_batched_tokens = order["prompt"] + order["new"]
        self.pipe = genai.LLMPipeline(order["path"], "CPU", scheduler_config=scheduler,
                                      INFERENCE_NUM_THREADS=torch.get_num_threads(), **exact)

    def turn(self, order: Order) -> Order:
        import numpy as np

        tokens, new = prompts(order).numpy(), order["new"]
        given = self.genai.TokenizedInputs(self.tensor(tokens), self.tensor(np.ones_like(tokens)))
        config = self.genai.GenerationConfig(max_new_tokens=new, min_new_tokens=new, ignore_eos=True, do_sample=False)
        metrics = self.pipe.generate(given, config).perf_metrics
        assert metrics.get_num_generated_tokens() == new
        return {"prefill_s": metrics.get_ttft().mean / 1e3, "steps_s": [metrics.get_tpot().mean / 1e3]}


TRANSFORMERS = ("disk-map", "accelerate", "ram")
ENGINES: dict[str, Any] = {**dict.fromkeys(TRANSFORMERS, Transformers), "llama.cpp": LlamaCpp, "openvino": OpenVino,
                           "neurostream": NeuroStream}
