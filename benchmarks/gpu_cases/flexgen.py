"""FlexGen (the package `flexgen` 0.1.8) with its dummy weights, as a peer of decoding from host memory."""

from __future__ import annotations

import tempfile
from typing import Any

from benchmarks.models import RandomShape

MISSING = "flexgen is not installed (pip install flexgen==0.1.8)"


def step_times(shape: RandomShape, batch: int, prompt: int, steps: int, gpu_percent: int,
               micro_batches: int = 1, cache_on_host: bool = False, cpu_attention: bool = False) -> list[float]:
    """Seconds of a prefill of `prompt` tokens and of each decode step after it, of an OPT of this shape in fp16 with
    `gpu_percent` of each weight on the GPU and the rest in pinned memory, activations on the GPU; the cache there too,
    or all of it in host memory, where with `cpu_attention` the host attends. `micro_batches` share each pass over the
    weights."""
    import numpy as np
    from flexgen.compression import CompressionConfig
    from flexgen.flex_opt import OptLM, Policy
    from flexgen.opt_config import OptConfig
    from flexgen.timer import timers
    from flexgen.utils import ExecutionEnv

    config = OptConfig(name="opt-6.7b", num_hidden_layers=shape.layers, n_head=shape.heads, hidden_size=shape.hidden,
                       input_dim=shape.hidden, ffn_embed_dim=shape.intermediate, vocab_size=shape.vocab)
    packing: Any = CompressionConfig(num_bits=4, group_size=64, group_dim=0, symmetric=False)
    cached = 0 if cache_on_host else 100  # percent on the GPU
    policy = Policy(batch // micro_batches, micro_batches, gpu_percent, 100 - gpu_percent, cached, 100 - cached, 100, 0,
                    overlap=True, sep_layer=True, pin_weight=True, cpu_cache_compute=cpu_attention, attn_sparsity=1.0,
                    compress_weight=False, comp_weight_config=packing, compress_cache=False,
                    comp_cache_config=packing)  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        env = ExecutionEnv.create(folder)
        try:
            model = OptLM(config, env, "_DUMMY_", policy)
            ids = np.random.default_rng(3).integers(3, shape.vocab, (batch, prompt))
            model.generate(ids, max_new_tokens=1)
            timers("generate").reset()
            model.generate(ids, max_new_tokens=steps + 1)
            return [float(cost) for cost in timers("generate").costs]
        finally:
            env.close_copy_threads()
