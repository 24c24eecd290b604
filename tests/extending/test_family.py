"""A model family from outside the package: its record, and no other line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from extending.made_models import greedy, prompts, saved, streamed
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

from forebay.rewriter.capture.cache_name import find_cache
from forebay.rewriter.capture.family import FAMILIES, Family, register_family
from forebay.rewriter.capture.language_model import CaptureError, capture_model
from forebay.rewriter.capture.own_attention import attend
from forebay.rewriter.capture.patterns import LayerType, window_of


class NearConfig(PreTrainedConfig):
    model_type = "near"

    def __init__(self, hidden_size: int = 64, near_tokens: int = 4, **others: Any) -> None:
        self.hidden_size, self.near_tokens = hidden_size, near_tokens
        self.num_attention_heads, self.num_hidden_layers, self.vocab_size = 4, 3, 199
        self.layer_types = ["window_attention", "full_attention", "window_attention"]
        super().__init__(**others)


class NearAttention(nn.Module):
    """Attention in the family's own code, which transformers' interface does not reach."""

    def __init__(self, config: NearConfig, number: int) -> None:
        super().__init__()
        self.heads, self.number = config.num_attention_heads, number
        self.near = config.near_tokens if config.layer_types[number] == "window_attention" else 0
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.out = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden: Tensor, **others: Any) -> Tensor:
        shape = (*hidden.shape[:2], self.heads, -1)
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.qkv(hidden).chunk(3, -1))
        distance = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
        seen = (distance >= 0) & (distance < (self.near or 1 << 30))
        scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class NearLayer(nn.Module):
    def __init__(self, config: NearConfig, number: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(config.hidden_size), NearAttention(config, number)
        self.up, self.down = nn.Linear(config.hidden_size, 256), nn.Linear(256, config.hidden_size)

    def forward(self, hidden: Tensor, **others: Any) -> Tensor:
        hidden = hidden + self.attention(self.norm(hidden), **others)
        return hidden + self.down(nn.functional.gelu(self.up(hidden)))


class NearForCausalLM(PreTrainedModel, GenerationMixin):
    config_class, base_model_prefix, _no_split_modules = NearConfig, "", ["NearLayer"]

    def __init__(self, config: NearConfig) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.positions = nn.Embedding(128, config.hidden_size)
        self.layers = nn.ModuleList(NearLayer(config, i) for i in range(config.num_hidden_layers))
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, past_key_values: Any = None,
                use_cache: bool = False, return_dict: bool = True, **others: Any) -> CausalLMOutputWithPast:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1])[None]
        hidden = self.embed(input_ids) + self.positions(position_ids)
        for layer in self.layers:
            hidden = layer(hidden, past_key_values=past_key_values)
        return CausalLMOutputWithPast(logits=self.head(hidden))


def own_attention(module: NearAttention) -> Callable[..., Tensor]:
    """The same by Forebay's operators: new keys and values go into the cache, and queries attend over all of it."""
    def forward(hidden: Tensor, **others: Any) -> Tensor:
        shape = (*hidden.shape[:2], module.heads, -1)
        q, k, v = (part.view(shape).transpose(1, 2) for part in module.qkv(hidden).chunk(3, -1))
        k, v = find_cache(others).update(k, v, None)
        return module.out(attend(q, k, v, q.shape[-1] ** -0.5, window_of(module, None)).flatten(2))

    return forward


NEAR = Family(
    "NearForCausalLM",
    replaced={"NearAttention": ("forward", own_attention)},
    layer_types={"window_attention": LayerType("window", "near_tokens")},
    layer_index="number",
)


@pytest.fixture(autouse=True)
def known() -> Iterator[None]:
    AutoConfig.register("near", NearConfig, exist_ok=True)
    AutoModelForCausalLM.register(NearConfig, NearForCausalLM, exist_ok=True)
    yield
    FAMILIES.pop(NEAR.model, None)


def test_a_family_from_outside_is_captured_and_streamed(tmp_path: Path) -> None:
    register_family(NEAR)
    folder, model = saved(NearConfig(), tmp_path / "model")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)  # so that windows show
    model.save_pretrained(folder)
    ids = prompts()
    found, launches = streamed(folder, ids)
    torch.testing.assert_close(found, greedy(model, ids), rtol=1e-3, atol=1e-3)
    assert "forebay.attention" in launches
    captured = capture_model(model)
    assert captured.layers == ("block_0", "block_1", "block_0")
    assert [kv.window for (kv,) in captured.states] == [4, 0, 4]


def test_without_its_record_it_is_refused() -> None:
    with pytest.raises(CaptureError, match="attention does not go through transformers' attention interface"):
        capture_model(NearConfig())
    register_family(Family(NEAR.model, NEAR.replaced))
    with pytest.raises(CaptureError, match="layer 0 is of type 'window_attention'; full_attention"):
        capture_model(NearConfig())
    with pytest.raises(ValueError, match="NearForCausalLM has a record already"):
        register_family(NEAR)
