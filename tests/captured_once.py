"""Graphs shared by all tests of one process that run models: a model is traced once, and its graphs rewritten once."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import forebay.open_model as open_model
import forebay.rewriter.pipeline.plan_task as plan_task
from forebay.rewriter.capture import trace
from forebay.rewriter.capture.layers import layer_signature
from forebay.rewriter.capture.merge import Kind
from forebay.rewriter.ir.graph import CapturedModel
from forebay.rewriter.ir.program import FileSlice
from forebay.rewriter.pipeline import pass_list as pipeline
from forebay.rewriter.switches import Switches

ROOT = Path(__file__).parent
RUNNING = tuple(ROOT / name for name in (
    "benchmarks", "commands", "e2e", "exported", "huggingface", "rewriter/checkpoints", "rewriter/pipeline",
    "rewriter/planning", "runtime", "serving"))
APART = tuple(ROOT / name for name in ("extending", "rewriter/capture"))  # whose subject is capture
MOST = 48  # models; graphs of a few layers take some megabytes


class _Kept:
    """The last `MOST` that were made, by what they were made from."""

    def __init__(self) -> None:
        self.made: OrderedDict[Any, Any] = OrderedDict()

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self.made:
            self.made[key] = make()
            if len(self.made) > MOST:
                self.made.popitem(last=False)
        self.made.move_to_end(key)
        return self.made[key]


_TRACED, _LAYERS, _REWRITTEN, _AGAIN, _READ = _Kept(), _Kept(), _Kept(), _Kept(), _Kept()
_trace, _rewrite, _read = trace.trace_model, plan_task.rewrite_captured, open_model.read_graphs
_trace_layer = trace._Tracer._trace_layer
# Settings of a model that change none of its layers.
OUTSIDE = ("num_hidden_layers", "vocab_size", "tie_word_embeddings", "architectures", "transformers_version")


def shares_graphs(path: Path) -> bool:
    """Whether tests of a file may share what was captured."""
    return any(folder in path.parents for folder in RUNNING)


def shares_layers(path: Path) -> bool:
    """Whether tests of a file may share what was traced of layers, of which each capture makes graphs of its own."""
    return not any(folder in path.parents for folder in APART)


def share_layers(patch: pytest.MonkeyPatch) -> None:
    """Trace layers that are alike once, of models of any depth, head and steps: two thirds of the time of a capture."""
    patch.setattr(trace._Tracer, "_trace_layer", _known_layer)


def share_graphs(patch: pytest.MonkeyPatch) -> None:
    """Trace models of one class, config and dtype once for what their steps give, those from memory and from folders
    each, and rewrite their graphs once for each way in which weights and cache are stored. Who runs graphs reads them,
    and edits copies."""
    share_layers(patch)
    patch.setattr(trace, "trace_model", _known)
    patch.setattr(plan_task, "rewrite_captured", _known_rewritten)
    patch.setattr(open_model, "read_graphs", _known_read)


def _known(model: Any, gives: Any = "last", embeds: bool = False, adapter_columns: int = 0) -> CapturedModel:
    described = json.loads(model.config.to_json_string(use_diff=False))
    from_folder = bool(described.pop("_name_or_path", ""))  # which one is all the same
    parameters = str([(name, *each.shape) for name, each in model.named_parameters()])  # with those of adapters
    key = (type(model), json.dumps(described, sort_keys=True), from_folder, model.dtype, gives, embeds, parameters,
           adapter_columns)
    return _TRACED.once(key, lambda: _trace(model, gives, embeds, adapter_columns))


def _known_layer(tracer: Any, call: Any, states: Any, hide_index: bool) -> Kind:
    """By all that `trace_layers` knows of a layer, and what its model is like."""
    model, layer = tracer.step.model, tracer.layers[call.layer]
    described = {name: value for name, value in json.loads(model.config.to_json_string(use_diff=False)).items()
                 if name not in OUTSIDE and not name.startswith("_")}
    plain, spec, _ = call.key()
    inputs = (tracer.calls.hidden[call.run], *call.others)
    given = [(str(each.dtype), *map(str, tracer._named(each))) for each in inputs]
    key = (type(model), json.dumps(described, sort_keys=True), layer_signature(layer, ("layer_idx",) * hide_index),
           plain, spec, str(given), str(states), str(tracer.dtype), tracer.adapter_columns)
    return replace(_LAYERS.once(key, lambda: _trace_layer(tracer, call, states, hide_index)), call=call)


def _known_read(key: str) -> tuple[CapturedModel, dict[str, FileSlice]] | None:
    """What the cache folder keeps is read once."""
    if key not in _READ.made and _read(key) is None:
        return None
    found: tuple[CapturedModel, dict[str, FileSlice]] = _READ.once(key, lambda: _read(key))
    return found


def _known_rewritten(captured: CapturedModel, switches: Switches, cache_format: str = "native",
                     activations: str = "native") -> CapturedModel:
    if switches.dump or switches.bisect or switches.stop_after:
        return _rewrite(captured, switches, cache_format, activations)
    passes = tuple(each.run for each in pipeline.PASSES)  # a test may leave some out
    switches = replace(switches, poison=False, sync=False)  # which are about running
    if captured.rewritten:  # of one object, which the value keeps: another cache, and what blocks ask of its graphs
        again = id(captured), str(switches), cache_format, activations, passes
        return _AGAIN.once(again, lambda: (captured, _rewrite(captured, switches, cache_format, activations)))[1]
    # by the graphs themselves, which the value keeps, and all else that a model in memory or a folder may change
    graphs = (id(captured.step), *(id(graph) for graph in captured.blocks().values()))
    specs = str([vars(spec) for spec in captured.weights.values()])
    key = graphs, specs, str(captured.adapters), captured.token_types, str(switches), cache_format, activations, passes
    kept = _REWRITTEN.once(key, lambda: (captured, _rewrite(captured, switches, cache_format, activations)))
    return kept[1]
