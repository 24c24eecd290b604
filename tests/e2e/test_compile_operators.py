"""Operators through torch.compile whose results once differed from eager's in silence."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

SIZE = 48
ROWS = torch.tensor([0, 3, 3, 7])  # one of them twice


class After(nn.Module):
    """`function` of a linear layer's results in 0 .. 1, which lie amid other values in an arena."""

    def __init__(self, function: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(SIZE, SIZE), function

    def forward(self, x: torch.Tensor) -> object:
        return self.function(torch.sigmoid(self.linear(x)))


def whole(y: torch.Tensor) -> torch.Tensor:
    return (y > 0.5).float()


FUNCTIONS: dict[str, Callable[[torch.Tensor], object]] = {
    "binary_cross_entropy, mean": lambda y: F.binary_cross_entropy(y, whole(y)),
    "binary_cross_entropy, sum": lambda y: F.binary_cross_entropy(y, whole(y), reduction="sum"),
    "binary_cross_entropy, none": lambda y: F.binary_cross_entropy(y, whole(y), reduction="none"),
    "linalg.qr": torch.linalg.qr,
    "linalg.qr, complete": lambda y: torch.linalg.qr(y[:, :9], mode="complete"),
    "expand_copy": lambda y: torch.expand_copy(y[:, None], (SIZE, 3, SIZE)),
    "addmm, one number as bias": lambda y: torch.addmm(y[0, :1], y, y),
    "addmm, bias in steps": lambda y: torch.addmm(torch.cat((y, y), 1)[0, ::2], y, y),
    "linear, one number as bias": lambda y: F.linear(y, y, y[0, :1]),
    "addmm, no column": lambda y: torch.addmm(y[0], y[:, :0], y[:0]),
    "linear, no row": lambda y: F.linear(y, y[:0]),
    "linear of nothing": lambda y: F.linear(y[:0], y, y[0]),
    "index_put, added": lambda y: torch.index_put(y, (ROWS,), y[:4] + 1, accumulate=True),
    "index_put_, added": lambda y: y.clone().index_put_((ROWS, ROWS), y[0, :4], accumulate=True),
    "put": lambda y: torch.put(y, ROWS, y[0, :4] + 1),
    "put, added": lambda y: torch.put(y, ROWS, y[0, :4], accumulate=True),
    "put_, added": lambda y: y.clone().put_(ROWS, y[0, :4], accumulate=True),
    "as_strided": lambda y: torch.as_strided(y, (4, 5), (7, 1), 3) + 1,
    "as_strided_copy": lambda y: torch.as_strided_copy(y, (4, 5), (7, 1), 3),
    "as_strided_copy, of a slice": lambda y: torch.as_strided_copy(y[2:], (4, 5), (7, 1), 3),
    "as_strided_copy, without offset": lambda y: torch.as_strided_copy(y[2:, 1:], (4, 5), (7, 1)),
    "as_strided_scatter": lambda y: torch.as_strided_scatter(y, y[:4, :5] - 2, (4, 5), (7, 1), 11),
    "as_strided_scatter, transposed": lambda y: torch.as_strided_scatter(y.t(), y[:4, :5] - 2, (4, 5), (7, 1), 11),
    "as_strided_scatter, without offset": lambda y: torch.as_strided_scatter(y, y[:4, :5] - 2, (4, 5), (7, 1)),
}


@pytest.mark.filterwarnings("error", "ignore:.*lies in memory", "ignore:OpenMP threads spin")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_are_those_of_eager(name: str, tmp_path) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    module, x = After(FUNCTIONS[name]).eval(), torch.randn(SIZE, SIZE)
    with torch.no_grad():
        wanted = module(x)
        found = torch.compile(module, backend="forebay", options={
            "budget": {"device": "1MiB", "disk": str(tmp_path)}, "strict": True})(x)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


class Weighted(nn.Module):
    """`function` of x and of weights."""

    def __init__(self, function: Callable[..., torch.Tensor], *weights: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(size) / 8) for size in weights)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, *self.weights)


def by_both(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.linear(F.relu(F.linear(x, w)), v.t()) + F.linear(F.relu(F.linear(x, w)), w.t())


WEIGHTED: dict[str, tuple[Callable[..., torch.Tensor], tuple[tuple[int, ...], ...]]] = {
    "one side transposed": (by_both, ((200, SIZE), (200, SIZE))),
    "transposed, with a bias": (lambda x, w, b: F.linear(x, w.t(), b), ((SIZE, 400), (400,))),
    "in steps": (lambda x, w: F.linear(x, w[:, ::2]), ((200, 2 * SIZE),)),
    "of one column": (lambda x, w: F.linear(x[:, :1], w.t()), ((1, 400),)),
    "a bias in steps": (lambda x, w, b: F.linear(x, w, b[::2]), ((400, SIZE), (800,))),
    "a vector": (lambda x, w: F.linear(x, w), ((SIZE,),)),
    "some columns of a matrix": (lambda x, w, b: torch.addmm(b, x, w[:, :160]), ((SIZE, 400), (160,))),
    "ours": (lambda x, w: torch.ops.forebay.linear(x, w.t()), ((SIZE, 400),)),
}


@pytest.mark.filterwarnings("ignore:.*lies in memory", "ignore:OpenMP threads spin")
@pytest.mark.parametrize("name", WEIGHTED)
def test_weights_may_have_any_strides(name: str, tmp_path) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    function, sizes = WEIGHTED[name]
    module, x = Weighted(function, *sizes).eval(), torch.randn(3, SIZE)
    with torch.no_grad():
        wanted = module(x)
        found = torch.compile(module, backend="forebay", options={
            "budget": {"device": "256KiB", "disk": str(tmp_path)}, "strict": True})(x)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:.*lies in memory", "ignore:OpenMP threads spin")
def test_a_write_beside_the_operand_is_refused(tmp_path) -> None:
    """`as_strided_scatter` into a slice may write what lies around it, of which a copy has nothing."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    module, x = After(lambda y: torch.as_strided_scatter(y[2:4], y[:4, :5], (4, 5), (7, 1), 0)).eval(), torch.randn(
        SIZE, SIZE)
    with torch.no_grad():
        wanted = module(x)
        compiled = torch.compile(module, backend="forebay", options={
            "budget": {"device": "1MiB", "disk": str(tmp_path)}})
        with pytest.warns(RuntimeWarning, match="writes memory outside its operand's elements"):
            assert torch.equal(compiled(x), wanted)


@pytest.mark.parametrize("sizes", [(8, 0), (0, 8)])
@pytest.mark.filterwarnings("ignore:.*lies in memory", "ignore:OpenMP threads spin", "ignore:Initializing zero-element")
def test_a_product_without_elements(sizes: tuple[int, int], tmp_path) -> None:
    """Beside one that streams: this was a `math domain error`."""
    torch._dynamo.reset()
    module = nn.Sequential(nn.Linear(*sizes), nn.Linear(sizes[1], 512), nn.Linear(512, 512)).eval()
    x = torch.randn(3, sizes[0])
    with torch.no_grad():
        found = torch.compile(module, backend="forebay", options={
            "budget": {"device": "600KB", "disk": str(tmp_path)}})(x)
        torch.testing.assert_close(found, module(x), rtol=1e-4, atol=1e-5)


class Biased(nn.Module):
    """A product whose weight must stream, with a bias that torch spreads or takes in steps."""

    def __init__(self, transposed: bool, bias: str) -> None:
        super().__init__()
        self.weight, self.numbers = nn.Parameter(torch.randn(512, 512)), nn.Parameter(torch.randn(1024))
        self.transposed, self.bias = transposed, bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = self.numbers[:1] if self.bias == "one" else self.numbers[::2]
        return F.linear(x, self.weight, bias) if self.transposed else torch.addmm(bias, x, self.weight)


@pytest.mark.filterwarnings("error", "ignore:.*lies in memory", "ignore:OpenMP threads spin")
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("bias", ["one", "in steps"])
def test_products_with_an_odd_bias_stream(transposed: bool, bias: str, tmp_path) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    module, x = Biased(transposed, bias).eval(), torch.randn(3, 512)
    with torch.no_grad():
        wanted = module(x)
        run = torch.compile(module, backend="forebay", options={
            "budget": {"device": (1 << 20) + (40 << 10), "disk": str(tmp_path)}, "strict": True})
        torch.testing.assert_close(run(x), wanted, rtol=1e-5, atol=1e-5)
