"""Share of a decode step spent in Python between launches: `python -m benchmarks.dispatch_overhead` (Linux).

Method: a timer interrupts the computing thread every millisecond of real time, and a C signal handler notes the
program counter; afterwards each is looked up in the process's memory map. Python's own profilers and signal handlers
cannot do this, because they only run between bytecodes and so never see the inside of a call. Counted as Python: the
interpreter itself, its extension modules, ctypes with libffi, and torch's Python bindings (libtorch_python). Not
counted: the kernels, OpenMP, and whatever waits for the disk (libc). Allocator calls that Python makes into libc are
missed, torch's C++ dispatcher lies in the same library as its kernels; so the share is slightly too low on both
counts, and `libc` is printed beside.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import subprocess
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import median

import torch

import forebay
from forebay.runtime.measure.kept import cached_machine

SAMPLER = r"""
#include <csignal>
#include <cstdint>
#include <ctime>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>
static uint64_t* places; static long room; static volatile long seen; static timer_t timer;
static void note(int, siginfo_t*, void* context) {
  auto* machine = &static_cast<ucontext_t*>(context)->uc_mcontext;
#if defined(__x86_64__)
  uint64_t at = machine->gregs[REG_RIP];
#elif defined(__aarch64__)
  uint64_t at = machine->pc;
#else
#error "write down where this processor keeps its program counter"
#endif
  if (seen < room) places[seen] = at;
  seen = seen + 1;
}
extern "C" int start(uint64_t* memory, long count, long period_ns) {
  places = memory; room = count; seen = 0;
  struct sigaction action = {};
  action.sa_sigaction = note; action.sa_flags = SA_SIGINFO | SA_RESTART;
  if (sigaction(SIGPROF, &action, nullptr)) return 1;
  sigevent event = {};
  event.sigev_notify = SIGEV_THREAD_ID; event.sigev_signo = SIGPROF;
  event._sigev_un._tid = static_cast<pid_t>(syscall(SYS_gettid));
  if (timer_create(CLOCK_MONOTONIC, &event, &timer)) return 2;
  itimerspec period = {{0, period_ns}, {0, period_ns}};
  return timer_settime(timer, 0, &period, nullptr) ? 3 : 0;
}
extern "C" long stop() { timer_delete(timer); return seen; }
"""
PYTHON = ("python", "_ctypes", "libffi", "libtorch_python", "/lib-dynload/")
PERIOD_NS = 1_000_000
ROOM = 1 << 20


class Sampler:
    """Samples the thread that calls `start` until `stop`."""

    def __init__(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            source, library = Path(folder) / "sampler.cpp", Path(folder) / "sampler.so"
            source.write_text(SAMPLER)
            subprocess.run(["c++", "-O2", "-shared", "-fPIC", "-o", library, source, "-lrt"], check=True)
            self._library = ctypes.CDLL(str(library))
        self._places = (ctypes.c_uint64 * ROOM)()

    def start(self) -> None:
        code = self._library.start(self._places, ctypes.c_long(ROOM), ctypes.c_long(PERIOD_NS))
        if code:
            raise OSError(f"the sampling timer could not be started (step {code})")

    def stop(self) -> Counter[str]:
        """Samples per mapped file."""
        self._library.stop.restype = ctypes.c_long
        count = min(self._library.stop(), ROOM)
        ranges = []
        for line in Path("/proc/self/maps").read_text().splitlines():
            span, _, rest = line.partition(" ")
            low, high = (int(x, 16) for x in span.split("-"))
            parts = rest.split(maxsplit=4)
            ranges.append((low, high, parts[4] if len(parts) > 4 else "anonymous"))
        found: Counter[str] = Counter()
        for place in self._places[:count]:
            found[next((name for low, high, name in ranges if low <= place < high), "unknown")] += 1
        return found


def is_python(path: str) -> bool:
    """Whether a mapped file belongs to the interpreter or to bindings that it calls through."""
    name = path.rsplit("/", 1)[-1]
    return any(name.startswith(part) or part in name for part in PYTHON if not part.startswith("/")) or any(
        part in path for part in PYTHON if part.startswith("/"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--new", type=int, default=64, help="tokens")
    parser.add_argument("--budgets", default="900MB,300MB", help="comma-separated; the first holds all of SmolLM2")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    sampler = Sampler()
    machine = cached_machine(tempfile.gettempdir())
    for budget in args.budgets.split(","):
        with forebay.wrap(args.model, {"device": budget}, batch=args.batch, prompt=32, new_tokens=args.new,
                          machine=machine, dequantize=True) as lm:
            launches = sum(type(item).__name__ == "Launch" for item in lm.session.bound(1).program.step)
            ids = torch.randint(5, lm.captured.vocab_size, (args.batch, 32), generator=torch.Generator().manual_seed(1))
            lm.generate(ids, max_new_tokens=4, eos_token_id=None)
            times: list[float] = []

            def on_token(token: torch.Tensor, times: list[float] = times) -> None:
                if not times:
                    sampler.start()  # after the prefill
                times.append(time.perf_counter())

            lm.generate(ids, max_new_tokens=args.new, eos_token_id=None, on_token=on_token)
            found = sampler.stop()
            total = found.total()
            python = sum(n for path, n in found.items() if is_python(path))
            step_s = median(b - a for a, b in itertools.pairwise(times))
            print(f"{args.model}, batch {args.batch}, budget {budget}: step {step_s * 1e3:.1f} ms, "
                  f"{launches} launches, {lm.plan.prediction.streamed_nbytes / 1e6:.0f} MB streamed; "
                  f"Python {100 * python / total:.1f} % of {total} samples "
                  f"({1e6 * step_s * python / total / launches:.1f} us per launch)")
            for path, n in found.most_common(7):
                print(f"  {100 * n / total:5.1f} %  {path.rsplit('/', 1)[-1]}{'  (Python)' if is_python(path) else ''}")


if __name__ == "__main__":
    main()
