"""Models opened and closed again and again leave nothing that the garbage collector cannot free.

FOREBAY_TEST_ALL=1 (`make test-all`) does so 1 000 times.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
import transformers

CYCLES = 1000 if os.environ.get("FOREBAY_TEST_ALL") == "1" else 4
# In a process of its own: pytest keeps what torch logs of a trace. The first cycles fill caches that are bounded.
USE = """
import gc, json, linecache, os, sys
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
import forebay

def cycles(count):
    for _ in range(count):
        with forebay.wrap(sys.argv[1], {"device": "1MiB"}, prompt=8, new_tokens=4) as lm:
            lm.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2)
        del lm
        gc.collect()
    kinds = [type(o) for o in gc.get_objects()]
    print(json.dumps({"modes": kinds.count(FakeTensorMode), "environments": kinds.count(ShapeEnv),
                      "descriptors": len(os.listdir("/proc/self/fd")), "sources": len(linecache.cache)}))

cycles(2)
cycles(int(sys.argv[2]))
"""


def test_cycles_leave_nothing(tmp_path: Path) -> None:
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2)).save_pretrained(tmp_path)
    done = subprocess.run([sys.executable, "-c", USE, str(tmp_path), str(CYCLES)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    before, after = map(json.loads, done.stdout.splitlines()[-2:])
    assert after == before
