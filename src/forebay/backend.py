"""`torch.compile(model, backend="forebay", options={"budget": …})`: any module, its weights streamed from disk.

A graph's parameters and buffers move to a nameless file when it first runs, and stay usable: the module's tensors
become views of that file, which take no memory unless eager code reads them. They move also when all of them fit the
budget: the arena holds them then, and a second copy would double their memory. `restore` brings them back.

One plan and Program is made per set of input sizes and kept; memory is held for one at a time, because each may take
the whole budget. Compile a model that is called with many sizes in turn once per size, with a budget each.
"""

from __future__ import annotations

import hashlib
import re
import tempfile
import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import fx, nn

from forebay.parameter_store import StoreMap, bring_back, map_of, move_out
from forebay.rewriter.bisect import PassChangedResult
from forebay.rewriter.capture_module import ModuleGraph, OffloadError, Scalar, capture_module
from forebay.rewriter.checkpoint import CheckpointError
from forebay.rewriter.machine import Machine, load_machine
from forebay.rewriter.pipeline import Pipeline, Source, StoppedAfter
from forebay.rewriter.plan import Budget, Plan, PlanError, Workload
from forebay.rewriter.planner import Wishes, make_plan, smallest_budget
from forebay.rewriter.program import FileSlice, Program
from forebay.rewriter.sizes import format_nbytes, parse_budget, parse_nbytes
from forebay.rewriter.switches import SwitchError, Switches, read_switches
from forebay.runtime.executor import BoundProgram
from forebay.runtime.open_device import open_device
from forebay.runtime.session import Session, resident_copies

KEPT = 4  # plans per graph, for as many sets of input sizes
ONCE = Workload(batch=1, prompt=1, new_tokens=1)  # a module's call is one step
DELIBERATE = (StoppedAfter, PassChangedResult, SwitchError)  # FOREBAY_ switches that end a run on purpose


@dataclass(frozen=True)
class Options:
    """`options` of torch.compile. `strict`: raise where a graph would fall back to eager; `slots`, `slot_nbytes` and
    `lead` force choices of the planner; `machine` is a profile or the path of one."""

    budget: Budget
    strict: bool = False
    slots: int | None = None
    slot_nbytes: int | None = None
    lead: int | None = None
    machine: Machine | None = None

    @property
    def wishes(self) -> Wishes:
        return Wishes(self.slots, self.slot_nbytes, self.lead)


def parse_options(options: Mapping[str, Any] | None) -> Options:
    """Validate; ValueError names an unknown or missing option and those there are, PlanError a size that is wrong."""
    known = [f.name for f in fields(Options)]
    given = dict(options or {})
    for name in given:
        if name not in known:
            raise ValueError(f"options: unknown option {name!r}; the options are {', '.join(known)}")
    if "budget" not in given:
        raise ValueError('options: say how much memory may be used, as {"budget": "500MB"}')
    given["budget"] = parse_budget(given["budget"])
    if not isinstance(given.get("strict", False), bool):
        raise ValueError(f"options: strict is True or False, not {given['strict']!r}")
    for name in ("slots", "lead"):
        value = given.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"options: {name} is a number of at least 1, not {value!r}")
    if given.get("slot_nbytes") is not None:
        given["slot_nbytes"] = parse_nbytes(given["slot_nbytes"], "options: slot_nbytes")
    machine = given.get("machine")
    if machine is not None and not isinstance(machine, Machine):
        given["machine"] = load_machine(machine)
    return Options(**given)


def forebay_backend(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> OffloadedGraph:
    """The backend: registered under the entry point group `torch_dynamo_backends`, called by torch.compile.

    Raises ValueError for an unknown option. What cannot be offloaded shows when the graph first runs: a RuntimeWarning
    that names the reason and an eager run, or with `strict` OffloadError, PlanError (a budget that cannot work, with
    the smallest that can) or CheckpointError (a disk that is full).
    """
    return OffloadedGraph(gm, _weight_names(gm, example_inputs), parse_options(options), _memory_of(options))


def restore(module: nn.Module) -> None:
    """Bring a module's parameters and buffers back into memory; the next call of its compiled form moves them again."""
    tensors = [*module.parameters(), *module.buffers()]
    left = bring_back(tensors)
    for memory in list(_memories.values()):
        memory.close_if_using(left)


def prepared_for(module: nn.Module) -> list[Prepared]:
    """The plans and Programs kept for graphs that read this module's weights, one per set of input sizes."""
    held = {id(m) for t in (*module.parameters(), *module.buffers()) if (m := map_of(t)) is not None}
    return [p for graph in _graphs for p in graph.prepared.values() if held & {id(m) for m in p.maps}]


@dataclass(frozen=True)
class Prepared:
    """A plan and its proven Program for one set of input sizes and weights; `maps` keeps the weights' files."""

    captured: ModuleGraph
    plan: Plan
    program: Program
    files: Mapping[str, FileSlice]
    maps: tuple[StoreMap, ...]
    machine: Machine
    switches: Switches


class Memory:
    """The memory of one compiled model: the arenas of one prepared graph at a time, since each may fill the budget."""

    def __init__(self, options: object) -> None:
        self.options = options  # held, so that its identity stays its own
        self.lock = threading.RLock()
        self.holds: Prepared | None = None
        self._open: list[Session] = []
        self._bound: BoundProgram | None = None
        weakref.finalize(self, _close_all, self._open)

    def bound(self, prepared: Prepared) -> BoundProgram:
        """`prepared` ready to run, its resident weights read and its first copies under way."""
        if self._bound is None or self.holds is not prepared:
            self.close()
            device = open_device(prepared.machine, prepared.switches)
            load = resident_copies(prepared.plan, prepared.files)
            session = Session(prepared.plan, lambda _: prepared.program, load, prepared.captured.constants, device)
            self._open.append(session)
            self._bound = session.bound(1)
            self._bound.start()
            self.holds = prepared
        return self._bound

    def close(self) -> None:
        """Give back the arenas."""
        self.holds = self._bound = None
        _close_all(self._open)

    def close_if_using(self, maps: Sequence[StoreMap]) -> None:
        with self.lock:
            if self.holds is not None and any(held is m for held in self.holds.maps for m in maps):
                self.close()


_graphs: weakref.WeakSet[OffloadedGraph] = weakref.WeakSet()
_memories: weakref.WeakValueDictionary[int, Memory] = weakref.WeakValueDictionary()


def _memory_of(options: object) -> Memory:
    """All graphs of one torch.compile share its `options` object, and with it one budget."""
    found = _memories.get(id(options))
    if found is None:
        found = _memories[id(options)] = Memory(options)
    return found


def _close_all(sessions: list[Session]) -> None:
    while sessions:
        sessions.pop().close()


class OffloadedGraph:
    """One graph of torch.compile, called with its parameters and inputs."""

    def __init__(self, gm: fx.GraphModule, weights: Mapping[int, str], options: Options, memory: Memory) -> None:
        self.gm, self.weights, self.options, self.memory = gm, weights, options, memory
        self.switches = read_switches()
        self.machine = options.machine or Machine.default()
        self.differentiable = _wants_gradients(gm)
        self.scalars = [i for i, n in enumerate(gm.graph.find_nodes(op="placeholder")) if _read_as_number(n)]
        self.prepared: OrderedDict[object, Prepared] = OrderedDict()
        self.refused: set[object] = set()
        _graphs.add(self)

    def __call__(self, *given: Any) -> Sequence[Any]:
        if not self.weights:
            return self.gm(*given)  # nothing to offload
        args = list(given)
        for i in self.scalars:
            args[i] = Scalar(args[i].item())
        with self.memory.lock:
            sizes = _sizes(args)
            if (sizes, _autocast()) in self.refused:
                return self.gm(*given)
            key = (sizes, self._identity(args))
            prepared = self.prepared.get(key)
            if prepared is None:
                try:
                    prepared = self._prepare(args)
                    self._warn_of_turns(prepared)
                    self.memory.bound(prepared)
                except DELIBERATE:
                    raise
                except Exception as error:
                    self._refuse(error)
                    self.refused.add((sizes, _autocast()))
                    return self.gm(*given)
                self.prepared[sizes, self._identity(args)] = prepared  # the weights have moved
                while len(self.prepared) > KEPT:
                    self.prepared.popitem(last=False)
            else:
                self.prepared.move_to_end(key)
                self._warn_of_turns(prepared)
            return _run(self.memory.bound(prepared), prepared.captured, args)

    def _identity(self, args: Sequence[Any]) -> tuple[tuple[int, int], ...]:
        """Which weights these are, and in which state: another address or version means another content."""
        return tuple((args[i].data_ptr(), _version(args[i])) for i in self.weights)

    def _prepare(self, args: Sequence[Any]) -> Prepared:
        """Capture, plan, move the weights to disk, lower and prove. Nothing has moved when this raises."""
        if self.differentiable:
            raise OffloadError("its results need gradients; call it under torch.no_grad() or torch.inference_mode()")
        if _autocast():
            raise OffloadError("autocast is enabled; cast the module itself instead")
        self._refuse_devices(args)
        captured = capture_module(self.gm, args, self.weights)
        files: dict[str, FileSlice] = {}
        source = Source(_fingerprint(captured), lambda _: captured.flat(), files, captured.constants,
                        self.machine.device_kind != "cpu")
        pipeline = Pipeline(source, ONCE, self.machine, self.switches)
        budget, wishes = self.options.budget, replace(self.options.wishes, reuse=not self.switches.no_reuse)
        try:
            make_plan(pipeline.facts, budget, ONCE, wishes, self.machine.name)
        except PlanError as error:
            inputs = [arg for i, arg in enumerate(args) if i not in self.weights]
            raise _explained(error, pipeline, budget, wishes, inputs) from None
        move = move_out([args[i] for i in self.weights], budget.disk or tempfile.gettempdir())
        files.update(zip(self.weights.values(), move.files(), strict=True))
        plan = pipeline.plan(budget, wishes)
        program = pipeline.program(plan, 1)
        move.commit()
        return Prepared(captured, plan, program, files, move.maps(), self.machine, self.switches)

    def _refuse_devices(self, args: Sequence[Any]) -> None:
        for i, arg in enumerate(args):
            if not isinstance(arg, torch.Tensor) or arg.device.type == "cpu":
                continue
            raise OffloadError(f"{self.weights.get(i, f'input {i}')} is on {arg.device}; keep module and inputs on the "
                               "CPU: what is needed moves to the device by itself")

    def _refuse(self, error: Exception) -> None:
        """Say why this graph is not offloaded: by a warning, or with `strict` by raising."""
        expected = isinstance(error, OffloadError | PlanError | CheckpointError)
        reason = str(error) if expected else f"{type(error).__name__}: {error}"
        if self.options.strict:
            if expected:
                raise error
            raise OffloadError(f"this graph cannot be offloaded: {reason}") from error
        warnings.warn(f"forebay: this graph is not offloaded and runs eagerly, outside the budget: {reason}",
                      RuntimeWarning, stacklevel=3)

    def _warn_of_turns(self, prepared: Prepared) -> None:
        """Graphs with other weights take turns: each turn reads its resident weights anew."""
        before = self.memory.holds
        if before is not None and before is not prepared and set(before.files) != set(prepared.files):
            warnings.warn("forebay: graph breaks split this model; its graphs take turns in the budget and read their "
                          "resident weights again at every turn (TORCH_LOGS=graph_breaks shows where)",
                          RuntimeWarning, stacklevel=3)


def _run(bound: BoundProgram, captured: ModuleGraph, args: Sequence[Any]) -> tuple[Any, ...]:
    for name, position in captured.inputs.items():
        target = bound.inputs.get(name)
        if target is not None:
            target.copy_(args[position].detach())
    bound.run()
    values = [bound.outputs[f"out{i}"] for i in range(len(bound.outputs))]
    with torch.no_grad():
        for position, value in zip(captured.mutated, values, strict=False):
            args[position].copy_(value)
    remaining = iter(values[len(captured.mutated) :])
    return tuple(next(remaining).to("cpu", copy=True) if known is None else known[0] for known in captured.results)


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
    """Whether Dynamo saw a result that needs gradients; a recompilation follows when the grad mode changes."""
    results = [n.meta.get("example_value") for n in gm.graph.output_node().all_input_nodes]
    recorded = torch.is_grad_enabled() or any(n.args == (True,) for n in gm.graph.find_nodes(
        op="call_function", target=torch._C._set_grad_enabled))
    return recorded and any(isinstance(v, torch.Tensor) and v.requires_grad for v in results)


def _read_as_number(node: fx.Node) -> bool:
    return bool(node.users) and all(u.op == "call_method" and u.target == "item" for u in node.users)


def _version(tensor: torch.Tensor) -> int:
    try:
        return tensor._version
    except RuntimeError:  # made in inference mode, which counts no changes
        return 0


def _autocast() -> bool:
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


def _sizes(args: Sequence[Any]) -> tuple[object, ...]:
    return tuple((a.shape, a.stride(), a.dtype, a.device) if isinstance(a, torch.Tensor) else a for a in args)


def _fingerprint(captured: ModuleGraph) -> str:
    return hashlib.sha256(captured.graph.print_readable(print_output=False).encode()).hexdigest()


def _explained(
    error: PlanError, pipeline: Pipeline, budget: Budget, wishes: Wishes, inputs: Sequence[Any]
) -> PlanError:
    """The planner's refusal in terms of this call."""
    smallest, parts = smallest_budget(pipeline.facts, ONCE, wishes)
    if smallest <= budget.device:
        return error
    shapes = ", ".join(str(list(x.shape)) for x in inputs if isinstance(x, torch.Tensor))
    return PlanError(
        f"a device budget of {format_nbytes(budget.device)} cannot work for inputs of shape {shapes}; the smallest "
        f"that can is {format_nbytes(smallest)} ({smallest} bytes: "
        f"{', '.join(f'{k} {format_nbytes(v)}' for k, v in parts.items())})")
