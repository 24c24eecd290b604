"""What a captured module gives back: the memory, strides and identity of every result are those of eager."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from forebay.rewriter.capture.compiled_module import OffloadError, capture_module
from forebay.rewriter.capture.results import Made, Shown, made
from forebay.rewriter.ir.graph import weight_name


@pytest.fixture(autouse=True)
def no_gradients():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def through_capture(function, args, captures=None):
    """What a caller of `function` gets when its graph runs in other memory, as in an arena."""

    def backend(gm, _):
        def call(*given):
            captured = capture_module(gm, given, {})
            if captures is not None:
                captures.append(captured)
            flat = captured.flat()
            constants = dict(captured.constants)
            inputs = [constants[n] if (n := weight_name(node)) else
                      torch.empty_like(node.meta["val"], device="cpu").copy_(given[captured.inputs[node.name]])
                      for node in flat.graph.find_nodes(op="placeholder")]
            return captured.returned(given, [v.clone() for v in fx.Interpreter(flat).run(*inputs)])

        return call

    torch._dynamo.reset()
    return torch.compile(function, backend=backend, fullgraph=True, dynamic=False)(*args)


def relations(args, results):
    """Of each result: which of the arguments and the results before it is the same tensor or shares its memory, how far
    behind that one's its first element lies, and its strides (if it has elements)."""
    known = list(args)
    found = []
    for r in results:
        memory = r.untyped_storage().data_ptr() if r.numel() else None
        shared = [i for i, t in enumerate(known) if t.untyped_storage().data_ptr() == memory]
        first = r.data_ptr() - known[shared[0]].data_ptr() if shared else None
        same = [i for i, t in enumerate(known) if t is r]
        found.append((shared, first, same, r.stride() if r.numel() else (), r.shape, r.dtype))
        known.append(r)
    return found


def changed_in_place(x):
    y = x * 2
    flat = y.view(-1)
    flat.add_(1)
    row = y[1]
    row.zero_()
    return y, flat, row


def product_in_place(x):
    y = x * 2  # in the layout of x; without the writing in place, the product would be row-major
    y.addmm_(torch.ones(4, 3), torch.ones(3, 6))
    return y, y[1], y.t()


def attention(x):
    q = x.unflatten(-1, (4, 3)).transpose(1, 2)
    y = F.scaled_dot_product_attention(q, q, q)
    return y, y.transpose(1, 2), q


CASES = {
    "views of an argument": (lambda x, w: (x[1:], x.view(-1), w.t(), x @ w, x.detach()), [(4, 6), (6, 5)]),
    "the argument itself": (lambda x: (x, x + 1, x), [(4, 6)]),
    "a changed argument": (lambda x: (x.add_(1), x.t(), x.t().mul_(2), x[2]), [(4, 6)]),
    "results of each other": (changed_in_place, [(4, 6)]),
    "a product in place": (product_in_place, [(4, 6)]),
    "an argument that takes a product": (lambda x, a, b: (x.addmm_(a, b), x[1]), [(4, 6), (4, 3), (3, 6)]),
    "halves": (lambda x: (x * 2).chunk(2, 1), [(4, 6)]),
    "one column": (lambda x: ((x * 2)[:, 1],), [(4, 6)]),
    "expanded": (lambda x: ((x * 2)[:, :1].expand(4, 9), x[:1].expand(3, 6)), [(4, 6)]),
    "the same twice": (lambda x: (y := x * 2, y, y.detach()), [(4, 6)]),
    "other types": (lambda x: ((y := x * 2).view(torch.int16), y, x.view(torch.int32)), [(4, 6)]),
    "a view or a copy": (lambda x: (x.contiguous(), x.t().contiguous(), x.reshape(-1), x.t().reshape(-1)), [(4, 6)]),
    "windows": (lambda x: ((x * 2).unfold(1, 3, 1), x.unfold(0, 2, 1)), [(4, 6)]),
    "attention": (attention, [(2, 5, 12)]),
    "empty": (lambda x: (x[:, 3:3] * 2, x[4:], (x * 2)[4:]), [(4, 6)]),
    "scalars": (lambda x: (x.sum(), x[0, 0]), [(4, 6)]),
}


@pytest.mark.parametrize("memory", ["whole", "turned", "every second"])
@pytest.mark.parametrize("name", CASES)
def test_results_share_memory_and_have_strides_as_from_eager(name, memory):
    function, shapes = CASES[name]

    def arguments():
        torch.manual_seed(0)
        match memory:
            case "whole":
                return [torch.randn(shape) for shape in shapes]
            case "turned":
                return [torch.randn(shape[::-1]).permute(*reversed(range(len(shape)))) for shape in shapes]
        return [torch.randn(1 + shape[0] * 2, *shape[1:])[1::2] for shape in shapes]

    mine, theirs = arguments(), arguments()
    try:
        expected = function(*theirs)
    except RuntimeError as error:
        pytest.skip(f"eager refuses: {error}")
    got = through_capture(function, mine)
    assert relations(mine, got) == relations(theirs, expected)
    for ours, eager in zip((*mine, *got), (*theirs, *expected), strict=True):
        torch.testing.assert_close(ours, eager)


def test_convolutions_keep_the_layout_that_their_weight_asks_for():
    args = [torch.randn(2, 8, 6, 6), torch.randn(16, 8, 3, 3).to(memory_format=torch.channels_last)]
    (got,) = through_capture(lambda x, w: (F.conv2d(x, w, padding=1),), args)
    assert got.stride() == F.conv2d(*args, padding=1).stride() == (576, 1, 96, 16)
    torch.testing.assert_close(got, F.conv2d(*args, padding=1))


def test_what_only_shows_arguments_is_not_computed():
    captures = []
    through_capture(lambda x: (x[1:], x * 2, x.t()), [torch.randn(3, 4)], captures)
    (captured,) = captures
    assert [type(r) for r in captured.results] == [Shown, Made, Shown] and len(made(captured.results)) == 1
    assert [n.op for n in captured.graph.graph.nodes] == ["placeholder", "call_function", "output"]


def test_an_argument_shown_as_elements_of_another_size_is_refused():
    with pytest.raises(OffloadError, match=r"memory of input 0 \(torch.float32\) as torch.int16"):
        through_capture(lambda x: (x.view(torch.int16),), [torch.randn(3, 4)])
