"""What C++ asks of the system fails too: each allocation of the allocator's search in turn, its stack, and each
allocation of the kernels' team of threads; a process then goes on or has an error of Python's own, and never ends by a
signal.

FOREBAY_TEST_ALL=1 (`make test-all`) fails up to 1 000 allocations of each function instead of 60.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from selection import ALL, at_length

from forebay.kernels.build import compile
from forebay.passes.allocators import native

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(compile.compiler() is None, reason="no C++ compiler")

# Allocations of C++ as `operator new` makes them, of which the one numbered `failing` (from 0) finds no memory.
SHIM = r"""
#include <cstdlib>
#include <new>
extern "C" { long failing = -1, asked = 0; }
void* operator new(std::size_t nbytes, std::align_val_t to) {
  void* found = nullptr;
  if (failing >= 0 && asked++ == failing) throw std::bad_alloc();
  if (posix_memalign(&found, std::size_t(to), nbytes ? nbytes : 1)) throw std::bad_alloc();
  return found;
}
void* operator new(std::size_t nbytes) { return operator new(nbytes, std::align_val_t(16)); }
void operator delete(void* held) noexcept { std::free(held); }
void operator delete(void* held, std::size_t) noexcept { std::free(held); }
void operator delete(void* held, std::align_val_t) noexcept { std::free(held); }
void operator delete(void* held, std::size_t, std::align_val_t) noexcept { std::free(held); }
"""
SEARCHING = """
import ctypes, random, sys
from forebay.passes.allocators import native
from forebay.passes.allocators.problem import Buffer
from forebay.passes.allocators.search import search
import numpy as np
shim, chance = ctypes.CDLL(None), random.Random(3)
failing, asked = (ctypes.c_long.in_dll(shim, name) for name in ("failing", "asked"))
starts = [chance.randrange(20) for _ in range(14)]
buffers = [Buffer("", at, at + chance.randint(1, 6), 64 * chance.randint(1, 9)) for at in starts]
library, peak = native.load(), max(sum(b.size for b in buffers if b.lower <= t < b.upper) for t in range(26))
order = np.array(sorted(range(len(buffers)), key=lambda i: starts[i]), dtype=np.int32)

def placed(call, begin):
    offsets = np.array(begin, dtype=np.int64)
    call(native.BufferColumns(buffers), offsets)
    return offsets.tolist()

stacked = np.cumsum([0, *(b.size for b in buffers)])[:-1]
uses = {
    "search": lambda: search(buffers, int(peak * 1.2), 20.0),
    "first fit": lambda: placed(lambda problem, offsets: library.forebay_first_fit(
        problem, native.pointer(order), native.FOREVER_S, native.pointer(offsets)), [-1] * len(buffers)),
    "best fit": lambda: placed(lambda problem, offsets: library.forebay_best_fit(
        problem, native.pointer(order), native.pointer(offsets)), [-1] * len(buffers)),
    "improve": lambda: placed(lambda problem, offsets: library.forebay_improve(
        problem, int(peak), 0.05, 1, native.pointer(offsets)), stacked)}
for name, use in uses.items():
    asked.value, failing.value = 0, 1 << 40
    want, count, failing.value = use(), asked.value, -1
    assert isinstance(want, list) and min(want) >= 0 and count > 0, (name, want, count)
    calls = list(range(0, count, max(1, count // int(sys.argv[1]))))[: int(sys.argv[1])]
    told = 0
    for n in calls:
        asked.value, failing.value = 0, n
        try:
            use()
        except MemoryError:
            told += 1  # else a sort did without its buffer, or a search that ends with its time came less far
        failing.value = -1
        found = use()
        assert name == "improve" or found == want, (name, n)
    assert told > len(calls) // 2, (name, told, len(calls))
    print(name, count, "allocations,", len(calls), "failed,", told, "told")
"""


def test_each_allocation_of_the_search_may_fail(tmp_path: Path) -> None:
    native.load()  # built here, without the shim
    shim = _shim(tmp_path, SHIM)
    found = subprocess.run([sys.executable, "-c", SEARCHING, str(1000 if ALL else 60)], cwd=ROOT, capture_output=True,
                           text=True, timeout=600, env=os.environ | {"LD_PRELOAD": shim})
    assert found.returncode == 0, f"{found.returncode}\n{found.stderr[-2000:]}"
    print("\n" + found.stdout)
    assert found.stdout.count("told") == 4


LOOPS = """
import ctypes, os, torch
from forebay.kernels.cpu_support import native
from tests.kernels.cpu_support.team_calls import calls
torch.set_num_threads(4)
shim, (steps, made) = ctypes.CDLL(None), calls(2)
native.scratch(1 << 14)  # torch's own
failing, asked = (ctypes.c_long.in_dll(shim, name) for name in ("failing", "asked"))
chain = native.chained(steps)

def loops(n):  # torch's own allocations are not meant
    asked.value, failing.value = 0, n
    for step in chain:
        step()
    failing.value = -1
    return asked.value

def forked(use, n=-1):  # the allocation `n` of the fork itself fails
    asked.value, failing.value = 0, n
    child = os.fork()
    failing.value = -1
    if child == 0:
        os._exit(use())
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def failed(n):  # in the first loops of a process, and in those of one that it forks
    loops(n)
    found = [tensor.clone() for tensor in made]
    for tensor in made:
        tensor.fill_(torch.nan)
    inner = [forked(lambda: (loops(n), not all(map(torch.equal, made, found)))[1], at) for at in (-1, 0)]
    return any(inner) or any(tensor.isnan().any() for tensor in found)

count = forked(lambda: loops(1 << 40))
found = [forked(lambda: failed(n)) for n in range(count)]
assert 3 <= count < 200 and not any(found), (count, found)
print(count, "allocations of the team failed")
"""


def test_each_allocation_of_the_team_may_fail(tmp_path: Path) -> None:
    """Before any loop, of each of three threads, and in a process that is forked."""
    found = subprocess.run([sys.executable, "-c", LOOPS], cwd=ROOT, capture_output=True, text=True, timeout=300,
                           env=os.environ | {"LD_PRELOAD": _shim(tmp_path, SHIM)})
    assert found.returncode == 0, f"{found.returncode}\n{found.stderr[-2000:]}"
    print("\n" + found.stdout)


def _shim(folder: Path, text: str) -> str:
    (folder / "shim.cpp").write_text(text)
    made = folder / "shim.so"
    subprocess.run([*shlex.split(str(compile.compiler())), "-std=c++17", "-shared", "-fPIC", "-o", made,
                    folder / "shim.cpp"], check=True)
    return str(made)


DEEP = """
import threading
from forebay.passes.allocators.problem import Buffer
from forebay.passes.allocators.search import Verdict, search
# A staircase whose buffers are placed one by one, a level of the recursion each.
buffers = [Buffer("", i, i + 2, 64 + 64 * (i % 7)) for i in range(3000)]
peak = max(buffers[i].size + buffers[i + 1].size for i in range(2999))
def run():
    found = search(buffers, peak, 5.0)
    print("placed" if isinstance(found, list) else found.name, flush=True)
thread = threading.Thread(target=run)
run()
thread.start(); thread.join()
"""


@pytest.mark.parametrize("limit", [at_length("256"), "8192"])
def test_the_search_keeps_to_its_threads_stack(limit: str) -> None:
    """Of whatever size the shell lets it be: a search that would need more is given up."""
    native.load()
    found = subprocess.run(["sh", "-c", f'ulimit -s {limit}; exec "$0" -c "$1"', sys.executable, DEEP], cwd=ROOT,
                           capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, f"{found.returncode}\n{found.stderr[-2000:]}"
    assert set(found.stdout.split()) <= {"placed", "UNDECIDED"} and len(found.stdout.split()) == 2, found.stdout
