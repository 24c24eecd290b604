"""Models opened and closed again and again, from folders and from memory, compiled modules, and captures that break off
leave nothing that the garbage collector cannot free, and no descriptor.

FOREBAY_TEST_ALL=1 (`make test-all`) does so 1 000 times.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from budgets import attention_nbytes
from forked import run_code
from selection import ALL

# Without our kernels torch's operators take more than all the rest.
DEVICE_NBYTES = (1 << 20) + max(0, attention_nbytes(1, 4, 12, 16))
CYCLES = 1000 if ALL else 1  # counts are compared exactly: what stays shows
# In a process of its own: pytest keeps what torch logs of a trace. The first cycles fill caches that are bounded.
USE = """
import gc, json, linecache, os, sys, warnings
import torch, transformers
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
import forebay
from forebay.rewriter.capture import trace
from forebay.rewriter.capture.language_model import CaptureError, capture_model

class Broken(RuntimeError):
    pass

def breaking(*given):
    raise Broken("after all is traced")

def opened(model):
    with forebay.wrap(model, {"device": int(sys.argv[3]), "disk": sys.argv[1]}, prompt=8, new_tokens=4) as lm:
        lm.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2)

def compiled():
    module = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 16))
    with torch.no_grad():
        options = {"budget": {"device": 100_000, "disk": sys.argv[1]}, "strict": True}
        torch.compile(module, backend="forebay", options=options)(torch.randn(2, 16))
    torch._dynamo.reset()

def broken_off():
    join, trace.join = trace.join, breaking
    try:
        capture_model(transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1]))
    except CaptureError:
        return
    finally:
        trace.join = join
    raise AssertionError("it was captured")

def cycles(count):
    for _ in range(count):
        opened(sys.argv[1])
        opened(transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1]))
        compiled()
        broken_off()
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
    done = run_code(USE, str(tmp_path), str(CYCLES), str(DEVICE_NBYTES))
    assert done.returncode == 0, done.stderr
    before, after = map(json.loads, done.stdout.splitlines()[-2:])
    # torch.compile leaves the sources of two graphs itself, whatever its backend.
    assert after.pop("sources") - before.pop("sources") <= 2 * CYCLES
    assert after == before
