"""The records of operators: what they say is so, and nobody else knows operators by name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from forebay.kernels import operators
from forebay.kernels.cache.kv_append_q.operator import KV_APPEND_Q
from forebay.kernels.formats.table import CacheFormat, packed_caches
from forebay.kernels.operator import Cost, Operator, Tensors
from forebay.kernels.operators import OPERATORS

ROOT = Path(__file__).parents[2]
PARTS = ("passes", "rewriter", "runtime", "src/forebay")
MARKERS = {"forebay::layer_run"}  # capture's own, gone before there is a plan


def sources() -> list[Path]:
    found = [path for part in PARTS for path in (ROOT / part).rglob("*.py")]
    return [path for path in found if not any(place.is_symlink() for place in (path, *path.parents))]


def test_every_operator_of_ours_has_a_record() -> None:
    registered = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("forebay::")}
    assert {operator.name.replace(".", "::") for operator in OPERATORS} == registered - MARKERS
    assert len({operator.name for operator in OPERATORS}) == len(OPERATORS)


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
def test_a_record_names_arguments_that_are_there(operator: Operator) -> None:
    assert operators.find(operator.name) is operator and operators.of_target(operator.overload) is operator
    assert set(operator.overwrites) | set(operator.caches) <= set(operator.arguments)
    assert not set(operator.overwrites) & set(operator.writes)
    if operator.score_ranges:
        at = operator.arguments.index("phi")
        assert operator.arguments[at : at + 3] == ("phi", "low", "high")
        assert all(low < 0 < high for low, high in operator.score_ranges.values())
    assert set(operator.bind) <= {"cpu", "cuda"} and set(operator.workspace) <= set(operator.bind)


@pytest.mark.parametrize("stored", packed_caches().values(), ids=lambda stored: stored.name)
def test_operators_over_rows_take_what_those_over_values_take(stored: CacheFormat) -> None:
    for plain, name in ((operators.KV_APPEND, stored.append), (operators.ATTENTION, stored.attend)):
        packed = operators.find(name)
        assert packed is not None
        kept = len([a for a in plain.overload._schema.arguments if not a.has_default_value()])
        refused = ("sinks", "until")  # by quantize_cache
        given = tuple(name for name in plain.arguments[kept:] if name not in refused)
        assert packed.arguments[kept:] == (*stored.arguments(64), *given), (
            "what quantize_cache appends to what is given")
        assert [plain.arguments.index(n) for n in plain.caches] == [packed.arguments.index(n) for n in packed.caches]


def test_torchs_own_operators_have_no_record() -> None:
    assert operators.find("aten.add.out") is None and operators.of_target(torch.ops.aten.add.Tensor) is None
    assert operators.of_target("block_0") is None


@pytest.mark.parametrize("form", ("nk", "kn"))
def test_cost_of_a_product(form: str) -> None:
    x, weight = torch.empty(2, 3, 16), torch.empty(*((8, 16) if form == "nk" else (16, 8)))
    out, times = torch.empty(2, 3, 8), torch.empty(2, 3, 8)
    use = Tensors((x, weight, None), {"form": form, "accumulate": False, "multiplier": times}, (out,))
    read = x.nbytes + weight.nbytes + times.nbytes
    assert operators.LINEAR.cost(use) == Cost(2 * 6 * 8 * 16, read, out.nbytes)
    added = use._replace(kwargs={**use.kwargs, "accumulate": True})
    assert operators.LINEAR.cost(added).read_nbytes == read + out.nbytes


def test_cost_of_experts_by_name_is_shared_by_the_launches_that_have_them() -> None:
    x, index, weights, table = torch.empty(2, 32), torch.zeros(2, 4, dtype=torch.int64), torch.empty(2, 4), (
        torch.empty(12, 3 * 32 * 16))
    args = (x, index, weights, table, 16, False, "silu", True, False, False, False, False, 0.0, 0.0)
    use = Tensors(args, {"entries": torch.zeros(64, dtype=torch.int64), "count": 64, "share": 0.25}, (x,))
    small = x.nbytes + index.nbytes + weights.nbytes
    assert operators.EXPERTS.cost(use) == Cost(2 * 2 * 3 * 32 * 16, int(1.9375 * table[0].nbytes) + small,
                                                x.nbytes)  # 16 (1 - (1 - 4 / 64)^2) of them
    whole = use._replace(args=(*args[:3], torch.empty(64, 3 * 32 * 16), *args[4:]), kwargs={})
    assert operators.EXPERTS.cost(whole) == Cost(2 * 8 * 3 * 32 * 16, int(7.75 * table[0].nbytes) + small, x.nbytes)
    half = whole._replace(args=(*args[:3], torch.empty(32, 3 * 32 * 16), *args[4:]), kwargs={"among": 64})
    assert operators.EXPERTS.cost(half) == Cost(2 * 4 * 3 * 32 * 16, int(3.875 * table[0].nbytes) + small, x.nbytes)


def test_cost_of_attention_counts_what_each_query_sees() -> None:
    q, k, out = torch.empty(2, 4, 3, 8), torch.empty(2, 2, 10, 8), torch.empty(2, 3, 4, 8)
    v, start = torch.empty_like(k), torch.zeros(2, dtype=torch.int64)
    cost = operators.ATTENTION.cost(Tensors((q, k, v, start, 1.0, 0, 0.0), {}, (out,)))
    assert cost.flops == 2 * 4 * 8 * 4 * (8 + 9 + 10)
    assert (cost.read_nbytes, cost.written_nbytes) == (q.nbytes + 2 * k.nbytes + start.nbytes, out.nbytes)


def test_cost_of_appending_is_of_the_new_positions() -> None:
    k, start = torch.empty(2, 2, 3, 64), torch.zeros(2, dtype=torch.int64)
    for length in (10, 1000):
        cache = torch.empty(2, 2, length, 64)
        cost = operators.KV_APPEND.cost(Tensors((cache, cache, k, k, start), {}, ()))
        assert cost == Cost(0, 2 * k.nbytes + start.nbytes, 2 * k.nbytes)
        rows = torch.empty(2, 2, length, 40, dtype=torch.uint8)
        cost = KV_APPEND_Q.cost(Tensors((rows, rows, k, k, start, 4, 32), {}, ()))
        assert cost == Cost(0, 2 * k.nbytes + start.nbytes, 2 * 2 * 2 * 3 * 40)


NAMESPACES = ("aten", "forebay", "prims")
KINDS = {"placeholder", "call_function", "call_module", "call_method", "get_attr", "output", "root"}  # fx's node.op
SEARCHES = {"startswith", "endswith", "removeprefix", "removesuffix", "find", "index", "count", "partition",
            "rpartition", "split", "match", "search", "fullmatch", "get"}
WITHOUT_OPERATOR = {"copy"}  # what a launch may be called beside operators


def compared_names(tree: ast.AST) -> Iterator[ast.expr]:
    """Where the name of an operator is read: the text of a target, or a launch's `op`, that is compared, looked up or
    searched. Comparing `op` with one of fx's kinds of nodes is none."""
    for node in ast.walk(tree):
        sides: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
        elif isinstance(node, ast.Subscript):
            sides = [node.slice]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in SEARCHES and (
                ast.unparse(node.func) != "operators.find"):
            sides = [node.func.value, *node.args]
        told = {inner.value for side in sides for inner in (getattr(side, "elts", None) or [side])
                if isinstance(inner, ast.Constant)}
        if not (told and told <= KINDS | WITHOUT_OPERATOR):
            yield from (side for side in sides if is_name(side))


def is_name(node: ast.expr) -> bool:
    """Whether an expression is the text of an operator: str(x.target), x.target.__name__, f"{x.target}", x.op."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("str", "repr"):
        return any(isinstance(arg, ast.Attribute) and arg.attr in ("target", "overload", "op") for arg in node.args)
    if isinstance(node, ast.JoinedStr):
        return any(isinstance(inner, ast.Attribute) and inner.attr in ("target", "overload")
                   for inner in ast.walk(node))
    if isinstance(node, ast.Attribute) and node.attr in ("__name__", "_name", "_opname", "_overloadname"):
        return isinstance(node.value, ast.Attribute) and node.value.attr in ("target", "overload", "overloadpacket")
    return isinstance(node, ast.Attribute) and node.attr == "op"


def told_names(tree: ast.AST) -> Iterator[str]:
    """Strings that are names of operators, of ours or of torch's, or begin one that is put together."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 80:
            begin, dot, rest = node.value.removeprefix("call:").replace("::", ".").partition(".")
            if begin in NAMESPACES and dot and (not rest or rest.replace(".", "").replace("_", "").isalnum()):
                yield node.value


# What is no operator's name there, or is compared with names made of torch's operators themselves.
READERS = {
    "rewriter/verify/items.py": {"launch.op"},  # which operators fill what they write
    "rewriter/predict/item_costs.py": {"item.op"},  # which read as much as they write
    "passes/lower/lower.py": {"str(node.target)"},  # names of inputs
    "rewriter/capture/step_graphs.py": {"str(node.target)"},  # names of inputs
    "src/forebay/exported/modules.py": {"str(spec.target)"},  # names of parameters
}


def test_no_module_outside_kernels_knows_an_operator_by_name() -> None:
    """Not by a string of its name, whole or put together, nor by comparing the text of a node's target. Modules and
    files of ours ("forebay.api", "forebay.json") are no operators."""
    named, compared = [], []
    for path in sources():
        name, tree = str(path.relative_to(ROOT)), ast.parse(path.read_text())
        named += [(name, told) for told in told_names(tree) if told not in MARKERS and not is_place(told)]
        compared += [(name, ast.unparse(side)) for side in compared_names(tree)
                     if ast.unparse(side) not in READERS.get(name, ())]
    assert len(sources()) > 100 and named == [] and compared == []


def is_place(name: str) -> bool:
    place = name.split(".")[1:]
    return name.endswith(".json") or (name.startswith("forebay.") and any(
        folder.joinpath(*place).with_suffix(".py").exists() or (place and folder.joinpath(*place).is_dir())
        for folder in (ROOT, ROOT / "src/forebay")))


@pytest.mark.parametrize("source", (
    'if launch.op == "forebay.linear": pass', 'name = "aten.add.out"', 'if "linear" in str(node.target): pass',
    'str(node.target).endswith("mm.default")', 'TABLE = {"forebay::linear": 1}', 'TABLE[launch.op]',
    'TABLE.get(str(item.op))', 'node.target.__name__ == name', 'launch.op.startswith(prefix)',
    'name == f"{node.target}"', '"call:aten." + name', 'f"forebay.{kind}"',
))
def test_what_would_know_an_operator_by_name_is_seen(source: str) -> None:
    tree = ast.parse(source)
    assert [*told_names(tree), *compared_names(tree)]


def test_what_knows_no_operator_by_name_is_let_pass() -> None:
    tree = ast.parse('node.op == "placeholder" or node.target is aten.add.Tensor or find(launch.op) is None '
                     'or launch.op == "copy"')
    assert [*told_names(tree), *compared_names(tree)] == []


def test_kernels_import_nothing_of_ours_but_kernels() -> None:
    upward = []
    for path in (ROOT / "kernels").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [
                alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            upward += [(str(path), m) for m in modules if m.split(".")[0] == "forebay" and m.split(".")[1] != "kernels"]
    assert upward == [] and not (ROOT / "kernels" / "__init__.py").exists()


def test_triton_is_imported_by_gpu_files_alone() -> None:
    for path in (ROOT / "kernels").rglob("*.py"):
        tree = ast.parse(path.read_text())
        takes = any(alias.name.split(".")[0] == "triton" for node in ast.walk(tree) if isinstance(node, ast.Import)
                    for alias in node.names)
        assert not takes or path.stem.startswith("gpu") or path.parent.name == "gpu_support", path
