"""`torch.compile(model, backend="forebay", options={"budget": …})`: any module, its weights streamed from disk.

A graph's parameters and buffers move to a nameless file when it first runs, and stay usable: the module's tensors
become views of that file, which take no memory unless eager code reads them. They move also when all of them fit the
budget: the arena holds them then, and a second copy would double their memory. `restore` brings them back. What is
written to them in place, by whatever means, is seen by the next call (`parameter_store.changes`); on a file system that
does not tell of writes to mapped files (tmpfs) each call therefore reads the resident weights again.

One plan and Program is made per set of input sizes and kept; memory is held for one at a time, because each may take
the whole budget. Compile a model that is called with many sizes in turn once per size, with a budget each, and give
each model an `options` object of its own: what was compiled with one object shares one budget. Memory and file go when
no tensor of the file is left, or by `restore`.
"""

from __future__ import annotations

import _thread
import contextlib
import errno
import hashlib
import re
import tempfile
import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import fx, nn
from torch._dynamo.convert_frame import compile_lock

from forebay.compiled.left_to_python import watch
from forebay.compiled.options import CompileOptions, parse_options
from forebay.compiled.parameter_store import StoreMap, bring_back, map_of, move_out
from forebay.compiled.report import is_offloaded, note_reason, offload_report
from forebay.compiled.step_memory import Memory, Prepared
from forebay.rewriter.capture.compiled_module import (
    ModuleGraph,
    OffloadError,
    Scalar,
    capture_module,
    is_plain,
    refuse_tensor,
)
from forebay.rewriter.capture.released import sources_released
from forebay.rewriter.capture.step_graphs import StepGraphs
from forebay.rewriter.checkpoints.records import CheckpointError
from forebay.rewriter.ir.byte_sizes import format_nbytes
from forebay.rewriter.ir.plan import Budget, PlanError, Workload
from forebay.rewriter.ir.program import FileSlice
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.pipeline.run_passes import StoppedAfter
from forebay.rewriter.pipeline.step_pipeline import Pipeline
from forebay.rewriter.planning.options import Options
from forebay.rewriter.planning.planner import make_plan, refuse_forced, smallest_budget
from forebay.rewriter.switches import SwitchError, read_switches
from forebay.rewriter.verify.bisect import PassChangedResult
from forebay.rewriter.verify.graph import GraphError

__all__ = ["forebay_backend", "is_offloaded", "offload_report", "prepared_for", "restore"]
KEPT = 4  # plans per graph, for as many sets of input sizes
REFUSED = 64  # sets of input sizes per graph that are known to run eagerly; of more, the oldest are tried again
ONCE = Workload(batch=1, prompt=1, new_tokens=1)  # a module's call is one step
DELIBERATE = (StoppedAfter, PassChangedResult, GraphError, SwitchError)  # FOREBAY_ switches that end a run on purpose
SHORTAGES = (errno.ENOMEM, errno.EAGAIN, errno.EMFILE, errno.ENFILE)  # of what opening takes; eager needs none of it


def forebay_backend(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> OffloadedGraph:
    """The backend: registered under the entry point group `torch_dynamo_backends`, called by torch.compile.

    Raises ValueError for an unknown option, or a `mode`, which is Inductor's. What cannot be offloaded shows when the
    graph first runs: a RuntimeWarning that names the reason and an eager run, or with `strict` OffloadError, PlanError
    (a budget that cannot work, with the smallest that can) or CheckpointError (a disk that is full).
    """
    if mode is not None:
        raise ValueError(f"mode={mode!r} is for torch's own compiler; this backend takes options={{'budget': …}} alone")
    return OffloadedGraph(gm, _weight_names(gm, example_inputs), parse_options(options), _memory_of(options))


watch(forebay_backend)  # torch.compile imports this file when the backend is asked for


def restore(module: nn.Module) -> None:
    """Bring a module's parameters and buffers back into memory, once steps of other threads that read them have ended;
    the next call of its compiled form moves them again. RuntimeError in an operator of such a step."""
    maps = _maps_of(module)
    with contextlib.ExitStack() as locks:
        for memory in sorted({graph.memory for graph in _graphs if _prepared_of(graph, maps)}, key=id):
            locks.enter_context(memory.lock)
            if memory.running:
                raise RuntimeError("restore: an operator of a step that reads these weights has called it; call it "
                                   "after the step")
        left = bring_back([*module.parameters(), *module.buffers()])
        for memory in list(_memories.values()):
            memory.close_if_using(left)


def prepared_for(module: nn.Module) -> list[Prepared]:
    """The plans and Programs kept for graphs that read this module's weights, one per set of input sizes."""
    maps = _maps_of(module)
    return [p for graph in _graphs for p in _prepared_of(graph, maps)]


def _maps_of(module: nn.Module) -> set[int]:
    """The ids of the maps that hold a module's parameters and buffers."""
    return {id(m) for t in (*module.parameters(), *module.buffers()) if (m := map_of(t)) is not None}


def _prepared_of(graph: OffloadedGraph, maps: set[int]) -> list[Prepared]:
    return [p for p in list(graph.prepared.values()) if maps & {id(m) for m in p.maps}]


_graphs: weakref.WeakSet[OffloadedGraph] = weakref.WeakSet()
_memories: weakref.WeakValueDictionary[int, Memory] = weakref.WeakValueDictionary()


def _memory_of(options: object) -> Memory:
    """All graphs of one torch.compile share its `options` object, and with it one budget."""
    found = _memories.get(id(options))
    if found is None:
        found = _memories[id(options)] = Memory(options)
    return found


class OffloadedGraph:
    """One graph of torch.compile, called with its parameters and inputs."""

    def __init__(self, gm: fx.GraphModule, weights: Mapping[int, str], options: CompileOptions, memory: Memory) -> None:
        self.gm, self.weights, self.options, self.memory = gm, weights, options, memory
        self.switches = read_switches()
        self.machine = cast("Machine | None", options.planned.machine) or Machine.default()
        self.differentiable = _wants_gradients(gm)
        self.scalars = [i for i, n in enumerate(gm.graph.find_nodes(op="placeholder")) if _read_as_number(n)]
        self.prepared: OrderedDict[object, Prepared] = OrderedDict()
        self.refused: OrderedDict[object, str] = OrderedDict()  # reasons
        self._watched: weakref.WeakSet[StoreMap] = weakref.WeakSet()
        _graphs.add(self)

    def __call__(self, *given: Any) -> Sequence[Any]:
        if not self.weights:
            return self.gm(*given)  # nothing to offload
        args = list(given)
        for i in self.scalars:
            args[i] = Scalar(args[i].item())
        with self.memory.lock:
            if self.memory.running:
                self._refuse(OffloadError("an operator of a step that runs in the same budget has called it; give it "
                                          "an `options` object of its own"), args)
                return self.gm(*given)
            plain = all(map(is_plain, args))
            # what a capture depends on, and whether it succeeds
            call = (_sizes(args), _aliases(args)) if plain else tuple(map(_kind, args))
            if (call, _autocast()) in self.refused:
                return self.gm(*given)
            try:
                prepared = self._prepared(call, args)
            except DELIBERATE:
                raise
            except Exception as error:
                if not _passes(error):
                    self.refused[call, _autocast()] = str(error)
                    while len(self.refused) > REFUSED:
                        self.refused.popitem(last=False)
                self._refuse(error, args)
                return self.gm(*given)
            self._warn_of_turns(prepared)
            try:
                self.memory.ready(prepared)
            except Exception as error:
                if isinstance(error, DELIBERATE) or (isinstance(error, OSError) and error.errno not in SHORTAGES):
                    raise  # eager would read the weights from the same file
                self._refuse(error, args)
                return self.gm(*given)
            return self.memory.run(args)

    def _prepared(self, call: object, args: Sequence[Any]) -> Prepared:
        """Return the prepared call for these weights, made once and kept."""
        for i, arg in enumerate(args):
            refuse_tensor(arg, self.weights, i)
        prepared = self.prepared.get((call, self._slots(args)))
        if prepared is None or prepared.lost:
            with torch.random.fork_rng(devices=[]):  # tracing and trials draw numbers that are the run's to draw
                prepared = self._prepare(args)
            self.prepared[call, self._slots(args)] = prepared  # the weights have moved
            while len(self.prepared) > KEPT:
                self.prepared.popitem(last=False)
        self.prepared.move_to_end((call, self._slots(args)))
        return prepared

    def _slots(self, args: Sequence[Any]) -> tuple[int, ...]:
        """Return which weights these are: none that is on disk has the address of another."""
        return tuple(args[i].data_ptr() for i in self.weights)

    def drop_lost(self) -> None:
        """Let go of what was prepared for weights that are gone, and of its memory."""
        with self.memory.lock:
            for key in [key for key, prepared in self.prepared.items() if prepared.lost]:
                del self.prepared[key]
            if self.memory.holds is not None and self.memory.holds.lost:
                self.memory.close()

    def _watch(self, maps: Sequence[StoreMap]) -> None:
        """Call `drop_lost` once no tensor uses one of these files. In a thread of its own, started by one that holds no
        lock: the garbage collector may come in any thread at any time, also in one that closing waits for."""
        for held in maps:
            if held not in self._watched:
                self._watched.add(held)
                closing = threading.Thread(target=_drop_lost, args=(weakref.ref(self),), daemon=False)
                weakref.finalize(held, _thread.start_new_thread, closing.start, ()).atexit = False

    @sources_released()
    def _prepare(self, args: Sequence[Any]) -> Prepared:
        """Capture, plan, move the weights to disk, lower and prove. Nothing has moved when this raises."""
        if self.differentiable:
            raise OffloadError("its results need gradients; call it under torch.no_grad() or torch.inference_mode()")
        if _autocast():
            raise OffloadError("autocast is enabled; cast the module itself instead")
        self._refuse_devices(args)
        with compile_lock:  # tracing patches what Dynamo's does, in another thread perhaps
            captured = capture_module(self.gm, args, self.weights)
        files: dict[str, FileSlice] = {}
        source = StepGraphs(_fingerprint(captured), lambda _: captured.flat(), files, captured.constants,
                        self.machine.host_hop)
        pipeline = Pipeline(source, ONCE, self.machine, self.switches)
        budget, options = self.options.budget, self.options.planned
        try:
            make_plan(pipeline.needs, budget, ONCE, options, self.machine.name)
        except PlanError as error:
            inputs = [arg for i, arg in enumerate(args) if i not in self.weights]
            raise _explained(error, pipeline, budget, options, inputs) from None
        move = move_out([args[i] for i in self.weights], budget.disk or tempfile.gettempdir())
        files.update(zip(self.weights.values(), move.files(), strict=True))
        plan = pipeline.plan(budget, options)
        program = pipeline.program(plan, 1)
        move.commit()
        self._watch(move.maps())
        return Prepared(captured, plan, program, files, tuple(map(weakref.ref, move.maps())), self.machine,
                        self.switches)

    def _refuse_devices(self, args: Sequence[Any]) -> None:
        for i, arg in enumerate(args):
            if not isinstance(arg, torch.Tensor) or arg.is_cpu:
                continue
            raise OffloadError(f"{self.weights.get(i, f'input {i}')} is on {arg.device}; keep module and inputs on the "
                               "CPU: what is needed moves to the device by itself")

    def _refuse(self, error: Exception, args: Sequence[Any]) -> None:
        """Say why this graph is not offloaded: by a warning, or with `strict` by raising."""
        expected = isinstance(error, OffloadError | PlanError | CheckpointError)
        reason = str(error) if expected else f"{type(error).__name__}: {error}"
        note_reason((args[i] for i in self.weights), reason)
        if self.options.strict:
            if expected:
                raise error
            raise OffloadError(f"this graph cannot be offloaded: {reason}") from error
        warnings.warn(f"forebay: this graph is not offloaded and runs eagerly, outside the budget: {reason}"
                      f"{' (the next call tries again)' if _passes(error) else ''}", RuntimeWarning, stacklevel=3)

    def _warn_of_turns(self, prepared: Prepared) -> None:
        """Graphs with other weights take turns: each turn reads its resident weights anew."""
        before = self.memory.holds
        if before is None or before is prepared or before.lost:
            return
        ours = any(before is other for other in self.prepared.values())  # a parameter of this graph was replaced
        if before.files != prepared.files and not (ours and set(before.files.values()) & set(prepared.files.values())):
            warnings.warn("forebay: graphs with different weights were compiled with one `options` object, so they "
                          "take turns in its budget and read their resident weights again at every turn. That suits "
                          "the parts of a pipeline. Else give each model an object of its own, or see where graph "
                          "breaks split a model (TORCH_LOGS=graph_breaks)", RuntimeWarning, stacklevel=3)


def _drop_lost(graph: weakref.ref[OffloadedGraph]) -> None:
    found = graph()
    if found is not None:
        found.drop_lost()


def _weight_names(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> dict[int, str]:
    """Positions and names of the arguments that are parameters or buffers, told by where Dynamo found them."""
    names: dict[int, str] = {}
    for i, (node, example) in enumerate(zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=True)):
        found = getattr(getattr(node.meta.get("grapharg"), "source", None), "name", "")
        where = str(found() if callable(found) else found)  # a method in earlier releases of torch
        path = re.findall(r"_(?:modules|parameters|buffers)\['([^']*)'\]", where)
        if isinstance(example, torch.Tensor) and (isinstance(example, nn.Parameter) or "._buffers[" in where):
            name = ".".join(path) or str(node.target)
            names[i] = name if name not in names.values() else f"{name}:{i}"
    return names


def _wants_gradients(gm: fx.GraphModule) -> bool:
    """Return whether Dynamo saw a result that needs gradients; a recompilation follows when the grad mode changes."""
    results = [n.meta.get("example_value") for n in gm.graph.output_node().all_input_nodes]
    recorded = torch.is_grad_enabled() or any(n.args == (True,) for n in gm.graph.find_nodes(
        op="call_function", target=torch._C._set_grad_enabled))
    return recorded and any(isinstance(v, torch.Tensor) and v.requires_grad for v in results)


def _read_as_number(node: fx.Node) -> bool:
    return bool(node.users) and all(u.op == "call_method" and u.target == "item" for u in node.users)


def _passes(error: Exception) -> bool:
    """Return whether another call may succeed: memory, disk and handles come back, what a graph is does not change."""
    return isinstance(error, OSError | MemoryError | CheckpointError) or "allocate" in str(error)


def _kind(arg: object) -> object:
    return (type(arg), arg.layout, arg.dtype) if isinstance(arg, torch.Tensor) else type(arg)


def _autocast() -> bool:
    return torch._C._is_any_autocast_enabled()


def _sizes(args: Sequence[Any]) -> tuple[object, ...]:
    return tuple((a.shape, a.stride(), a.dtype, a.device) if isinstance(a, torch.Tensor) else a for a in args)


def _aliases(args: Sequence[Any]) -> tuple[tuple[int, int], ...]:
    """For each tensor, the positions of the first that is the same view and of the first that shares its storage."""
    views: dict[object, int] = {}
    storages: dict[int, int] = {}
    found = []
    for i, arg in enumerate(args):
        if isinstance(arg, torch.Tensor):
            view = (arg.data_ptr() or id(arg), arg.dtype, arg.shape, arg.stride())
            storage = arg.untyped_storage().data_ptr() or -id(arg)
            found.append((views.setdefault(view, i), storages.setdefault(storage, i)))
    return tuple(found)


def _fingerprint(captured: ModuleGraph) -> str:
    return hashlib.sha256(captured.graph.print_readable(print_output=False).encode()).hexdigest()


def _explained(
    error: PlanError, pipeline: Pipeline, budget: Budget, options: Options, inputs: Sequence[Any]
) -> PlanError:
    """The planner's refusal in terms of this call."""
    refuse_forced(pipeline.needs, budget, ONCE, options)
    smallest, parts = smallest_budget(pipeline.needs, ONCE, options)
    if smallest <= budget.device:
        return error
    shapes = ", ".join(str(list(x.shape)) for x in inputs if isinstance(x, torch.Tensor))
    return PlanError(
        f"a device budget of {format_nbytes(budget.device)} cannot work for inputs of shape {shapes}; the smallest "
        f"that can is {format_nbytes(smallest)} ({smallest} bytes: "
        f"{', '.join(f'{k} {format_nbytes(v)}' for k, v in parts.items())})")
