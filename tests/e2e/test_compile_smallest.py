"""The smallest budget that a refusal names works, and one byte less does not, whatever the module."""

from __future__ import annotations

import re
from collections.abc import Callable
from tempfile import TemporaryDirectory

import pytest
import torch
import torch.nn.functional as F
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from selection import at_length
from torch import nn

from forebay.backend import prepared_for
from forebay.kernels.cpu_support import native
from forebay.kernels.products.linear.cpu import ROW_PADDING_NBYTES
from forebay.rewriter.ir.plan import PlanError

pytestmark = [pytest.mark.filterwarnings("ignore:.*lies in memory"),
              pytest.mark.filterwarnings("ignore:OpenMP threads spin")]


class TwoWeights(nn.Module):
    """An operator that reads two large weights, between two products."""

    def __init__(self, width: int, kind: str) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(width, width)) for _ in range(2))
        self.first, self.kind = nn.Linear(width, width), kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = {"product": torch.mm, "sum": torch.add, "joined": lambda a, b: torch.cat([a, b]).t()}[self.kind]
        return F.relu(self.first(x)) @ both(self.a, self.b)


class Kinds(nn.Module):
    """Layers of the kinds and widths given: products either way round, a table with its transpose, a bilinear form."""

    def __init__(self, layers: list[tuple[str, int]], dtype: torch.dtype) -> None:
        super().__init__()
        self.kinds, width, made = [kind for kind, _ in layers], 24, []
        for kind, outputs in layers:
            turned = (width, outputs) if kind == "addmm" else (outputs, width)
            made.append({"bilinear": lambda w=width, o=outputs: nn.Bilinear(w, w, o % 9 + 1)}.get(
                kind, lambda s=turned: nn.Linear(s[1], s[0]))())
            width = outputs % 9 + 1 if kind == "bilinear" else outputs
        self.layers = nn.ModuleList(made)
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for kind, layer in zip(self.kinds, self.layers, strict=True):
            if kind == "addmm":
                x = torch.addmm(x.new_ones(layer.weight.shape[1]), x, layer.weight)
            else:
                x = layer(x, x) if kind == "bilinear" else layer(x)
            x = F.gelu(x)
        return x


class Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(ids, use_cache=False).logits  # type: ignore[no-any-return]


def assert_named_is_smallest(build: Callable[[], nn.Module], x: torch.Tensor, multiplied: int = 0) -> None:
    """A refusal names a number that works, gives what eager gives, and is the peak of what runs. So many rows are
    `multiplied` at most, if not those of `x`."""
    def attempt(folder: str, nbytes: int) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = build().eval()
        wanted = model(x)
        options = {"budget": {"device": nbytes, "disk": folder}, "strict": True}
        return model, torch.compile(model, backend="forebay", options=options)(x), wanted

    with torch.no_grad(), TemporaryDirectory() as folder:
        with pytest.raises(PlanError, match="the smallest that can is") as refused:
            attempt(folder, 64)
        smallest = int(re.search(r"\((\d+) bytes", str(refused.value))[1])  # type: ignore[index]
        with pytest.raises(PlanError, match=rf"the smallest that can is .*\({smallest} bytes"):
            attempt(folder, smallest - 1)
        model, found, wanted = attempt(folder, smallest)
        rtol, atol = (2e-2, 3e-2) if x.dtype == torch.bfloat16 else (1e-4, 1e-3)  # outputs are of the order of 1
        torch.testing.assert_close(found, wanted, rtol=rtol, atol=atol)
        (prepared,) = prepared_for(model)
        taken = prepared.program.arenas["device"] + prepared.program.workspace_nbytes()
        # A product cut along its inputs widens, or packs, fewer of them than the whole, which is planned.
        rows = multiplied or (x.numel() if x.dtype == torch.int64 else len(x))
        widened = 0 if x.dtype == torch.float64 else rows * (4 * max(map(max, _matrices(model))) + ROW_PADDING_NBYTES)
        assert taken <= smallest
        if native.load() is not None:  # torch's products of a tile take less than those of the whole, which are planned
            assert smallest - widened <= taken


def _matrices(model: nn.Module) -> list[torch.Size]:
    return [p.shape for p in model.parameters() if p.dim() > 1]


LAYERS = st.lists(st.tuples(st.sampled_from(["linear", "addmm", "linear", "bilinear"]), st.integers(1, 200)),
                  min_size=1, max_size=4)


@example([("linear", 32), ("addmm", 96)], torch.float32, 1)  # what one operator reads together stays, all else streams
@example([("linear", 172), ("addmm", 106)], torch.bfloat16, 1)
@example([("linear", 87), ("addmm", 106)], torch.bfloat16, 1)
@settings(deadline=None, max_examples=8)
@given(LAYERS, st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float64]), st.integers(1, 5))
def test_of_random_modules(layers: list[tuple[str, int]], dtype: torch.dtype, rows: int) -> None:
    assert_named_is_smallest(lambda: Kinds(layers, dtype), torch.linspace(-1, 1, rows * 24).view(rows, 24).to(dtype))


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", ["product", "sum", "joined"])
@pytest.mark.parametrize("width", [100, 136])  # weights that stay for their size, and such as stream
def test_of_an_operator_that_needs_two_large_weights(kind: str, width: int) -> None:
    assert_named_is_smallest(lambda: TwoWeights(width, kind), torch.linspace(-1, 1, 3 * width).view(3, width),
                             width if kind == "product" else 0)  # of one weight by the other


class Reads(nn.Module):
    """A function of x and of several square weights, each too large to stay for its size."""

    def __init__(self, function: Callable[..., torch.Tensor], weights: int) -> None:
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(144, 144) / 12) for _ in range(weights))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, *self.weights)


READS: dict[str, tuple[Callable[..., torch.Tensor], int]] = {
    "three at once": (lambda x, a, b, c: x @ torch.addmm(a, b, c), 3),
    "two of four": (lambda x, a, b, c, d: F.linear(x, a + b) @ torch.where(c > 0, c, d), 4),
    "a product with a sum": (lambda x, a, b: F.linear(x, a * b), 2),
    "a recurrent cell": (lambda x, a, b: torch.rnn_tanh_cell(x, x, a, b), 2),
    "one at both ends": (lambda x, a, b, c: F.relu(F.relu(x @ a @ b) @ c) @ a.t(), 3),
    "one in three sums": (lambda x, a, b, c, d: x @ (a + b) @ (a + c) @ (a + d), 4),
    "a residual that is a weight": (lambda x, a, b, c: (x @ a).sum() * F.linear(b, c, None) + b, 3),
}


@pytest.mark.parametrize("form", READS)
def test_of_operators_that_read_several_streamed_weights(form: str) -> None:
    function, weights = READS[form]
    assert_named_is_smallest(lambda: Reads(function, weights), torch.linspace(-1, 1, 288).view(2, 144))


@pytest.mark.parametrize("family", ["Llama", at_length("GPT2")])
def test_of_language_models(family: str) -> None:
    sizes = {"Llama": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
                       "intermediate_size": 256},
             "GPT2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}}[family]
    config = getattr(transformers, f"{family}Config")(vocab_size=400, bos_token_id=1, eos_token_id=2, **sizes)
    model_class = getattr(transformers, "LlamaForCausalLM" if family == "Llama" else "GPT2LMHeadModel")
    assert_named_is_smallest(lambda: Logits(model_class(config)), torch.arange(14).view(2, 7))
