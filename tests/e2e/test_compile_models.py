"""Models of transformers under torch.compile(backend="forebay"): offloaded, with eager's results."""

from __future__ import annotations

import pytest
import torch
from fresh_dynamo import fresh  # noqa: F401
from selection import without
from torch import nn

from forebay.backend import is_offloaded, prepared_for

transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*lies in memory"), pytest.mark.filterwarnings("ignore:OpenMP threads spin")]

SIZES = {"vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "intermediate_size": 128}
IDS = torch.arange(24).view(2, 12) + 5
PADDED = torch.tensor([[0] * 3 + [1] * 9, [1] * 12])
IMAGE = {"image_size": 32, "patch_size": 8}


MODELS = {
    "bert": ("BertModel", "BertConfig", SIZES, {"input_ids": IDS, "attention_mask": PADDED}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"vocab_size": 100, "n_embd": 64, "n_layer": 2, "n_head": 4},
             {"input_ids": IDS, "use_cache": False}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**SIZES, "num_key_value_heads": 2},
              {"input_ids": IDS, "attention_mask": PADDED, "use_cache": False}),
    "clip text": ("CLIPTextModel", "CLIPTextConfig", SIZES, {"input_ids": IDS}),
    "beit": ("BeitModel", "BeitConfig",
             {**{k: v for k, v in SIZES.items() if k != "vocab_size"}, **IMAGE, "use_relative_position_bias": True},
             {"pixel_values": torch.linspace(-1, 1, 6144).view(2, 3, 32, 32)}),
    "gpt-oss": ("GptOssForCausalLM", "GptOssConfig", {
        **SIZES, "intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 4,
        "num_experts_per_tok": 2, "sliding_window": 8}, {"input_ids": IDS, "use_cache": False}),
}
BUDGETS = {"gpt-oss": "600KiB"}  # others: 250 KiB


@pytest.mark.parametrize("name", without(MODELS, ("bert", "llama", "clip text", "gpt-oss")))
@pytest.mark.filterwarnings("error:forebay")
def test_models_with_indexing_are_offloaded(name, tmp_path):
    model_class, config_class, sizes, inputs = MODELS[name]
    model: nn.Module = getattr(transformers, model_class)(getattr(transformers, config_class)(**sizes)).eval()
    expected = model(**inputs)[0]
    budget = {"device": BUDGETS.get(name, "250KiB"), "disk": str(tmp_path)}
    run = torch.compile(model, backend="forebay", fullgraph=True, options={"budget": budget, "strict": True})
    for _ in range(2):
        torch.testing.assert_close(run(**inputs)[0], expected, rtol=1e-3, atol=1e-4)
    (prepared,) = prepared_for(model)
    assert prepared.program.streamed_nbytes() > 0, "a model that stays whole tells nothing"


@pytest.mark.filterwarnings("error:forebay")
def test_generate_of_a_model_compiled_in_place_gives_the_same_tokens(tmp_path):
    """`model.compile` has no result to call: transformers' own loop runs over what it compiled."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, "num_key_value_heads": 2})).eval()
    ids = torch.arange(1, 9).view(1, 8)
    expected = model.generate(ids, max_new_tokens=4, do_sample=False)
    model.compile(backend="forebay", options={"budget": {"device": "250KiB", "disk": str(tmp_path)}, "strict": True})
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), expected)
    assert is_offloaded(model) and all(p.program.streamed_nbytes() > 0 for p in prepared_for(model))
