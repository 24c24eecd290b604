"""FOREBAY_BISECT passes on sound pipelines and names the first pass that changes a result."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from budgets import operators_nbytes
from families import captured, llama, packed
from tiny import aten, chain, flat_graph, planned
from torch import fx

import forebay.rewriter.pipeline.pass_list as pipeline
from forebay.language_model import LanguageModel
from forebay.open_model import open_model
from forebay.rewriter.capture.step_graphs import step_graphs
from forebay.rewriter.ir.draft import Draft
from forebay.rewriter.ir.plan import Budget, Workload
from forebay.rewriter.ir.program import Copy, FileSlice, Program
from forebay.rewriter.ir.schedule.batch_schedule import BatchSchedule
from forebay.rewriter.ir.schedule.micro_batches import MicroBatches
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.pipeline.rewrite_captured import rewrite_captured
from forebay.rewriter.pipeline.step_pipeline import Pipeline
from forebay.rewriter.planning.options import Options
from forebay.rewriter.switches import Switches
from forebay.rewriter.verify.bisect import Bisection, PassChangedResult

SMALL = Budget(30_000)


def drop_last_relu(gm: fx.GraphModule) -> None:
    last = [n for n in gm.graph.nodes if n.target is aten.relu.default][-1]
    last.replace_all_uses_with(last.args[0])
    gm.graph.erase_node(last)


@pytest.mark.parametrize("broken", ["insert_transfers", "select_gemm", "allocate_buffers"])
def test_names_the_pass_that_breaks_the_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    passes = []
    for each in pipeline.PASSES:
        def run(gm: fx.GraphModule, *given: object, run_pass=each.run) -> object:
            made = run_pass(gm, *given)
            if run_pass.__name__ == broken:
                drop_last_relu(gm)
            return made

        run.__name__ = each.name
        passes.append(replace(each, run=run) if each.name == broken else each)
    monkeypatch.setattr(pipeline, "PASSES", tuple(passes))
    model = chain(tmp_path, width=64)
    with pytest.raises(PassChangedResult, match=rf"{broken} is the first pass .* output 0 differs by"):
        planned(model, SMALL, switches=Switches(bisect=True))


@pytest.mark.parametrize("broken", ["lower", "hoist_prefetch", "place_copies"])
def test_names_the_pass_that_breaks_the_lowered_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
                                                     ) -> None:
    """Two copies of equal size bring one another's bytes: the proof knows no contents but by their names."""
    def run(step: object, *given: object) -> object:
        made = known[broken].run(step, *given)
        changed = step if made is None else made
        if isinstance(changed, Draft):
            first, second = changed.moves[:2]
            changed.moves[:2] = [replace(first, source=second.source), replace(second, source=first.source)]
            return made
        assert isinstance(changed, Program)
        first, second = (item for item in changed.prologue if isinstance(item, Copy))
        swapped = {first: replace(first, src=second.src), second: replace(second, src=first.src)}
        return replace(changed, prologue=tuple(swapped.get(item, item) for item in changed.prologue))

    known = {each.name: each for each in pipeline.PASSES}
    run.__name__ = broken
    monkeypatch.setattr(pipeline, "PASSES", tuple(
        replace(each, run=run) if each.name == broken else each for each in pipeline.PASSES))
    with pytest.raises(PassChangedResult, match=rf"{broken} is the first pass .* output 0 differs by"):
        planned(chain(tmp_path, width=64), SMALL, switches=Switches(bisect=True))


@pytest.mark.parametrize(("streams", "micro_batches"), [(True, 1), (False, 1), (True, 2)])
def test_steps_of_a_language_model_are_compared_to_the_last(monkeypatch: pytest.MonkeyPatch, streams: bool,
                                                            micro_batches: int) -> None:
    """Decoding and prefill, looked up rows, tiles, tied weights and constants; a prefill with a cache of its own. Of
    several micro-batches the graph is one's, and stays so: only graphs are compared."""
    compared = []
    compare = Bisection.compare_step
    monkeypatch.setattr(Bisection, "compare_step", lambda self, run, name: (compare(self, run, name),
                                                                          compared.append(name)))
    model = captured("llama")
    files, end = {}, 52
    for spec in model.weights.values():
        files[spec.name] = FileSlice("model.safetensors", end, spec.nbytes)
        end += spec.nbytes
    workload = Workload(batch=2 * micro_batches, prompt=8, new_tokens=4)
    graphs = step_graphs(model, files, workload, "bisected", batching=BatchSchedule(MicroBatches(micro_batches)))
    made = Pipeline(graphs, workload, Machine.default(), Switches(bisect=True))
    plan = made.plan(Budget(made.smallest_budget() + 30_000 if streams else 1 << 30))
    assert (plan.prediction.streamed_nbytes > 0) is streams and plan.schedule.prefill_chunk > 1
    names = [each.name for each in pipeline.PASSES if each.phase == "lowered"]
    assert len(names) == 9 and compared == (2 * names if micro_batches == 1 else []), "a decode step and a chunk"


def test_a_sound_pipeline_passes(tmp_path: Path) -> None:
    plan, _ = planned(chain(tmp_path, width=64), SMALL, switches=Switches(bisect=True))
    assert plan.prediction.streamed_nbytes > 0, "there were transfers to compare"


def graph(factor: float, dtype: torch.dtype = torch.float32) -> fx.GraphModule:
    return flat_graph(lambda g, n: (g.call_function(aten.mul.Tensor, (n["x"], factor)),),
                      {"x": torch.ones(8, 8, dtype=dtype)}, {})


@pytest.mark.parametrize(("dtype", "within", "beyond"), [(torch.float32, 2.00001, 2.001), (torch.bfloat16, 2.01, 2.2)])
def test_rounding_is_allowed_and_more_is_not(dtype: torch.dtype, within: float, beyond: float) -> None:
    bisection = Bisection(graph(2.0, dtype))
    bisection.compare(graph(within, dtype), "close")
    with pytest.raises(PassChangedResult, match="far"):
        bisection.compare(graph(beyond, dtype), "far")


def test_a_nan_is_a_change() -> None:
    with pytest.raises(PassChangedResult):
        Bisection(graph(2.0)).compare(graph(float("nan")), "nan")


def test_writes_into_inputs_do_not_leak_into_the_next_comparison() -> None:
    def build(g: fx.Graph, n: dict[str, fx.Node]) -> object:
        kept = g.call_function(aten.clone.default, (n["x"],))
        g.call_function(aten.mul_.Tensor, (n["x"], 3.0))
        return (kept,)

    gm = flat_graph(build, {"x": torch.ones(4)}, {})
    bisection = Bisection(gm)
    bisection.compare(gm, "same")
    bisection.compare(gm, "same again")


def broken_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the pass of this name also halve the last product or activation of the step graph."""
    def run(gm: fx.GraphModule, *given: object) -> None:
        known[name].run(gm, *given)
        if gm.graph.find_nodes(op="call_module"):
            output = gm.graph.output_node()
            (value,) = output.all_input_nodes
            with gm.graph.inserting_before(output):
                half = gm.graph.call_function(aten.mul.Tensor, (value, 0.5))
            half.meta = {"val": value.meta["val"], "layer": -1, "made_by": name}
            output.replace_input_with(value, half)

    known = {each.name: each for each in pipeline.PASSES}
    run.__name__ = name
    passes = [replace(each, run=run) if each.name == name else each for each in pipeline.PASSES]
    monkeypatch.setattr(pipeline, "PASSES", passes)


@pytest.mark.parametrize("broken", ["fuse_rms_norm", "fuse_residual", "shorten_lifetimes"])
def test_passes_on_captured_graphs_are_compared_as_well(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    rewrite_captured(captured("llama"), Switches(bisect=True))
    broken_pass(broken, monkeypatch)
    with pytest.raises(PassChangedResult, match=f"{broken} is the first pass"):
        rewrite_captured(captured("llama"), Switches(bisect=True))


@pytest.mark.parametrize("family", ["llama", "gpt2"])  # weights [N, K], and [K, N]
@pytest.mark.parametrize("broken", ["", "quantize_weights", "fuse_dequantize"])
def test_passes_that_read_packed_rows_are_compared(monkeypatch: pytest.MonkeyPatch, family: str, broken: str) -> None:
    """With a cache of packed rows, which rounds, before them."""
    model = packed(captured(family))
    if broken:
        broken_pass(broken, monkeypatch)
    with pytest.raises(PassChangedResult, match=f"{broken} is the first pass") if broken else nullcontext():
        rewrite_captured(model, Switches(bisect=True), "kv8")


STAGED = {"micro_batches": 2, "cache_tokens": 4, "prefill_chunk": 4}


@pytest.mark.parametrize("options", [Options(cache_tier="disk", **STAGED), Options(cache_tier="host", **STAGED),
                                    Options(cache_tier="host", cpu_attention=True, **STAGED)])
def test_steps_with_caches_elsewhere_run_under_bisection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: Options
) -> None:
    """Compared are the passes up to lowering; Programs whose caches come for their turns are run as ever."""
    torch.manual_seed(0)
    config = llama(2, hidden_size=64, intermediate_size=160, vocab_size=200, tie_word_embeddings=False)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    ids, compared = torch.tensor([[5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 15, 16]]), list[str]()
    compare = Bisection.compare

    def noted(self: Bisection, gm: fx.GraphModule, name: str, rounds: bool = False) -> None:
        compared.append(name)
        compare(self, gm, name, rounds)

    def tokens() -> list[list[int]]:
        with LanguageModel(*opened, Budget(device, 1 << 21, str(tmp_path)), work, options, Machine.default()) as lm:
            assert lm.plan.schedule.batching.cache.staged
            return lm.generate(ids, max_new_tokens=6, eos_token_id=None, pad_token_id=0).tolist()

    opened, work = open_model(tmp_path), Workload(2, 8, 8)
    device = (1 << 20) + operators_nbytes(opened, work, options, 1 << 21)
    expected = tokens()
    monkeypatch.setenv("FOREBAY_BISECT", "1")
    monkeypatch.setattr(Bisection, "compare", noted)
    assert tokens() == expected and {"fuse_rms_norm", "insert_transfers", "allocate_buffers"} <= set(compared)
