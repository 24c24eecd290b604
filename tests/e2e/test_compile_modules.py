"""torch's own samples of its modules under `torch.compile(module, backend="forebay")`: what eager gives, and no
exception that eager does not raise.

A sample of the modules in the suite; all of them, and more samples of each, by `make test-opinfo`.
"""

from __future__ import annotations

import copy
import functools
import os
import warnings
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

ALL = os.environ.get("FOREBAY_TEST_OPINFO") == "all"
SAMPLES = 4 if ALL else 1  # of each module
SOME = (
    "nn.AdaptiveAvgPool1d", "nn.BatchNorm1d", "nn.ConvTranspose3d", "nn.MultiLabelMarginLoss", "nn.BCELoss",
    "nn.TransformerEncoderLayer", "nn.RNNCell", "nn.GRU")

pytestmark = pytest.mark.filterwarnings("ignore")


@functools.cache
def modules() -> dict[str, Any]:
    """torch's list of its modules, by name: to import it takes seconds."""
    pytest.importorskip("expecttest")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_modules import module_db
    return {info.name: info for info in module_db if torch.float32 in info.dtypes and not info.is_lazy}


def results(call: Any, given: Any) -> tuple[list[Any] | None, str]:
    """What a call gives on copies of its arguments, or what it raises."""
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone(), given)
    try:
        with torch.no_grad():
            return pytree.tree_leaves(call(*args, **kwargs)), ""
    except Exception as error:
        return None, type(error).__name__


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", tuple(modules()) if ALL else SOME)
def test_modules_give_what_eager_gives(name: str, training: bool, tmp_path: Any) -> None:
    info = modules()[name]
    torch.manual_seed(0)
    inputs = info.module_inputs_func(info, "cpu", torch.float32, requires_grad=False, training=training)
    for made in inputs[:SAMPLES]:
        if made.forward_input is None:
            continue
        module = info.module_cls(*made.constructor_input.args, **made.constructor_input.kwargs).train(training)
        plain, given = copy.deepcopy(module), (made.forward_input.args, made.forward_input.kwargs)
        if training and any("dropout" in type(part).__name__.lower() or getattr(part, "dropout", 0)
                            for part in module.modules()):
            continue  # what it gives is drawn
        compiled = torch.compile(module, backend="forebay", options={"budget": {"device": "64MiB",
                                                                                "disk": str(tmp_path)}})
        for _ in range(2):  # what a call changes in the module shows in the next
            wanted, refused = results(plain, given)
            found, raised = results(compiled, given)
            if wanted is None:
                assert found is None and raised, f"{made.desc}: eager raises {refused}"
                break
            assert found is not None, f"{made.desc}: raises {raised}"
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5, equal_nan=True)
        torch._dynamo.reset()
