"""torch's own samples of its operators over the backend: no wrong result, no exception that eager does not raise.

A sample of the operators in the suite; all of them, and more samples of each, by `make test-opinfo`.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from forebay.backend import Memory, OffloadedGraph, parse_options
from forebay.rewriter.capture.compiled_module import OffloadError
from forebay.rewriter.ir.plan import PlanError

ALL = os.environ.get("FOREBAY_TEST_OPINFO") == "all"
SAMPLES = 8 if ALL else 2  # of each operator
SEED = 42  # some of torch's samples set it themselves where they run, which is not part of a graph
# Their results are whatever memory held.
UNDEFINED = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
SOME = (
    "abs", "cartesian_prod", "cumprod", "expand_copy", "native_batch_norm", "nn.functional.pad.constant",
    "nn.functional.interpolate.area", "nn.functional.max_pool1d", "outer", "atleast_3d", "index_reduce.amax", "randn",
    "nn.functional.multi_head_attention_forward", "nn.functional.nll_loss", "fft.hfftn", "linalg.pinv", "masked.std")

pytestmark = pytest.mark.filterwarnings("ignore")


@functools.cache
def operators() -> dict[str, Any]:
    """torch's list of its operators, by name: to import it takes seconds."""
    pytest.importorskip("expecttest")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    return {op.full_name: op for op in op_db if op.supports_dtype(torch.float32, "cpu") and op.name not in UNDEFINED}


def samples(op: Any) -> Iterator[Any]:
    torch.manual_seed(0)
    for i, sample in enumerate(op.sample_inputs("cpu", torch.float32, requires_grad=False)):
        if i == SAMPLES:
            return
        yield sample


def graph_of(op: Any, leaves: list[Any], spec: Any) -> tuple[torch.fx.GraphModule, list[int]]:
    """A graph that calls an operator with its tensors as inputs, and their places among the leaves."""
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def call(*tensors: torch.Tensor) -> tuple[Any, ...]:
        full = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            full[place] = tensor
        first, args, kwargs = pytree.tree_unflatten(full, spec)
        return tuple(pytree.tree_leaves(op.op(first, *args, **kwargs)))

    graph = torch.fx.Graph()
    inputs = tuple(graph.placeholder(f"x{i}") for i in range(len(places)))
    graph.output(graph.call_function(call, inputs))
    return torch.fx.GraphModule({}, graph), places


def copied(leaves: list[Any], places: list[int]) -> list[torch.Tensor]:
    return [leaves[i].detach().clone() for i in places]


@pytest.mark.parametrize("name", tuple(operators()) if ALL else SOME)
def test_operators_give_what_eager_gives(name: str, tmp_path) -> None:
    op = operators()[name]
    options = parse_options({"budget": {"device": "256MiB", "disk": str(tmp_path)}, "strict": True})
    for sample in samples(op):
        leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        gm, places = graph_of(op, leaves, spec)
        if not places:
            continue
        with torch.no_grad():
            torch.manual_seed(SEED)
            try:
                wanted = gm(*copied(leaves, places))
            except Exception:
                continue  # eager refuses it
            given = copied(leaves, places)
            graph = OffloadedGraph(gm, {0: "weight"}, options, Memory(options))
            torch.manual_seed(SEED)
            try:
                found = graph(*given)
            except (OffloadError, PlanError) as error:
                assert error.__cause__ is None or "traced" in str(error), f"{sample}: {error!r}: {error.__cause__!r}"
                continue
            finally:
                graph.memory.close()
        assert len(found) == len(wanted)
        for ours, theirs in zip(found, wanted, strict=True):
            if isinstance(theirs, torch.Tensor):
                assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), sample
                if not op.name.startswith(("bernoulli", "normal", "rand", "multinomial", "nn.functional.dropout",
                                           "nn.functional.alpha_dropout", "nn.functional.feature_alpha_dropout",
                                           "uniform", "cauchy", "exponential", "geometric", "log_normal")):
                    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, equal_nan=True, msg=str(sample))
            else:
                assert ours == theirs
