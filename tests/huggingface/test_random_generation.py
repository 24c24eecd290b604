"""`generate` with random settings, held to transformers under the same seed: the same tokens and scores, or errors.

A few in the suite; `FOREBAY_TEST_ALL=1` draws two hundred.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from selection import ALL

from forebay.language_model import LanguageModel

VOCAB = 997
CASES = 200 if ALL else 16
MANY = list(range(3, 500))
# name -> values, and how often it is given
ALWAYS: dict[str, tuple[list[Any], float]] = {
    "repetition_penalty": ([1.0, 1.3, 0.8], 0.3), "no_repeat_ngram_size": ([0, 1, 2, 3], 0.25),
    "min_new_tokens": ([0, 2, 5, 20], 0.2), "min_length": ([0, 5, 15], 0.15), "max_length": ([12, 40], 0.1),
    "bad_words_ids": ([[[5], [6, 7]], [[i] for i in MANY]], 0.15), "suppress_tokens": ([[3, 4], MANY], 0.15),
    "begin_suppress_tokens": ([MANY], 0.15), "forced_bos_token_id": ([9], 0.1), "forced_eos_token_id": ([11], 0.1),
    "renormalize_logits": ([True], 0.15), "exponential_decay_length_penalty": ([(2, 1.5)], 0.15),
    "sequence_bias": ([[[[5], 4.0], [[6, 7], -3.0]]], 0.1), "encoder_repetition_penalty": ([1.2], 0.1),
    "remove_invalid_values": ([True], 0.1), "output_scores": ([True], 0.2), "output_logits": ([True], 0.15),
    "return_dict_in_generate": ([True], 0.3), "use_cache": ([False, True], 0.15),
    "prompt_lookup_num_tokens": ([2, 3], 0.12), "cache_implementation": (["dynamic", "static"], 0.1),
    "watermarking_config": ([dict(bias=3.0)], 0.05), "prefill_chunk_size": ([3], 0.1),
}
SAMPLED: dict[str, tuple[list[Any], float]] = {
    "temperature": ([0.3, 0.7, 1.0, 1.7], 0.6), "top_k": ([0, 1, 5, 50, None], 0.5),
    "top_p": ([0.1, 0.5, 0.95, 1.0], 0.5), "min_p": ([0.05, 0.3], 0.2), "typical_p": ([0.3, 0.9], 0.2),
    "epsilon_cutoff": ([1e-3], 0.15), "eta_cutoff": ([1e-3], 0.15), "top_h": ([0.5], 0.15),
}
BEAMS: dict[str, tuple[list[Any], float]] = {
    "num_return_sequences": ([1, 2], 0.4), "length_penalty": ([-1.0, 0.5, 2.0], 0.4),
    "early_stopping": ([True, False, "never"], 0.4),
}


@pytest.fixture(scope="module")
def streamed(llama_checkpoint: Any) -> Iterator[LanguageModel]:
    with llama_checkpoint.language_model(0.6, batch=9, prompt=10, new_tokens=9) as lm:
        yield lm


def drawn(chance: random.Random) -> dict[str, Any]:
    options: dict[str, Any] = dict(max_new_tokens=chance.randint(1, 9), pad_token_id=0, eos_token_id=chance.choice(
        [None, None, list(range(3, 300)), 7, list(range(500, VOCAB))]), do_sample=chance.random() < 0.5)
    groups = [ALWAYS] + ([SAMPLED] if options["do_sample"] else [])
    beams = chance.choice([1, 1, 1, 2, 3])
    if beams > 1:
        options["num_beams"] = beams
        groups.append(BEAMS)
    for group in groups:
        options |= {name: chance.choice(values) for name, (values, share) in group.items() if chance.random() < share}
    return options


def outcome(generate: Any, given: dict[str, Any]) -> Any:
    torch.manual_seed(3)
    try:
        return generate(**copy.deepcopy(given))
    except Exception as error:
        return error


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(CASES))
def test_any_settings_give_what_transformers_gives(streamed: LanguageModel, llama_checkpoint: Any, seed: int) -> None:
    chance = random.Random(seed)
    rows, tokens = chance.randint(1, 3), chance.randint(1, 10)
    ids = torch.randint(3, VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    if tokens > 2 and chance.random() < 0.6:
        mask[0, : chance.randint(1, tokens - 1)] = 0
    given = dict(inputs=ids, attention_mask=mask, **drawn(chance))
    theirs = outcome(llama_checkpoint.model.generate, given)
    ours = outcome(streamed.generate, given)
    if isinstance(theirs, Exception):
        assert isinstance(ours, Exception) and "\n" not in str(ours).strip(), f"{given}: {theirs!r}, ours {ours!r}"
        return
    assert not isinstance(ours, Exception), f"{given}: {ours!r}"
    if isinstance(theirs, torch.Tensor):
        assert torch.equal(ours, theirs), given
        return
    assert isinstance(ours, type(theirs)) and torch.equal(ours.sequences, theirs.sequences), given
    for name in ("scores", "logits", "beam_indices", "sequences_scores"):
        torch.testing.assert_close(ours.get(name), theirs.get(name), rtol=1e-3, atol=1e-3, msg=f"{name}: {given}")


def test_most_settings_are_ones_that_transformers_takes(llama_checkpoint: Any) -> None:
    """What both refuse shows nothing."""
    refused = sum(isinstance(outcome(llama_checkpoint.model.generate, dict(
        inputs=torch.tensor([[5, 6, 7]]), **drawn(random.Random(seed)))), Exception) for seed in range(12))
    assert refused <= 4
