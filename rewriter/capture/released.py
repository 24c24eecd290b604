"""Memory that torch keeps of a trace for the life of the process: released, or not taken to begin with."""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch._dynamo.config
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export import ExportedProgram
from torch.fx import graph_module
from torch.fx.experimental.symbolic_shapes import ShapeEnv


def uncached() -> AbstractContextManager[None]:
    """Let fake tensors of modes made inside compute each operator anew. With sizes that vary, torch's cache of
    operators takes 0.4 of a trace to fill and is seldom read; where all sizes are fixed, it pays."""
    return torch._dynamo.config.patch(fake_tensor_cache_enabled=False)  # type: ignore[no-any-return, attr-defined]


@contextmanager
def sources_released() -> Iterator[None]:
    """Forget the source text of the graph modules made inside: fx keeps each that it compiled, for tracebacks alone."""
    sources = graph_module._loader.eval_cache
    before = set(sources)
    try:
        yield
    finally:
        for name in set(sources) - before:
            sources.pop(name, None)
            linecache.cache.pop(name, None)


def release_symbols(program: ExportedProgram) -> None:
    """Let the symbols of an exported program go with the last graph that uses them.

    A symbolic size refers to its ShapeEnv through C++, where the garbage collector cannot follow. References back from
    there make a cycle that is never freed: the inputs that export tracks, and cached results of operators (`uncached`).
    The methods of ShapeEnv also remember their `self` in caches of their class, one of them without bound.
    """
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, FakeTensor) and value.fake_mode.shape_env is not None:
            _release(value.fake_mode)
            break
    _forget_environments()


@contextmanager
def failures_released() -> Iterator[None]:
    """The same where a trace breaks off: of the modes and programs among the variables of what was under way."""
    try:
        yield
    except BaseException as error:
        frames, told = [], error
        while told is not None:
            frames += [frame for frame, _ in traceback.walk_tb(told.__traceback__)]
            told = told.__cause__ or told.__context__  # type: ignore[assignment]
        for found in _held(list(frame.f_locals.values()) for frame in frames):
            if isinstance(found, ExportedProgram):
                release_symbols(found)
            elif found.shape_env is not None:
                _release(found)
        _forget_environments()
        raise


def _release(mode: FakeTensorMode) -> None:
    assert mode.shape_env is not None
    mode.shape_env.tracked_fakes = None


def _forget_environments() -> None:
    for method in vars(ShapeEnv).values():
        if hasattr(method, "cache_clear"):
            method.cache_clear()


def _held(values: Iterable[object], depth: int = 4) -> Iterator[ExportedProgram | FakeTensorMode]:
    """The modes and programs among some values, in collections of them, and in objects of our own."""
    for value in values:
        if isinstance(value, ExportedProgram | FakeTensorMode):
            yield value
        elif isinstance(value, FakeTensor):
            yield value.fake_mode
        elif depth and isinstance(value, list | tuple | dict):
            yield from _held(value.values() if isinstance(value, dict) else value, depth - 1)
        elif depth and type(value).__module__.startswith("forebay.") and hasattr(value, "__dict__"):
            yield from _held(list(vars(value).values()), depth - 1)
