"""Families whose attention is their own: what is captured computes what transformers' code does."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as T
from budgets import attention_nbytes
from forked import run_code
from selection import without
from torch import nn

from forebay.api import wrap
from forebay.rewriter.capture.attention import NAME, TracedCache, register_attention
from forebay.rewriter.capture.language_model import CaptureError, capture_model
from forebay.rewriter.capture.latent import LatentRows, adopt_latents
from forebay.rewriter.ir.graph import CapturedModel
from forebay.rewriter.ir.plan import PlanError
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.pipeline.rewrite_captured import rewrite_captured
from forebay.rewriter.switches import Switches
from tests.families import VOCAB
from tests.rewriter.capture.test_language_model import Runner

_BASE: dict[str, Any] = dict(vocab_size=VOCAB, bos_token_id=1, eos_token_id=2, pad_token_id=0)
_FALCON = dict(hidden_size=96, num_hidden_layers=2, num_attention_heads=6, bias=True)
_GPT = dict(n_embd=64, n_layer=2, n_head=4, n_positions=128, rotary_dim=8)
CONFIGS: dict[str, T.PreTrainedConfig] = {
    "falcon": T.FalconConfig(**_BASE | _FALCON),
    "falcon, grouped": T.FalconConfig(**_BASE | _FALCON, num_kv_heads=2, new_decoder_architecture=True),
    "falcon, alibi": T.FalconConfig(**_BASE | _FALCON, multi_query=False, parallel_attn=False, alibi=True),
    "bloom": T.BloomConfig(**_BASE, hidden_size=96, n_layer=2, n_head=6),
    "mpt": T.MptConfig(**_BASE, d_model=96, n_layers=2, n_heads=6, max_seq_len=512, expansion_ratio=2),
    "gptj": T.GPTJConfig(**_BASE | _GPT),
    "codegen": T.CodeGenConfig(**_BASE | _GPT),
    "gpt_neo": T.GPTNeoConfig(**_BASE, hidden_size=64, num_layers=4, num_heads=4, window_size=6,
                              attention_types=[[["global", "local"], 2]]),
    "gpt_neox_japanese": T.GPTNeoXJapaneseConfig(**_BASE, hidden_size=64, num_hidden_layers=2, num_attention_heads=4),
    "xglm": T.XGLMConfig(**_BASE, d_model=64, num_layers=2, attention_heads=4, ffn_dim=96),
    "stablelm": T.StableLmConfig(**_BASE, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
                                 num_key_value_heads=2, intermediate_size=96),
    "diffllama": T.DiffLlamaConfig(**_BASE, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
                                   num_key_value_heads=2, intermediate_size=96),
    "biogpt": T.BioGptConfig(**_BASE, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96),
}
KINDS = {"gpt_neo": 2, "gpt_neox_japanese": 2, "diffllama": 2}  # of layers; the last has a bias


def model_of(name: str) -> Any:
    """Weights large enough for positions and windows to show. Eager attention adds Falcon's bias twice, once with the
    mask; sdpa is what it is trained with."""
    torch.manual_seed(0)
    way = "sdpa" if name.startswith("falcon") else "eager"
    model = T.AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation=way).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


@functools.cache
def captured(name: str) -> CapturedModel:
    """Graphs that no test edits."""
    return capture_model(CONFIGS[name])


@pytest.mark.parametrize("name", without(CONFIGS, (
    "falcon", "falcon, alibi", "gptj", "codegen", "gpt_neox_japanese", "xglm", "stablelm", "biogpt")))
def test_logits_equal_transformers_in_chunks_of_unequal_prompts(name: str) -> None:
    model = model_of(name)
    lm = captured(name)
    assert len(set(lm.layers)) == KINDS.get(name, 1)
    lengths = torch.tensor([23, 5])
    tokens = torch.randint(3, VOCAB, (2, 24))
    with torch.no_grad():
        expected = [model(row[None, : n + 1]).logits[0] for row, n in zip(tokens, lengths.tolist(), strict=True)]
    run = Runner(lm, model, 2, False)
    got = [torch.empty(0)] * 2
    for begin in (0, 12):
        part = tokens[:, begin : begin + 12].clone()
        part[1, max(0, 5 - begin) :] = 0
        found = run(part, torch.full((2,), begin), (lengths - 1 - begin).clamp(0, 11))
        for i, n in enumerate(lengths.tolist()):
            if begin < n <= begin + 12:
                got[i] = found[i].clone()
    after = run(tokens.gather(1, lengths[:, None]), lengths, torch.zeros(2, dtype=torch.int64))
    for i, n in enumerate(lengths.tolist()):
        for logits, wanted in ((got[i], expected[i][n - 1]), (after[i], expected[i][n])):
            assert (logits - wanted).abs().max() <= 2e-5 * wanted.abs().max()


@pytest.mark.parametrize("name", without(["falcon, alibi", "bloom", "mpt"], ["falcon, alibi"]))
def test_positions_beyond_the_first_piece(name: str) -> None:
    """Far positions are put together from pieces; the bias shows in the answers."""
    model, prompt = model_of(name), torch.randint(3, VOCAB, (1, 300), generator=torch.Generator().manual_seed(5))
    given: dict[str, Any] = dict(max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
    expected = model.generate(prompt, **given)
    with torch.no_grad():
        wanted = model(prompt).logits[0, -1]
        turned = model(prompt.roll(40, 1)).logits[0, -1]
    assert (wanted - turned).abs().max() > 0.01
    budget = 4_000_000 + max(0, attention_nbytes(1, 6, 306, 16))
    with wrap(model, budget, prompt=300, new_tokens=6, prefill_chunk=64, machine=Machine.default()) as lm:
        torch.testing.assert_close(lm.next_logits(prompt)[0], wanted, rtol=1e-3, atol=2e-4)
        assert torch.equal(lm.generate(prompt, **given), expected)


@pytest.mark.parametrize(("name", "dtype"), [("bloom", torch.bfloat16), ("mpt", torch.float16)])
def test_a_narrow_dtype_keeps_positions(name: str, dtype: torch.dtype) -> None:
    """By itself bfloat16 would tell one position in four beyond 512: the logits stay near those of float32."""
    model, lm = model_of(name), capture_model(CONFIGS[name], dtype=dtype)
    tokens = torch.randint(3, VOCAB, (1, 24), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = model(tokens).logits[0, -1]
        found = Runner(lm, model.to(dtype), 1, False)(tokens, torch.tensor([0]), torch.tensor([23]))[0].float()
    assert (found - expected).abs().max() <= 0.05 * expected.abs().max()


def test_the_first_model_of_a_process_may_need_a_record() -> None:
    code = ("import transformers as T; from forebay.rewriter.capture.language_model import capture_model; "
            "capture_model(T.GPTJConfig(vocab_size=9, n_embd=32, n_layer=1, n_head=2, n_positions=8, rotary_dim=4))")
    done = run_code(code)
    assert done.returncode == 0, done.stderr


def test_a_cache_that_holds_positions_is_not_rounded() -> None:
    for name in ("bloom", "falcon, alibi"):
        with pytest.raises(PlanError, match="kv8 would round positions"):
            rewrite_captured(captured(name), Switches(), "kv8")
    rewrite_captured(captured("falcon"), Switches(), "kv8")


def test_positions_that_bias_shared_keys_are_refused() -> None:
    with pytest.raises(CaptureError, match="its positions bias the scores of 6 heads that share 1 of keys"):
        capture_model(T.FalconConfig(**_BASE | _FALCON, alibi=True))


def _old_name(module: Any, past_key_values: Any = None) -> Any:
    return past_key_values, None


def _new_name(module: Any, cache: Any = None) -> Any:
    return cache, None


@pytest.mark.parametrize("own", [_old_name, _new_name])
def test_rows_of_latents_take_the_place_of_the_cache_that_a_model_hands_on(own: Callable[..., Any]) -> None:
    """By the name that the module takes, in each release of transformers; under another they were ignored."""
    module = _latent_module(own)
    (name,) = [each for each in inspect.signature(own).parameters if each != "module"]
    adopt_latents(module)
    found, _ = module(**{name: TracedCache()})
    assert isinstance(found, LatentRows)


def test_latents_that_are_no_rows_of_the_cache_are_refused() -> None:
    module = _latent_module(_new_name)
    adopt_latents(module)
    register_attention()
    attend = T.modeling_utils.ALL_ATTENTION_FUNCTIONS[NAME]
    query, latent, rotated = torch.zeros(1, 2, 3, 8), torch.zeros(1, 1, 3, 8), torch.zeros(1, 1, 3, 8)
    with pytest.raises(CaptureError, match="no rows of its cache"):
        attend(module, query, latent, rotated, None)


def _latent_module(own: Callable[..., Any]) -> nn.Module:
    """A module of latent attention, with `own` for its forward."""
    made = type("Attention", (nn.Module,), {"forward": own, "expand_kv": None, "kv_lora_rank": 4,
                                            "qk_nope_head_dim": 4, "v_head_dim": 4})()
    made.kv_b_proj = nn.Linear(4, 16, bias=False)
    return made
