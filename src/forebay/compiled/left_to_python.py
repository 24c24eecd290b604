"""Weights that torch.compile never hands to a backend: say so at the end of the first call.

Dynamo breaks the graph at LSTM, GRU and RNN, at TorchScript and at what `torch.compiler.disable` marks, and runs them
in Python, sometimes with all around them. No graph reads their weights, so nothing of the backend would run that could
tell. What is left is Dynamo's callback before a compilation: the call being made is found on the stack, and what is to
be done when it ends is put beside what Dynamo does then. Dynamo asks no more about a function that it once gave up as a
whole, so of several modules of one class only the first to be called may be named, until torch._dynamo.reset().
"""

from __future__ import annotations

import inspect
import sys
import warnings
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._dynamo import config
from torch._dynamo.callback import CallbackArgs, callback_handler
from torch._dynamo.eval_frame import DisableContext, OptimizedModule, innermost_backend

from forebay.compiled.report import NEVER_SEEN, note_reason, offload_report
from forebay.rewriter.capture.compiled_module import OffloadError
from forebay.rewriter.ir.byte_sizes import format_nbytes

RECURRENT = (nn.RNN, nn.GRU, nn.LSTM)
_told: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class Watch:
    """Called before torch.compile traces a frame: makes sure that the end of a call to `backend`'s modules is seen."""

    def __init__(self, backend: Callable[..., Any]) -> None:
        self.backend = backend

    def __call__(self, args: CallbackArgs) -> None:
        frame = sys._getframe()
        while frame.f_back is not None and frame.f_code.co_name != "compile_wrapper":
            frame = frame.f_back
        call, compiled, at_end = (frame.f_locals.get(name) for name in ("fn", "self", "cleanups"))
        options = _options_for(self.backend, getattr(compiled, "callback", None))
        if options is not None and isinstance(at_end, list) and not any(isinstance(f, _EndOfCall) for f in at_end):
            at_end.append(_EndOfCall(tuple(_modules_of(call)), bool(options.get("strict")), sys.exc_info()[1]))


@dataclass(frozen=True)
class _EndOfCall:
    """At the end of a call: a warning, once per module, or with `strict` OffloadError. Not where the call failed, for a
    reason of its own; `handled` is an exception that the caller was handling meanwhile."""

    roots: tuple[nn.Module, ...]
    strict: bool
    handled: BaseException | None

    def __call__(self) -> None:
        if sys.exc_info()[1] is not self.handled:
            return
        for root in self.roots:
            text = unseen_weights(root)
            if text and self.strict:
                raise OffloadError(text)
            if text and root not in _told:
                _told.add(root)
                warnings.warn(f"forebay: {text}", RuntimeWarning, stacklevel=4)


def watch(backend: Callable[..., Any]) -> None:
    """Look at every module that is compiled for `backend` from now on."""
    watching = Watch(backend)
    callback_handler.register_start_callback(watching)
    # torch._dynamo.reset() drops all callbacks, and with them this one, which only the handler holds
    weakref.finalize(watching, watch, backend).atexit = False


def unseen_weights(root: nn.Module) -> str:
    """Describe the weights that stay in memory because no graph reads them, with reasons; "" where Dynamo left out
    nothing, and handed over some of the parameters: others are then not used, or are not yet."""
    left = left_to_python(root)
    for module, why in left.values():
        note_reason(module.parameters(), why)
    kept = offload_report(root).kept
    parameters = dict(root.named_parameters())
    unseen = [name for name in parameters if kept.get(name) == NEVER_SEEN]
    known = [t for module, _ in left.values() for t in module.parameters()]
    if not known and (len(unseen) < len(parameters) or not parameters):
        return ""
    nbytes = sum(t.numel() * t.element_size() for t in (*known, *(parameters[name] for name in unseen)))
    reasons = [f"{name or 'the module'} is {why}" for name, (_, why) in left.items()]
    if unseen:
        more = f" and {len(unseen) - 3} more" if len(unseen) > 3 else ""
        reasons.append(f"torch.compile handed over no graph that reads {', '.join(unseen[:3])}{more} "
                       "(TORCH_LOGS=graph_breaks shows why)")
    return f"{format_nbytes(nbytes)} of weights stay in memory, outside the budget: {'; '.join(reasons)}"


def left_to_python(root: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """The submodules, by name, whose weights Dynamo hands to no backend, and why."""
    found: dict[str, tuple[nn.Module, str]] = {}
    for name, module in root.named_modules():
        if any(name.startswith(f"{outer}.") or not outer for outer in found):
            continue  # part of one that is found
        why = _why(module)
        if why and any(True for _ in module.parameters()):
            found[name] = module, why
    return found


def _why(module: nn.Module) -> str:
    if isinstance(module, RECURRENT) and not config.allow_rnn:
        return (f"of type {type(module).__name__}, which torch.compile leaves to Python unless "
                "torch._dynamo.config.allow_rnn is set")
    if isinstance(module, torch.jit.ScriptModule):
        return "TorchScript, which torch.compile leaves alone"
    disabled = isinstance(module, OptimizedModule) and isinstance(module.dynamo_ctx, DisableContext)
    if disabled or any(getattr(call, "_torchdynamo_disable_recursive", False) for call in (
            module.forward, type(module).__call__, type(module)._call_impl)):
        return "marked by torch.compiler.disable"
    return ""


def _options_for(backend: Callable[..., Any], compiled: Any) -> Mapping[str, Any] | None:
    """The options of what Dynamo compiles with, None if that is not `backend`."""
    if compiled is None:
        return None
    made = innermost_backend(compiled)
    given = dict(getattr(made, "kwargs", {}))
    made = getattr(made, "compiler_fn", made)
    given |= getattr(made, "keywords", {})  # of a functools.partial
    options = given.get("options")  # other types are refused where options are read
    found = options if isinstance(options, Mapping) else {}
    return found if getattr(made, "func", made) is backend else None


def _modules_of(call: Any) -> list[nn.Module]:
    """The modules that a compiled call is known to read: its own, or those a function names."""
    call = inspect.unwrap(call)
    found = [call, getattr(call, "__self__", None)]
    if inspect.isfunction(call):
        names = inspect.getclosurevars(call)
        found += [*names.nonlocals.values(), *names.globals.values()]
    return [value for value in found if isinstance(value, nn.Module)]
