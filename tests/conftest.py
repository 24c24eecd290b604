"""Shared by all tests: the helper modules beside this file, and two tiny checkpoints with their reference answers."""

from __future__ import annotations

import functools
import gc
import logging
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from selection import (
    ALL,
    DURATIONS,
    KINDS,
    Durations,
    checks_graphs,
    kind_of,
    longest_first,
    mark_uncovered,
    refuse_parts,
)

from forebay.commands import terminal

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a mistaken name is not asked for
os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton's own functions look at it when they are imported

TESTS = Path(__file__).parent
ONE_THREAD = tuple(TESTS / name for name in ("e2e", "exported", "huggingface", "runtime/run"))  # tiny models are run
SEVERAL_THREADS = tuple(TESTS / f"e2e/{name}.py" for name in (  # of those: races are looked for, or memory is counted
    "test_block_schedules", "test_block_traffic", "test_hidden_states", "test_memory_budget", "test_speculative"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-durations", action="store_true", help="note what each file took in tests/durations.json")


def pytest_configure(config: pytest.Config) -> None:
    """Hear SIGINT though a shell that starts the suite in the background ignores it: children would inherit that. Keep
    pytest-xdist to the order of files that is found here; its own is by their numbers of tests. Collect rarely."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    terminal.PATIENCE_S = 1e6  # what a slow machine is told is in no expected output
    gc.set_threshold(10_000, 20, 50)  # else collections took 4 of 20 s of test_plan_is_obeyed; files end with one
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False
    for kind, meaning in KINDS.items():
        config.addinivalue_line("markers", f"{kind}: {meaning}")
    config.addinivalue_line("markers", "covering(strength): make test runs some of its cases (tests/selection.py)")
    if config.option.write_durations and not hasattr(config, "workerinput"):
        refuse_parts(config.option, config.args)
        config.pluginmanager.register(Durations(DURATIONS))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test with its kind, unless it has one itself, and the cases that only `make test-all` runs; order the
    longest files first."""
    for item in items:
        if not {mark.name for mark in item.iter_markers()} & (KINDS.keys() - {"all"}):
            item.add_marker(kind_of(item.path))
    mark_uncovered(items)
    longest_first(items)


@pytest.fixture(scope="module", autouse=True)
def collections_see_one_file() -> Iterator[None]:
    """What a file leaves alive (modules, what tests share) is not looked through again by the collections of those that
    come after it, of which one follows many a model that is closed: they took 8 % of the suite's time."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def collections_are_rare() -> Iterator[None]:
    """Where tests share graphs, a collection looks through all of these: such as follow a closed model took 5 to 10 %
    of the time of tests that open one after another."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("forebay.rewriter.garbage.DUE", 1_000_000)
        yield


@pytest.fixture(scope="module", autouse=True)
def graphs_are_checked(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test of passes puts through them, each must leave sound graphs; in make test-all, whatever any test
    does."""
    import forebay.rewriter.pipeline.run_passes as run_passes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_passes, "ALWAYS_CHECK", ALL or checks_graphs(request.path))
        yield


@pytest.fixture(scope="module", autouse=True)
def one_thread_where_models_are_tiny(request: pytest.FixtureRequest) -> Iterator[None]:
    """Operators of tiny models take more time for waking threads than they compute: with two of each of two workers on
    two cores they take 10 to 30 % more processor time. Files that look for races keep all, and so do kernels."""
    import torch

    before = torch.get_num_threads()
    tiny = any(request.path.is_relative_to(each) for each in ONE_THREAD) and request.path not in SEVERAL_THREADS
    if not tiny or ALL:
        yield
        return
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", autouse=True)
def graphs_are_shared(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests that run models share what is captured of equal ones: that took a third of the suite's time."""
    from captured_once import share_graphs, share_layers, shares_graphs, shares_layers

    with pytest.MonkeyPatch.context() as patch:
        if shares_graphs(request.path):
            share_graphs(patch)
        elif shares_layers(request.path):
            share_layers(patch)
        yield


@pytest.fixture
def planned_with_our_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans that are looked at, not run, are those of a machine with a compiler and two threads: what torch's operators
    would take in place of our kernels, or these with more threads, moves bounds that tests are about."""
    from forebay.kernels.cpu_support import native

    monkeypatch.setattr(native, "load", lambda: object())
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)


@pytest.fixture(scope="session", autouse=True)
def traces_are_not_kept() -> Iterator[None]:
    """pytest hears loggers that do not propagate too; for the one of traces torch then words every step of a capture,
    which took a tenth of its time."""
    trace = logging.getLogger("torch.__trace")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace, "handlers", [])
        patch.setattr(trace, "addHandler", lambda handler: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def plans_are_not_kept() -> Iterator[None]:
    """Each test plans anew, for a test that replaces a part of the planner would find the plan of another."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("forebay.model_planner.plan_key", lambda *_: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def commands_are_made_once() -> Iterator[None]:
    """A runner of commands makes all 19 of them anew for each call, which took a fifth of the time of such tests. They
    are made again for another table of options."""
    import typer.testing

    from forebay.rewriter.planning.options import OPTIONS

    make, made = typer.testing._get_command, dict[Any, Any]()

    def known(app: Any) -> Any:
        key = (id(app), *OPTIONS)
        if key not in made:
            made[key] = (make(app), app)
        return made[key][0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.testing, "_get_command", known)
        yield


@pytest.fixture(scope="session", autouse=True)
def one_profile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One profile of the machine for the whole run, whoever keeps the cores busy: commands measure none, which takes
    half a minute each time that one was measured poorly. What takes long to make is the kept cache folder's."""
    from forebay.kernels.build.cache_folder import make_cache_folder

    kept, folder = make_cache_folder(), tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        _link_cache(kept, folder, patch)
        for name in ("models", "verified"):
            (kept / name).mkdir(exist_ok=True)
            (folder / name).symlink_to(kept / name)
        yield


def _link_cache(kept: Path, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Make `folder` the cache, with the compiled code of `kept` and a profile for its disk and the one of `kept`."""
    import torch

    from forebay.kernels.cpu_support import native
    from forebay.passes.allocators.native import load
    from forebay.rewriter.machine.profile import Machine, save_machine
    from forebay.runtime.measure.kept import machine_cache_path

    native.load()
    load()
    for file in (f for f in kept.iterdir() if f.suffix in (".so", ".o")):
        (folder / file.name).symlink_to(file)
    patch.setenv("FOREBAY_CACHE", str(folder))
    before = torch.get_num_threads()
    for threads in {before, 1}:  # for any file's (`ONE_THREAD`)
        torch.set_num_threads(threads)
        for disk in (folder, kept):
            save_machine(Machine.default(), machine_cache_path(disk))
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Checkpointed:
    """A random-weight model saved in `folder`, and transformers' greedy answer to prompts of unequal length."""

    model: Any
    folder: Path
    ids: Any  # [3, 10] int64
    mask: Any  # [3, 10], left-padded
    expected: Any  # [3, 18]
    nbytes: int  # of the weights, a tied one once

    @functools.cached_property
    def opened(self) -> tuple:
        """Captured graphs, checkpoint and files: traced and rewritten once per process."""
        from opened import open_rewritten

        return open_rewritten(self.folder)

    def captured_anew(self) -> Checkpointed:
        """The same with graphs that are not rewritten yet, for what is about those passes."""
        from forebay.open_model import open_model

        made = replace(self)
        vars(made)["opened"] = open_model(self.folder)
        return made

    def share(self, part: float, workload: Any = None, options: Any = None, host: int = 0) -> int:
        """Bytes of a budget: such a share of the weights, beside what operators take here (`operators_nbytes`)."""
        from budgets import operators_nbytes

        from forebay.rewriter.ir.plan import Workload

        return int(part * self.nbytes) + operators_nbytes(self.opened, workload or Workload(3, 10, 8), options, host)

    def language_model(self, device: int | float, host: int = 0, batch: int = 3, prompt: int = 10, new_tokens: int = 8,
                       **options: Any) -> Any:
        """A LanguageModel on a budget of so many bytes, or such a share of the weights (`share`)."""
        from forebay.language_model import LanguageModel
        from forebay.rewriter.ir.plan import Budget, Workload
        from forebay.rewriter.planning.options import Options

        workload, wanted = Workload(batch, prompt, new_tokens), Options(**options)
        nbytes = device if isinstance(device, int) else self.share(device, workload, wanted, host)
        return LanguageModel(*self.opened, Budget(nbytes, host), workload, wanted)


def _checkpointed(config: Any, folder: Path) -> Checkpointed:
    import torch
    import transformers

    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(folder)
    ids = torch.randint(3, config.vocab_size, (3, 10), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :4], mask[1, :7] = 0, 0
    with torch.no_grad():
        expected = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0,
                                  eos_token_id=None)
    return Checkpointed(model, folder, ids, mask, expected, sum(p.numel() * 4 for p in model.parameters()))


@pytest.fixture(scope="session")
def llama_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpointed:
    """Three layers (no multiple of two slots), an untied head."""
    from families import llama

    config = llama(3, hidden_size=96, intermediate_size=256, vocab_size=997, tie_word_embeddings=False)
    return _checkpointed(config, tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def tied_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpointed:
    """GPT-2: the head is the embedding, matrices are stored [in, out], positions are a table."""
    from families import gpt2

    return _checkpointed(gpt2(2, n_embd=96, vocab_size=997), tmp_path_factory.mktemp("gpt2"))


@pytest.fixture
def reader_log(monkeypatch: pytest.MonkeyPatch) -> ReaderLog:
    """What every reader that a device opens from here on is asked for."""
    import forebay.runtime.devices.open_device as module

    log = ReaderLog()
    opened = module.open_reader
    monkeypatch.setattr(module, "open_reader", lambda *a, **k: _LoggedReader(opened(*a, **k), log))
    return log


class ReaderLog:
    """Bytes of fixed slices and of looked-up rows that were asked for."""

    def __init__(self) -> None:
        self.slices, self.rows, self.reads = 0, 0, 0


class _LoggedReader:
    def __init__(self, reader: Any, log: ReaderLog) -> None:
        self.reader, self.log = reader, log

    def prepare(self, read: Any) -> Callable[[], None]:
        queue = self.reader.prepare(read)

        def logged() -> None:
            self.log.slices += read.nbytes
            self.log.reads += 1
            queue()

        return logged

    def submit(self, read: Any) -> None:
        self.prepare(read)()

    def read_rows(self, path: str, offset: int, row_nbytes: int, rows: Any, address: int, on_done: Callable) -> None:
        self.log.rows += row_nbytes * len(rows)
        self.reader.read_rows(path, offset, row_nbytes, rows, address, on_done)

    def fault(self) -> BaseException | None:
        return self.reader.fault()

    def close(self) -> None:
        self.reader.close()


@pytest.fixture(scope="session")
def demo_folder() -> Path:
    """The packaged model in float32; skips where it is not installed."""
    from forebay.rewriter.checkpoints.records import CheckpointError
    from forebay.rewriter.checkpoints.resolve import resolve_model

    try:
        return resolve_model("demo", dequantize=True)
    except CheckpointError as error:
        pytest.skip(f"needs the packaged model: {error}")


@pytest.fixture
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own, in which the compiled kernels and a profile of the machine lie already."""
    from forebay.kernels.build.cache_folder import make_cache_folder

    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    _link_cache(make_cache_folder(), folder, monkeypatch)
    return folder
