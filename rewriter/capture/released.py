"""What torch keeps of a trace for the life of the process, given up when the trace is read."""

from __future__ import annotations

import linecache
from collections.abc import Iterator
from contextlib import contextmanager

from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.fx import graph_module
from torch.fx.experimental.symbolic_shapes import ShapeEnv


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

    A symbolic size leads from a fake tensor through C++, where the garbage collector cannot follow, to its ShapeEnv,
    so whatever leads back from there is a cycle for ever: the inputs that export tracks, and the cached results of
    operators. The methods of ShapeEnv also remember their `self` in caches of their class, one of them without bound.
    """
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, FakeTensor) and value.fake_mode.shape_env is not None:
            value.fake_mode.cache_enabled = False  # else the passes fill it again
            value.fake_mode.shape_env.tracked_fakes = None
            value.fake_mode.shape_env.fake_tensor_cache.clear()
            break
    for method in vars(ShapeEnv).values():
        if hasattr(method, "cache_clear"):
            method.cache_clear()
