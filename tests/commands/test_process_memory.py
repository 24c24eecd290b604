"""What drawing tokens takes is what the promise of a budget counts for it."""

from __future__ import annotations

import pytest
from forked import run_code

from forebay.commands.process_memory import beside_nbytes

# In processes of their own, whose peak begins where they do: what a draw from each vocabulary adds to what is resident.
# Each block of memory is a mapping of small pages, so freed memory is returned at once and no peak is rounded.
DRAWING = """
import ctypes, os, sys, torch
from forebay.runtime.run.sampling import Sampling, choose

rows, each, top_k = int(sys.argv[1]), sys.argv[2] == "each", int(sys.argv[3])
sampling = Sampling(True, 0.7, top_k, 0.9)
torch.set_num_threads(1)
PR_SET_THP_DISABLE, M_MMAP_THRESHOLD = 41, -3
libc = ctypes.CDLL(None)
assert libc.prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0 and libc.mallopt(M_MMAP_THRESHOLD, 1 << 16) == 1

def held(name):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(name))

def drawn(words):
    logits, generators = torch.randn(rows, words), [torch.Generator().manual_seed(i) for i in range(rows)]
    before = held("VmRSS:")
    choose(logits, sampling, generators if each else generators[0])
    return held("VmHWM:") - before

def forked(words):
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, str(drawn(words)).encode())
        os._exit(0)
    os.waitpid(child, 0)
    return int(os.read(reading, 100))

drawn(100)  # what is made at the first call
print(forked(int(sys.argv[4])), forked(int(sys.argv[5])))
"""
FEW, MANY = 100_000, 400_000
SEEN_NBYTES = {"each": 40, "together": 24}  # a word; the promise has room for slack of the heap


@pytest.mark.parametrize("top_k", [0, 50])
@pytest.mark.parametrize(("rows", "how"), [(1, "each"), (4, "each"), (4, "together")])
def test_draws_take_what_is_promised(rows: int, how: str, top_k: int) -> None:
    """The difference of two vocabularies, without what is taken once."""
    done = run_code(DRAWING, *map(str, (rows, how, top_k, FEW, MANY)))
    assert done.returncode == 0, done.stderr
    few, many = map(int, done.stdout.split())
    promised = beside_nbytes(0, drawn_from=MANY) - beside_nbytes(0, drawn_from=FEW)
    print(f"\n{rows} rows {how}: {(many - few) / (MANY - FEW):.0f} bytes a word of {promised / (MANY - FEW):.0f}")
    assert 0.8 * SEEN_NBYTES[how] * (MANY - FEW) < many - few <= promised
