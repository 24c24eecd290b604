"""join_launches: how many launches a layer is left with, which ones, and where none may be joined."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from families import llama, packed, qwen3

from forebay.kernels.operators import KV_APPEND, LINEAR, ROTARY
from forebay.kernels.products.linear.joined import weights_of
from forebay.passes.lower.join_launches import join_launches
from forebay.rewriter.capture.language_model import capture_model
from forebay.rewriter.capture.step_graphs import step_graphs
from forebay.rewriter.ir.draft import Arrive, Draft, Fetch, Free
from forebay.rewriter.ir.graph import CapturedModel
from forebay.rewriter.ir.plan import Budget, GemmChoice, Limits, Plan, Schedule, Workload
from forebay.rewriter.ir.program import COMPUTE, FileSlice, Launch, Program, Record, Release, Span, TensorRef, span_of
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.pipeline.rewrite_captured import rewrite_captured
from forebay.rewriter.pipeline.step_pipeline import Pipeline
from forebay.rewriter.planning.options import Options
from forebay.rewriter.predict.simulate import simulate
from forebay.rewriter.switches import Switches
from forebay.runtime.devices.cuda.memory import least_workspace_nbytes

STREAMED = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
WORK = Workload(batch=2, prompt=9, new_tokens=4)
SIZES: dict[str, Any] = dict(hidden_size=256, intermediate_size=1024, num_attention_heads=4, num_key_value_heads=2,
                             head_dim=64, vocab_size=512, dtype=torch.bfloat16)
GPU = replace(Machine.default(), device_kind="NVIDIA H200")
LAYER = ["norm", "3 products", "turned+append", "attention", "product", "norm", "gate*up", "product"]
APART = [LAYER[0], *["product"] * 3, *LAYER[2:6], *["product"] * 3]


@pytest.fixture(scope="module")
def models() -> dict[str, CapturedModel]:
    made = {"llama": capture_model(llama(2, **SIZES)), "qwen3": capture_model(qwen3(2, **SIZES))}
    return made | {"w4": packed(made["llama"]), "deep": capture_model(llama(8, **SIZES))}


def pipeline(model: CapturedModel, cache: str = "native", machine: Machine = GPU, skip: tuple[str, ...] = ()
             ) -> Pipeline:
    lm = rewrite_captured(model, Switches(), cache)
    files = {spec.name: FileSlice("weights", i << 24, spec.nbytes) for i, spec in enumerate(lm.weights.values())}
    return Pipeline(step_graphs(lm, files, WORK, "llama"), WORK, machine, Switches(skip=skip))


def planned(made: Pipeline, cache: str = "native", **options: Any) -> Plan:
    return made.plan(Budget(8 << 20 | least_workspace_nbytes() * 2, 64 << 20), Options(cache=cache, **options))


def kinds(program: Program, layer: int = 0) -> list[str]:
    """What the launches of a layer are."""
    found = []
    for item in program.launches():
        if item.layer != layer:
            continue
        name = item.op.removeprefix("forebay.")
        if name in ("linear", "linear_q"):
            weights = len(weights_of(item))
            name = "product" if weights == 1 else "gate*up" if len(item.out) == 1 else f"{weights} products"
        name = "turned+append" if name.startswith("kv_append") and item.kwargs else name
        found.append("norm" if name == "rms_norm" else name.removesuffix("_q"))
    return found


@pytest.mark.parametrize(("name", "cache"), (("llama", "native"), ("llama", "kv4"), ("llama", "kv8"), ("w4", "native")))
def test_a_layer_of_llama_has_8_launches_of_13(models: dict[str, CapturedModel], name: str, cache: str) -> None:
    made = pipeline(models[name], cache)
    program = made.program(planned(made, cache), 1)
    assert kinds(program, 0) == kinds(program, 1) == LAYER
    apart = pipeline(models[name], cache, skip=("join_launches",))
    others = apart.program(planned(apart, cache), 1)
    found, expected = simulate(program, GPU), simulate(others, GPU)
    ran, before = (sum(stream == COMPUTE for stream, *_ in line.spans) for line in (found, expected))
    assert before - ran == 2 * (13 - 8) and found.time_s < expected.time_s


def test_norms_of_queries_and_keys_stand_between(models: dict[str, CapturedModel]) -> None:
    made = pipeline(models["qwen3"])
    assert kinds(made.program(planned(made), 1)) == [*LAYER[:2], "norm", "norm", *LAYER[2:]]


def test_host_cores_keep_their_launches(models: dict[str, CapturedModel]) -> None:
    made, apart = (pipeline(models["llama"], machine=Machine.default(), skip=skip) for skip in ((), ("join_launches",)))
    plan = planned(made)
    assert made.program(plan, 1) == apart.program(plan, 1)
    assert len(kinds(made.program(plan, 1))) == 13


@pytest.mark.parametrize(("slots", "joined"), (
    (6, LAYER), (4, [LAYER[0], "2 products", "product", *LAYER[2:]]), (3, APART)))
def test_weights_that_stream_are_joined_while_others_are_on_their_way(
    models: dict[str, CapturedModel], slots: int, joined: list[str]
) -> None:
    options = Options(slots=slots, slot_nbytes=1 << 19)
    made, apart = (pipeline(models["deep"], skip=skip) for skip in ((), ("join_launches",)))
    budget = Budget(made.smallest_budget(options) + (1 << 20), 64 << 20)
    plan, other = (each.plan(budget, options) for each in (made, apart))
    layer = next(layer for layer in range(8) if all(
        plan.streams(f"model.layers.{layer}.{name}.weight") for name in STREAMED))
    assert kinds(made.program(plan, 1), layer) == joined
    assert plan.prediction.decode_time_s <= 1.001 * other.prediction.decode_time_s


# -- drafts made by hand

X, K_DIM, WIDTH = 0, 64, 4096  # where x lies; elements of its row; bytes between two values
FORM = {"form": "nk", "accumulate": False}


def ref(at: int, *shape: int, name: str = "", dtype: str = "float16") -> TensorRef:
    stride = tuple(torch.empty(shape, device="meta").stride())
    return TensorRef("device", at * WIDTH, dtype, shape, stride, name or f"b{at}")


def product(at: int, out: TensorRef, n: int = 32, x: TensorRef | None = None, **how: Any) -> Launch:
    """x W^T with the weight that lies at `at`."""
    args = (x or ref(X, 1, K_DIM), ref(at, n, K_DIM, name=f"w{at}"), None)
    reads = tuple(span_of(r) for r in (*args[:2], *(v for v in how.values() if isinstance(v, TensorRef))))
    return Launch(COMPUTE, LINEAR.name, args, {**FORM, **how}, (out,), reads, (span_of(out),), f"p{at}", 3)


def joined(*items: Any, lead: int = 0, resident: bool = True, shapes: tuple[int, ...] = (64, 96, 128)) -> list[Any]:
    """What the pass makes of items. The plan names implementations of products of so many columns."""
    draft = Draft("step", list(items), resident={f"w{at}": Span("device", at * WIDTH, 1, f"w{at}") for at in range(40)
                                                 if resident})
    table = tuple(GemmChoice("float16", 1, n, K_DIM, "flat_32x128_s1") for n in shapes)
    plan = Plan("", "", Limits(1 << 30), WORK, Schedule(8, 1 << 20, lead), (), gemm=table)
    join_launches(draft, plan, True, lambda launch: launch)
    return draft.items


def release(of: TensorRef) -> Release:
    return Release(COMPUTE, span_of(of))


def test_products_of_one_operand_become_one_and_marks_stay_on_their_sides() -> None:
    outs = [ref(30 + i, 1, 32) for i in range(3)]
    one, two, three = (product(1 + i, out) for i, out in enumerate(outs))
    gone = ref(9, 1, 8)
    items = joined(Fetch(0), Arrive(0), one, Free(0), release(gone), Fetch(1), Arrive(1), two, Free(1), three,
                   release(ref(X, 1, K_DIM)), Fetch(2), lead=6, resident=False)
    launch = items[4]
    assert items[:4] == [Fetch(0), Arrive(0), Fetch(1), Arrive(1)]
    assert items[5:] == [Free(0), release(gone), Free(1), release(ref(X, 1, K_DIM)), Fetch(2)]
    assert launch.out == tuple(outs) and launch.args[1] == tuple(k.args[1] for k in (one, two, three))
    assert launch.impl == "flat_32x128_s1" and launch.flops == 2 * 96 * K_DIM and launch.label == "p1+p2+p3"
    assert set(launch.reads) == {s for k in (one, two, three) for s in k.reads}
    assert launch.writes == tuple(map(span_of, outs))


def test_a_gate_and_what_it_multiplies_become_one() -> None:
    gate, out = ref(30, 1, 32), ref(31, 1, 32)
    one, two = product(1, gate, activation="silu"), product(2, out, multiplier=gate)
    (launch,) = joined(one, two, release(gate))
    assert launch.out == (out,) and launch.kwargs == {**FORM, "activation": "silu"}
    assert span_of(gate) not in (*launch.reads, *launch.writes) and launch.writes == (span_of(out),)
    (launch,) = joined(one, product(2, gate, multiplier=gate))  # in the gate's place
    assert launch.out == (gate,) and span_of(gate) not in launch.reads
    assert joined(one, two) == [one, two], "who reads the gate later?"


OUTS = [ref(30 + i, 1, 32) for i in range(4)]
PRODUCT = product(1, OUTS[0])


@pytest.mark.parametrize("items", (
    (PRODUCT, product(2, OUTS[1], x=ref(20, 1, K_DIM))),  # of another operand
    (PRODUCT, product(2, OUTS[1], activation="relu")),
    (PRODUCT, product(2, OUTS[1], residual=OUTS[2])),
    (PRODUCT, product(2, OUTS[1], n=40)),  # whose sum the plan does not name
    (PRODUCT, product(2, OUTS[1], x=OUTS[0])),  # of what the first gives
    (PRODUCT, product(2, ref(X, 1, 32))),  # over what the first reads
    (PRODUCT, product(2, ref(30, 1, 32, name="again"))),  # over what the first gives
    (PRODUCT, release(ref(31, 1, 8, name="before")), product(2, OUTS[1])),  # where something ends in between
    (PRODUCT, Record(COMPUTE, 1), product(2, OUTS[1])),
    (PRODUCT, replace(product(2, OUTS[1]), stream="attend")),
    (PRODUCT, replace(product(2, OUTS[1]), kwargs={**FORM, "accumulate": True})),
    (PRODUCT, replace(product(2, OUTS[1]), kwargs={**FORM, "form": "kn"})),
    (PRODUCT, replace(product(2, OUTS[1]), args=(*PRODUCT.args[:1], ref(2, 32, K_DIM, name="w2"), ref(8, 32)))),
    (PRODUCT, replace(product(2, OUTS[1]), args=(
        PRODUCT.args[0], replace(ref(2, 32, K_DIM, name="w2"), stride=(128, 1)), None))),
    (product(1, OUTS[0], activation="silu"), product(2, OUTS[1], multiplier=OUTS[0], residual=OUTS[2]),
     release(OUTS[0])),
    (product(1, OUTS[0], activation="silu"), product(2, OUTS[1], multiplier=OUTS[2]), release(OUTS[0])),
))
def test_what_stays_as_it_is(items: tuple[Any, ...]) -> None:
    assert joined(*items) == list(items)


def test_a_plan_that_names_no_shape_or_multiplies_by_torch_joins_nothing() -> None:
    items = [PRODUCT, product(2, OUTS[1])]
    assert joined(*items, shapes=()) == items and len(joined(*items)) == 1
    assert joined(*items, lead=3, resident=False) == items and len(joined(*items, lead=4, resident=False)) == 1


def turned(keys: TensorRef, *, tables: TensorRef | None = None) -> tuple[Launch, Launch, Launch]:
    q, k, v = (ref(i, 1, heads, 1, 64) for i, heads in ((10, 4), (11, 2), (12, 2)))
    cos, sin, start = ref(13, 1, 1, 64), ref(14, 1, 1, 64), ref(15, 1, dtype="int64")
    caches = ref(50, 1, 2, 8, 64), ref(60, 1, 2, 8, 64)

    def made(operator: Any, args: tuple[TensorRef, ...], out: tuple[TensorRef, ...]) -> Launch:
        written = map(span_of, out or args[:2])
        return Launch(COMPUTE, operator.name, args, {}, out, tuple(map(span_of, args)), tuple(written), operator.name)

    return (made(ROTARY, (q, cos, sin), (ref(20, 1, 4, 1, 64),)), made(ROTARY, (k, tables or cos, sin), (keys,)),
            made(KV_APPEND, (*caches, keys, v, start), ()))


def test_rotations_and_an_append_become_one_and_keys_are_nowhere_else() -> None:
    keys = ref(21, 1, 2, 1, 64)
    q, k, append = turned(keys)
    for order in ((q, k), (k, q)):
        launch, *rest = joined(*order, release(k.args[0]), append, release(append.args[3]), release(keys))
        assert launch.args == (*append.args[:2], k.args[0], *append.args[3:]) and launch.out == q.out
        assert launch.kwargs == {"q": q.args[0], "cos": q.args[1], "sin": q.args[2]}
        assert span_of(keys) not in (*launch.reads, *launch.writes)
        assert rest == [release(k.args[0]), release(append.args[3])]


def test_rotations_stay_where_keys_are_read_again_or_tables_differ() -> None:
    keys = ref(21, 1, 2, 1, 64)
    for items in ((*turned(keys),), (*turned(keys, tables=ref(16, 1, 1, 64)), release(keys)),
                  (*turned(keys)[:2], release(keys))):
        assert joined(*items) == list(items)
    over = ref(11, 1, 4, 1, 64, name="q turned")  # queries turned take the memory of keys, which are turned before
    q, k, append = turned(keys)
    q = replace(q, out=(over,), writes=(span_of(over),))
    assert joined(k, q, append, release(keys)) == [k, q, append, release(keys)]
