import copy
import functools
import logging
import resource
from typing import Any

import pytest
import torch
import transformers
from selection import without
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from forebay.kernels import operators
from forebay.rewriter.capture.cache_name import find_cache
from forebay.rewriter.capture.concretise import concretise, inline_blocks
from forebay.rewriter.capture.language_model import CaptureError, capture_model
from forebay.rewriter.capture.own_attention import FAMILIES as RECORDS
from forebay.rewriter.capture.recurrences import adopt_recurrences
from forebay.rewriter.ir.graph import META, CapturedModel, weight_name
from forebay.rewriter.ir.state import KV_TENSORS, StateInput
from tests.families import FAMILIES, REFUSED, VOCAB, captured
from tests.small_experts import small_config

_NEW = 3  # decode steps
_CACHE_LENGTH = 24


@functools.cache
def eager_model(family: str) -> torch.nn.Module:
    """A model whose weights are large enough for positions, windows and caps to show in the logits."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES[family](), attn_implementation="eager").eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return model


class Runner:
    """Calls a captured model on real tensors, as blocks or flat, and keeps its cache."""

    def __init__(self, lm: CapturedModel, model: torch.nn.Module, batch: int, flat: bool) -> None:
        self.lm, self.flat = lm, flat
        self.state = model.state_dict()
        # Unwritten cache holds large numbers: reading any of it would show.
        self.cache = [
            [torch.full(each.sized(batch, _CACHE_LENGTH), 50.0, dtype=each.dtype) for each in kv.tensors]
            for (kv,) in lm.states
        ]

    def __call__(
        self, tokens: torch.Tensor, start: torch.Tensor, last: torch.Tensor, length: torch.Tensor | None = None
    ) -> torch.Tensor:
        bound = {"input_ids": tokens, "start": start, "last": last} | ({} if length is None else {"length": length})
        for node in self.lm.step.graph.find_nodes(op="placeholder"):
            mark = node.meta.get(META)
            if isinstance(mark, StateInput):
                bound[node.name] = self.cache[mark.layer][KV_TENSORS.index(mark.tensor)]
            elif (name := weight_name(node)) is not None:
                bound[node.name] = self.lm.constants[name] if name in self.lm.constants else self.state[name]
        step = self.lm.step
        if self.flat:
            step = inline_blocks(concretise(step, {name: t.to("meta") for name, t in bound.items()}))
        with torch.no_grad():
            return step(*bound.values())


@pytest.mark.covering(1)
@pytest.mark.parametrize(("flat", "batch", "chunk"), [(False, 1, 16), (False, 3, 5), (True, 1, 5), (True, 3, 16)],
                         ids=["blocks", "blocks, chunked", "flat, chunked", "flat"])
@pytest.mark.parametrize("family", without(FAMILIES, ("gemma2", "phi3", "qwen3", "qwen2", "mistral")))
def test_logits_equal_eager(family, chunk, batch, flat):
    model = eager_model(family)
    torch.manual_seed(1)
    lengths = torch.tensor([9, 4, 7][:batch])
    tokens = torch.randint(3, VOCAB, (batch, int(lengths.max()) + _NEW))
    with torch.no_grad():  # each sequence by itself: no padding, no mask
        expected = [model(row[None, : n + _NEW]).logits[0] for row, n in zip(tokens, lengths, strict=True)]
    run = Runner(captured(family), model, batch, flat)

    prompt = tokens[:, : int(lengths.max())]
    got = torch.full((batch, VOCAB), float("nan"))
    for begin in range(0, prompt.shape[1], chunk):
        part = prompt[:, begin : begin + chunk]
        last = lengths - 1 - begin
        ends = (last >= 0) & (last < part.shape[1])
        logits = run(part, torch.full((batch,), begin), last.clamp(0, part.shape[1] - 1))
        assert logits.shape == (batch, VOCAB)
        got[ends] = logits[ends]
    steps = [got]
    for i in range(_NEW):
        token = torch.stack([row[n + i] for row, n in zip(tokens, lengths, strict=True)])[:, None]
        steps.append(run(token, lengths + i, torch.zeros(batch, dtype=torch.int64)))

    want = torch.stack([e[n - 1 : n + _NEW] for e, n in zip(expected, lengths, strict=True)], 1)
    scale = want.abs().max()
    assert (want[0] - want[1]).abs().max() > 0.05 * scale
    torch.testing.assert_close(torch.stack(steps), want, rtol=0, atol=1e-5 * max(1.0, float(scale)))


@pytest.mark.parametrize("family", FAMILIES)
def test_graph_keeps_its_contract(family):
    lm = captured(family)
    step = lm.step
    names = [n.name for n in step.graph.find_nodes(op="placeholder")]
    layers = len(lm.layers)
    caches = [f"cache_{s}_{i}" for i in range(layers) for s in "kv"]
    assert names[: 3 + 2 * layers] == ["input_ids", "start", "last", *caches]
    marked = [weight_name(n) for n in step.graph.find_nodes(op="placeholder")[3 + 2 * layers :]]
    assert marked == [*lm.weights, *lm.constants]

    shapes = {n: tuple(p.shape) for n, p in eager_model(family).named_parameters()}
    assert {n: w.shape for n, w in lm.weights.items()} == shapes
    calls = step.graph.find_nodes(op="call_module", target=lm.layers[0])
    assert [n.meta["layer"] for n in calls] == [i for i, name in enumerate(lm.layers) if name == lm.layers[0]]
    for block in lm.blocks().values():
        count = {
            op: len(block.graph.find_nodes(op="call_function", target=getattr(torch.ops.forebay, op).default))
            for op in ("attention", "kv_append")
        }
        assert count == {"attention": 1, "kv_append": 1}
    inner = {weight_name(n) for n in step.get_submodule(lm.layers[0]).graph.find_nodes(op="placeholder")} - {None}
    assert inner == set(lm.layer_weights[0])
    assert all(name in lm.weights for mapping in lm.layer_weights for name in mapping.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_hold_no_checks_no_state_and_no_meta_device(family):
    lm = captured(family)
    for gm in (lm.step, *lm.blocks().values()):
        for node in gm.graph.nodes:
            assert node.op != "get_attr"
            assert "assert" not in str(node.target) and "sym_constrain" not in str(node.target)
            assert "dropout" not in str(node.target) and "detach" not in str(node.target)
            assert node.kwargs.get("device") != torch.device("meta")
            if node.op == "call_function" and not node.users:
                assert node.target is operators.KV_APPEND.overload
        assert not list(gm.parameters()) and not list(gm.buffers())


def test_equal_layers_share_one_block_and_different_ones_do_not():
    assert captured("llama").layers == ("block_0",) * 3
    gemma = captured("gemma2")
    assert gemma.layers == ("block_0", "block_1", "block_0", "block_1")
    assert [kv.window for (kv,) in gemma.states] == [6, 0, 6, 0]
    assert {kv.window for (kv,) in captured("mistral").states} == {6}


def test_layers_scaled_by_their_index_are_different_kinds():
    config = FAMILIES["gpt2"](3, scale_attn_by_inverse_layer_idx=True)
    lm = capture_model(config)
    assert lm.layers == ("block_0", "block_1", "block_2")
    scales = [
        b.graph.find_nodes(op="call_function", target=operators.ATTENTION.overload)[0].args[4]
        for b in lm.blocks().values()
    ]
    assert scales == [pytest.approx(0.25 / (i + 1)) for i in range(3)]


def test_layer_that_computes_with_its_index_is_traced_once_per_layer(monkeypatch):
    layer = transformers.models.llama.modeling_llama.LlamaDecoderLayer
    whole = layer.forward

    def forward(self, hidden_states, *args, **kwargs):
        return whole(self, hidden_states, *args, **kwargs) * (self.self_attn.layer_idx + 1)

    monkeypatch.setattr(layer, "forward", forward)
    lm = capture_model(FAMILIES["llama"](2))
    assert lm.layers == ("block_0", "block_1")
    factors = [b.graph.output_node().args[0].args[1] for b in lm.blocks().values()]
    assert factors == [1, 2]


def test_tied_weight_is_one():
    lm = captured("opt")
    assert lm.weights["model.decoder.embed_tokens.weight"].ties == ("lm_head.weight",)
    assert "lm_head.weight" not in lm.weights
    model = eager_model("opt")
    assert lm.weight_nbytes == sum(p.numel() * p.element_size() for p in model.parameters())
    assert not any(spec.ties for spec in captured("llama").weights.values())


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_neox", "phi3"])
def test_constants_have_their_real_values(family):
    lm = captured(family)
    buffers = dict(eager_model(family).named_buffers())
    assert lm.constants
    for name, value in lm.constants.items():
        torch.testing.assert_close(value, buffers[name], rtol=0, atol=0)


def test_position_limit_is_known():
    assert all(captured(family).max_positions == 128 for family in FAMILIES)


@pytest.mark.parametrize("family", REFUSED)
def test_unsupported_family_is_refused_by_name(family):
    config = REFUSED[family]()
    with pytest.raises(CaptureError, match=rf"LMHeadModel .*'{config.model_type}'.* its attention does not go"):
        capture_model(config)


@pytest.mark.parametrize("family", REFUSED)
def test_class_that_only_claims_support_is_refused(family, monkeypatch):
    config = REFUSED[family]()
    cls = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    monkeypatch.setattr(cls, "_supports_attention_backend", True)
    with pytest.raises(CaptureError, match=rf"model type '{config.model_type}'\) cannot be captured: "):
        capture_model(config)


def test_layer_that_computes_attention_itself_is_refused(monkeypatch):
    module = transformers.models.llama.modeling_llama
    monkeypatch.setattr(
        module.ALL_ATTENTION_FUNCTIONS, "get_interface", lambda *args: module.eager_attention_forward, raising=True
    )
    with pytest.raises(CaptureError, match=r"LlamaForCausalLM.*0 calls of forebay.attention"):
        capture_model(FAMILIES["llama"](2))


def test_config_and_module_of_another_sort_are_refused():
    with pytest.raises(CaptureError, match="'vit' is not a causal language model"):
        capture_model(transformers.ViTConfig())
    with pytest.raises(CaptureError, match="Linear is neither"):
        capture_model(torch.nn.Linear(2, 2))


def test_module_changed_since_its_config_is_refused():
    model = copy.deepcopy(eager_model("llama"))
    model.model.layers[1].mlp.up_proj = torch.nn.Linear(64, 32, bias=False)
    with pytest.raises(CaptureError, match=r"layers\.1\.mlp\.up_proj\.weight"):
        capture_model(model)


def test_module_in_memory_gives_the_graph_of_its_config():
    model = eager_model("llama")
    before = {n: p.data_ptr() for n, p in model.named_parameters()}
    lm = capture_model(model)
    assert str(lm.step.graph) == str(captured("llama").step.graph)
    assert {n: p.data_ptr() for n, p in model.named_parameters()} == before
    assert model.config._attn_implementation == "eager"
    model(torch.tensor([[5]]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtype_overrides_the_config(dtype):
    lm = capture_model(FAMILIES["llama"](2), dtype=dtype)
    assert lm.dtype == dtype
    assert {w.dtype for w in lm.weights.values()} == {dtype} == {kv.dtype for (kv,) in lm.states}
    assert lm.constants["model.rotary_emb.inv_freq"].dtype == torch.float32
    assert lm.step.graph.output_node().args[0].meta["val"].dtype == dtype


def test_all_positions_keeps_every_logit():
    lm = capture_model(FAMILIES["qwen2"](), gives="all")
    model = eager_model("qwen2")
    tokens = torch.randint(3, VOCAB, (2, 6))
    zeros = torch.zeros(2, dtype=torch.int64)
    with torch.no_grad():
        torch.testing.assert_close(Runner(lm, model, 2, False)(tokens, zeros, zeros), model(tokens).logits)


def test_head_runs_on_one_token_per_sequence():
    step = captured("llama").step
    (head,) = step.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
    assert head.meta["val"].shape[1:] == (1, VOCAB)


def test_largest_model_is_captured_without_memory_for_weights():
    """OPT-175B has 350 GB of weights; capture may take no more than its graphs need."""
    config = transformers.OPTConfig(
        hidden_size=12288, ffn_dim=49152, num_hidden_layers=96, num_attention_heads=96, word_embed_proj_dim=12288
    )
    captured("opt")  # imports and first-use caches are not counted
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    lm = capture_model(config, dtype=torch.float16)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024  # KiB
    assert lm.weight_nbytes == pytest.approx(350e9, rel=0.01)
    assert set(lm.layers) == {"block_0"} and len(lm.layers) == 96
    for gm in (lm.step, lm.step.get_submodule("block_0")):
        for node in gm.graph.nodes:
            assert isinstance(node.meta.get("val"), (FakeTensor, torch.SymInt, type(None)))


def test_tracing_work_does_not_grow_with_depth(monkeypatch):
    """Counts exported operations rather than seconds."""
    nodes = []
    create = fx.Tracer.create_node
    monkeypatch.setattr(fx.Tracer, "create_node", lambda *a, **k: nodes.append(a[1]) or create(*a, **k))
    counts = []
    for layers in (4, 16):
        nodes.clear()
        capture_model(FAMILIES["gemma2"](layers))
        counts.append(nodes.count("call_function"))
    assert counts[0] == counts[1] > 50


def test_layers_of_a_type_that_is_not_implemented_are_refused_by_name():
    config = FAMILIES["llama"](3)
    config.layer_types = ["full_attention", "other_attention", "full_attention"]
    with pytest.raises(CaptureError, match="layer 1 is of type 'other_attention'; full_attention, sliding_attention"):
        capture_model(config)


def test_a_window_in_a_layer_of_full_attention_is_refused():
    """Eager attention goes by the layer's type, others by the window: one of them would be wrong."""
    config = FAMILIES["mistral"]()
    config.layer_types = ["sliding_attention", "full_attention"]
    with pytest.raises(CaptureError, match="has a window of 6 in a layer of full attention"):
        capture_model(config)


def test_chunks_need_their_size():
    config = FAMILIES["llama4"]()
    config.attention_chunk_size = None
    with pytest.raises(CaptureError, match="chunked_attention but no attention_chunk_size"):
        capture_model(config)


def test_layers_are_of_one_kind_where_their_attention_sees_the_same():
    lm = captured("llama4")
    assert lm.layers == ("block_0", "block_0", "block_0", "block_1")
    windows = {name: node.args[5] for name, block in lm.blocks().items()
               for node in block.graph.find_nodes(op="call_function", target=torch.ops.forebay.attention.default)}
    assert windows == {"block_0": -6, "block_1": 0}


def test_a_layer_that_counts_cached_tokens_is_refused(monkeypatch):
    """The number differs between sequences; the cache has none to give."""
    from transformers.models.llama.modeling_llama import LlamaAttention

    plain = LlamaAttention.forward

    def counting(self, hidden_states, **kwargs):
        return plain(self, hidden_states * (1 + find_cache(kwargs).get_seq_length()), **kwargs)

    monkeypatch.setattr(LlamaAttention, "forward", counting)
    with pytest.raises(CaptureError, match="number of cached tokens"):
        capture_model(FAMILIES["llama"](2))


def test_other_architectures_are_refused_by_what_they_are():
    for config, reason in (
        (transformers.DogeConfig(
            vocab_size=VOCAB, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4),
         "a mask of its own"),
        (transformers.DeepseekV4Config(vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2), "by one softmax"),
    ):
        with pytest.raises(CaptureError, match=reason) as caught:
            capture_model(config)
        assert "\n" not in str(caught.value) and config.model_type in str(caught.value)


def test_a_family_that_keeps_a_state_by_code_of_its_own_is_refused(monkeypatch):
    monkeypatch.delitem(RECORDS, "RwkvForCausalLM")
    with pytest.raises(CaptureError, match="keep a state by code of their own, which calls none of the convolutions"):
        capture_model(transformers.RwkvConfig(vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2))


@pytest.mark.parametrize(("family", "message"), [
    ("dots1", "gives no value for n_shared_experts, n_routed_experts, num_experts_per_tok; add them to config.json"),
    ("deepseek_v2", "gives no value for num_experts_per_tok; add it to config.json")])
def test_counts_of_experts_that_a_config_leaves_out_are_named(family, message):
    config = transformers.CONFIG_MAPPING[family](
        hidden_size=32, num_hidden_layers=2, intermediate_size=32, num_attention_heads=2, vocab_size=VOCAB)
    with pytest.raises(CaptureError, match=message):
        capture_model(config)


def test_outputs_that_a_config_asks_for_beside_logits_are_left_out():
    config = small_config("qwen3_moe", num_hidden_layers=1)
    plain = capture_model(config)
    config.output_router_logits, config.return_dict = True, False
    asked = capture_model(config)
    assert (asked.step.code, asked.step.block_0.code) == (plain.step.code, plain.step.block_0.code)
    assert config.output_router_logits and not config.return_dict, "the caller's own config is left as it is"


def test_code_that_cannot_be_traced_is_told_once(monkeypatch):
    """In the error, and not in torch's own log as well."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    log, seen = logging.getLogger("torch._subclasses.fake_tensor"), []
    monkeypatch.setattr(log, "callHandlers", seen.append)
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: torch.gather(x, 5, x))
    with pytest.raises(CaptureError, match="its own code cannot be traced"):
        capture_model(FAMILIES["llama"]())
    assert not seen and not log.disabled


def test_rotary_frequencies_follow_the_length_of_each_call():
    """Which is an input of the step, the same in every chunk; models that need none have none."""
    rope = dict(rope_theta=10000.0, rope_type="longrope", short_factor=[1.0] * 8, long_factor=[4.0] * 8,
                original_max_position_embeddings=16)
    long = FAMILIES["phi3"](max_position_embeddings=64, original_max_position_embeddings=16, rope_parameters=rope)
    dynamic = FAMILIES["llama"](max_position_embeddings=16, rope_parameters=dict(
        rope_theta=10000.0, rope_type="dynamic", factor=2.0))
    for config, limit, rope_switch_length in ((long, 64, 16), (dynamic, 0, 0)):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        lm = capture_model(config)
        assert (lm.max_positions, lm.rope_switch_length) == (limit, rope_switch_length)
        tokens = torch.randint(3, VOCAB, (2, 20))
        with torch.no_grad():
            expected = [model(row[None, :n]).logits[0, -1] for row, n in zip(tokens, (20, 9), strict=True)]
        run = Runner(lm, model, 2, False)
        length = torch.tensor([20, 9])
        run(tokens[:, :8], torch.tensor([0, 0]), torch.tensor([7, 7]), length)
        got = run(tokens[:, 8:], torch.tensor([8, 8]), torch.tensor([11, 0]), length)
        for row, logits in zip(got, expected, strict=True):
            assert (row - logits).abs().max() <= 2e-5 * logits.abs().max()
    assert not [n for n in captured("llama").step.graph.find_nodes(op="placeholder") if n.name == "length"]


def test_layers_with_tables_of_their_own_that_follow_the_length_are_refused(monkeypatch):
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    plain, config = LlamaDecoderLayer.__init__, FAMILIES["llama"](2, rope_parameters=dict(
        rope_theta=10000.0, rope_type="dynamic", factor=2.0))
    forward = LlamaDecoderLayer.forward

    def init(self, config, layer_idx):
        plain(self, config, layer_idx)
        self.rotary = LlamaRotaryEmbedding(config)

    def own(self, hidden_states, position_embeddings=None, position_ids=None, **kwargs):
        tables = self.rotary(hidden_states, position_ids)
        return forward(self, hidden_states, position_embeddings=tables, position_ids=position_ids, **kwargs)

    monkeypatch.setattr(LlamaDecoderLayer, "__init__", init)
    monkeypatch.setattr(LlamaDecoderLayer, "forward", own)
    with pytest.raises(CaptureError, match="a layer makes rotary tables of its own"):
        capture_model(config)


def test_mixers_of_older_releases_are_refused_with_the_release_that_is_needed() -> None:
    class Mixer(torch.nn.Module):
        def forward(self, x: torch.Tensor, cache: Any) -> torch.Tensor:
            return x if cache.has_previous_state(0) else -x

    with pytest.raises(CaptureError, match=r"need transformers 5\.23 or newer, and "):
        adopt_recurrences(Mixer())
