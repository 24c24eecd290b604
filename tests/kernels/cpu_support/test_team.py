"""The threads that kernels share their loops with: same results by any number, from several callers, after a fork."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from selection import at_length

from forebay.kernels.build import compile
from forebay.kernels.cpu_support import native
from tests.kernels.cpu_support.team_calls import calls, run

pytestmark = pytest.mark.skipif(compile.compiler() is None, reason="no C++ compiler")


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_any_number_of_threads_gives_the_same_bits() -> None:
    steps, made = calls(0)
    torch.set_num_threads(1)
    want = run(steps, made)
    assert not any(tensor.isnan().any() for tensor in want)
    for count in (2, 5, 3, 1, 2):
        torch.set_num_threads(count)
        for _ in range(20):
            assert all(map(torch.equal, run(steps, made), want))
        native.rest()


def test_callers_at_once_do_not_meet() -> None:
    """One has the team, the others work alone."""
    torch.set_num_threads(3)
    cases = [calls(seed) for seed in range(4)]
    want = [run(*case) for case in cases]
    wrong: list[int] = []

    def repeat(i: int) -> None:
        torch.set_num_threads(3)
        if not all(all(map(torch.equal, run(*cases[i]), want[i])) for _ in range(50)):
            wrong.append(i)

    callers = [threading.Thread(target=repeat, args=(i,)) for i in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


FORKING = """
import os, torch
from tests.kernels.cpu_support.team_calls import calls, run
torch.set_num_threads(2)
steps, made = calls(1)
want = run(steps, made)
child = os.fork()
if child == 0:
    os._exit(0 if all(map(torch.equal, run(steps, made), want)) else 1)
assert os.waitpid(child, 0)[1] == 0
assert all(map(torch.equal, run(steps, made), want))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_has_a_team_of_its_own(request: pytest.FixtureRequest) -> None:
    """Threads do not cross a fork; waiting for the parent's would never end."""
    subprocess.run([sys.executable, "-c", FORKING], cwd=request.config.rootpath, check=True, timeout=120)


SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
int allowed = 1 << 30, asked = 0;  /* threads that may still be started; those that were asked for */
size_t stack = 0;                  /* of the last */
int pthread_create(pthread_t* thread, const pthread_attr_t* how, void* (*run)(void*), void* given) {
  static int (*real)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  if (!real) real = dlsym(RTLD_NEXT, "pthread_create");
  asked++;
  if (how) pthread_attr_getstacksize(how, &stack);
  return allowed-- > 0 ? real(thread, how, run, given) : EAGAIN;
}
"""
WITHOUT_THREADS = """
import ctypes, sys, torch
from tests.kernels.cpu_support.team_calls import calls, run
shim = ctypes.CDLL(None)
allowed, asked = ctypes.c_int.in_dll(shim, "allowed"), ctypes.c_int.in_dll(shim, "asked")
torch.set_num_threads(1)
steps, made = calls(1)
want = run(steps, made)
torch.set_num_threads(6)
torch.randn(512, 512) @ torch.randn(512, 512)  # torch's own pool
asked.value, allowed.value = 0, int(sys.argv[1])
for _ in range(20):
    assert all(map(torch.equal, run(steps, made), want))
assert asked.value == min(5, int(sys.argv[1]) + 1), asked.value  # the one that failed is not tried again
assert ctypes.c_size_t.in_dll(shim, "stack").value == 1 << 20
"""


def shim(folder: Path, code: str) -> dict[str, str]:
    """The environment of a process in which the functions of `code` stand before the C library's."""
    (folder / "shim.c").write_text(code)
    build = [*shlex.split(str(compile.compiler())), "-x", "c", "-shared", "-fPIC", "-o", folder / "shim.so",
             folder / "shim.c", "-ldl"]
    subprocess.run(build, check=True)
    return os.environ | {"LD_PRELOAD": str(folder / "shim.so")}


@pytest.mark.parametrize("allowed", [0, at_length(1), 3, at_length(9)])
def test_threads_that_cannot_be_started_are_done_without(
    tmp_path: Path, request: pytest.FixtureRequest, allowed: int
) -> None:
    """Also: their stacks are of the size that kernels need, whatever the shell's limit is."""
    found = subprocess.run(
        ["sh", "-c", f'ulimit -s 256; exec "$0" -c "$1" {allowed}', sys.executable, WITHOUT_THREADS],
        cwd=request.config.rootpath, env=shim(tmp_path, SHIM), timeout=120)
    assert found.returncode == 0


CROWDED = r"""
#define _GNU_SOURCE
#include <sched.h>
#include <stdatomic.h>
int at = 0;                             /* the processor that every thread is told to be on; -1: it is not known */
int alone = 0;                          /* whether no other may be used */
atomic_int left, came_back, otherwise;  /* masks that were set: all but that processor, those before, any other */
int sched_getcpu(void) { return at; }
int sched_getaffinity(int pid, size_t size, cpu_set_t* mask) {
  CPU_ZERO(mask);
  CPU_SET(0, mask);
  if (!alone) CPU_SET(5, mask);
  return 0;
}
int sched_setaffinity(int pid, size_t size, const cpu_set_t* mask) {
  if (pid == 0 && CPU_COUNT(mask) == 1 && CPU_ISSET(5, mask)) left++;
  else if (pid == 0 && CPU_COUNT(mask) == 2 && CPU_ISSET(0, mask) && CPU_ISSET(5, mask)) came_back++;
  else otherwise++;
  return 0;
}
"""
ON_ONE_PROCESSOR = """
import ctypes, time, torch
from tests.kernels.cpu_support.team_calls import calls, run
shim = ctypes.CDLL(None)
names = ("at", "alone", "left", "came_back", "otherwise")
at, alone, left, came_back, otherwise = (ctypes.c_int.in_dll(shim, name) for name in names)
torch.set_num_threads(2)
steps, made = calls(1)
end = time.monotonic() + 60
while not came_back.value and time.monotonic() < end:
    run(steps, made)
assert left.value == came_back.value > 0 == otherwise.value, (left.value, came_back.value, otherwise.value)
for at.value, alone.value in ((0, 1), (-1, 0)):
    time.sleep(0.01)
    before = left.value, came_back.value, otherwise.value
    for _ in range(200):
        run(steps, made)
    assert (left.value, came_back.value, otherwise.value) == before, at.value
"""


@pytest.mark.skipif(sys.platform != "linux", reason="affinities are Linux's")
def test_threads_on_one_processor_part(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """One leaves, and may be everywhere again at once; where it may be nowhere else it stays."""
    subprocess.run([sys.executable, "-c", ON_ONE_PROCESSOR], cwd=request.config.rootpath, env=shim(tmp_path, CROWDED),
                   check=True, timeout=120)
