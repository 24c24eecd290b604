"""A call of a model in a callback of another call of it: refused, and the outer call goes on as if it had not been."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation import BaseStreamer

from forebay.language_model import LanguageModel
from forebay.rewriter.capture.cache_name import CACHE_NAME
from forebay.runtime.run.request import Request
from forebay.runtime.run.sampling import Sampling

OTHER = torch.tensor([[5, 6, 7, 8]])  # another prompt than that of the outer call
GREEDY: dict[str, Any] = dict(max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)


def answer_others(lm: LanguageModel) -> None:
    lm.answer_all([Request(OTHER[0], 3)], Sampling(), frozenset(), on_end=lambda *ended: None,
                  on_step=lambda work: None)


ENTRANCES: dict[str, tuple[str, Callable[[LanguageModel], Any]]] = {  # the name in the refusal, and the call
    "the runtime's loop": ("generate", lambda lm: lm.generate(OTHER, **GREEDY)),
    "transformers' loop": ("generate", lambda lm: lm.generate(OTHER, repetition_penalty=1.2, **GREEDY)),
    "forward": ("lm(…)", lambda lm: lm(OTHER)),
    "embeddings": ("lm(…)", lambda lm: lm(inputs_embeds=lm.get_input_embeddings()(OTHER))),
    "logits": ("next_logits", lambda lm: lm.next_logits(OTHER)),
    "logits of all tokens": ("next_logits", lambda lm: lm.giving("all").next_logits(OTHER)),
    "scores": ("token_scores", lambda lm: lm.token_scores([OTHER[0]])),
    "likelihoods": ("loglikelihood", lambda lm: lm.loglikelihood([([5, 6], [7])])),
    "a job": ("answer_all", answer_others),
    "a plan": ("reserve", lambda lm: lm.reserve(2, 60, 60)),
    "a trace": ("start_trace", lambda lm: lm.start_trace()),
    "the end": ("close", lambda lm: lm.close()),
    "the end of with": ("close", lambda lm: lm.__exit__(None, None, None)),
}


class Processor(LogitsProcessor):
    def __init__(self, back: Callable[[], None]) -> None:
        self.back = back

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.back()
        return scores


class Criterion(StoppingCriteria):
    def __init__(self, back: Callable[[], None]) -> None:
        self.back = back

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.back()
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Streamer(BaseStreamer):
    def __init__(self, back: Callable[[], None]) -> None:
        self.back = back

    def put(self, value: torch.Tensor) -> None:
        self.back()

    def end(self) -> None:
        pass


CALLBACKS: dict[str, Callable[[Callable[[], None]], dict[str, Any]]] = {
    "on_token": lambda back: dict(on_token=lambda column: back()),
    "on_token of transformers' loop": lambda back: dict(on_token=lambda column: back(), min_new_tokens=2),
    "streamer": lambda back: dict(streamer=Streamer(back)),
    "processor": lambda back: dict(logits_processor=LogitsProcessorList([Processor(back)])),
    "criterion": lambda back: dict(stopping_criteria=StoppingCriteriaList([Criterion(back)])),
    "without a cache": lambda back: dict(logits_processor=LogitsProcessorList([Processor(back)]), use_cache=False),
    "drafts": lambda back: dict(prompt_lookup_num_tokens=2, stopping_criteria=StoppingCriteriaList([Criterion(back)])),
}


@pytest.fixture(scope="module")
def streamed(llama_checkpoint: Any) -> Iterator[LanguageModel]:
    with llama_checkpoint.language_model(0.6, batch=1, prompt=10, new_tokens=6) as lm:
        yield lm


@pytest.fixture(scope="module")
def expected(llama_checkpoint: Any) -> torch.Tensor:
    return llama_checkpoint.model.generate(llama_checkpoint.ids[2:], **GREEDY)


def refusals(lm: LanguageModel, enter: Callable[[LanguageModel], Any]) -> tuple[list[str], Callable[[], None]]:
    """What is said in a callback that calls the model, and the callback."""
    said: list[str] = []

    def back() -> None:
        before = lm.plan, lm._session, lm.trace
        try:
            enter(lm)
            said.append("it ran")
        except RuntimeError as error:
            said.append(str(error))
        assert before == (lm.plan, lm._session, lm.trace)

    return said, back


@pytest.mark.parametrize("callback", CALLBACKS)
def test_a_call_in_a_callback_is_refused_by_name(
    streamed: LanguageModel, llama_checkpoint: Any, expected: torch.Tensor, callback: str
) -> None:
    for name, enter in ENTRANCES.values():
        said, back = refusals(streamed, enter)
        found = streamed.generate(llama_checkpoint.ids[2:], **GREEDY | CALLBACKS[callback](back))
        assert said and all(each.startswith(f"{name}: the model is in the middle of generate") for each in said), said
        assert torch.equal(found, expected), name


@pytest.mark.parametrize("options", [dict(admitted=1), dict(prompt_lookup_num_tokens=3)])
def test_places_and_drafts_have_the_same_turns(
    llama_checkpoint: Any, expected: torch.Tensor, options: dict[str, Any]
) -> None:
    with llama_checkpoint.language_model(1.5, batch=2, prompt=10, new_tokens=6, **options) as lm:
        for name in ("the runtime's loop", "scores", "the end"):
            said, back = refusals(lm, ENTRANCES[name][1])
            found = lm.generate(llama_checkpoint.ids[2:], **GREEDY, on_token=lambda column, back=back: back())
            assert torch.equal(found, expected) and "it ran" not in said and said
        said, back = refusals(lm, ENTRANCES["the runtime's loop"][1])
        new: list[int] = []
        lm.answer_all([Request(llama_checkpoint.ids[2], 6)], Sampling(), frozenset(),
                      on_end=lambda number, tokens: new.extend(tokens), on_step=lambda work: back())
        assert new == expected[0, 10:].tolist()
        assert said and all(each.startswith("generate: the model is in the middle of answer_all") for each in said)


def test_the_cache_of_the_outer_call_is_not_gone_on_from_in_a_callback(
    streamed: LanguageModel, llama_checkpoint: Any, expected: torch.Tensor
) -> None:
    ids = llama_checkpoint.ids[2:]
    held = streamed.generate(ids[:, :6], **GREEDY | dict(max_new_tokens=1), return_dict_in_generate=True)
    cache = getattr(held, CACHE_NAME)
    said, back = refusals(streamed, lambda lm: lm(OTHER[:, :1], cache=cache))
    found = streamed.generate(ids, **GREEDY, past_key_values=cache, on_token=lambda column: back())
    assert torch.equal(found, expected)
    assert said and all(each.startswith("lm(…): the model is in the middle of generate") for each in said)


def test_a_refusal_that_nobody_catches_ends_the_outer_call_alone(
    streamed: LanguageModel, llama_checkpoint: Any, expected: torch.Tensor
) -> None:
    with pytest.raises(RuntimeError, match="close: the model is in the middle of generate"):
        streamed.generate(llama_checkpoint.ids[2:], **GREEDY, on_token=lambda column: streamed.close())
    assert torch.equal(streamed.generate(llama_checkpoint.ids[2:], **GREEDY), expected)


def test_the_model_that_drafts_is_in_the_middle_of_an_answer(llama_checkpoint: Any, expected: torch.Tensor) -> None:
    ids = llama_checkpoint.ids[2:]
    with (llama_checkpoint.language_model(1.5, batch=1, prompt=10, new_tokens=6, prompt_lookup_num_tokens=3) as lm,
          llama_checkpoint.language_model(0.6, batch=1, prompt=10, new_tokens=6) as helper):
        said, back = refusals(lm, lambda lm: lm.generate(OTHER, assistant_model=helper, **GREEDY))
        assert torch.equal(helper.generate(ids, **GREEDY, on_token=lambda column: back()), expected)
        assert said and all(each.startswith("drafting: the model is in the middle of generate") for each in said)
        assert torch.equal(lm.generate(ids, assistant_model=helper, **GREEDY), expected)


def test_a_loop_of_the_callers_runs_the_model_that_it_is_given(
    streamed: LanguageModel, llama_checkpoint: Any, expected: torch.Tensor
) -> None:
    def loop(model: Any, input_ids: torch.Tensor, stopping_criteria: Any, **rest: Any) -> torch.Tensor:
        inner = model.generate(input_ids, attention_mask=torch.ones_like(input_ids), max_new_tokens=2, pad_token_id=0,
                               eos_token_id=None, trust_remote_code=False)
        while not bool(stopping_criteria(input_ids, None).all()):
            logits = model(input_ids, use_cache=False).logits
            input_ids = torch.cat((input_ids, logits[:, -1:].argmax(-1)), 1)
        assert torch.equal(inner, input_ids[:, : inner.shape[1]])
        return input_ids

    found = streamed.generate(llama_checkpoint.ids[2:], **GREEDY, custom_generate=loop)
    assert torch.equal(found, expected)


def test_another_thread_closes_the_model_when_the_answer_is_there(
    streamed: LanguageModel, llama_checkpoint: Any, expected: torch.Tensor
) -> None:
    """It used to close it at once, and the next step did not find its device."""
    closed, threads = threading.Event(), []

    def close() -> None:
        streamed.close()
        closed.set()

    def on_token(column: torch.Tensor) -> None:
        if not threads:
            threads.append(threading.Thread(target=close, daemon=True))
            threads[0].start()
            assert not closed.wait(0.2)

    found = streamed.generate(llama_checkpoint.ids[2:], **GREEDY, on_token=on_token)
    threads[0].join(60)
    assert closed.is_set() and streamed._session is None and torch.equal(found, expected)
    assert torch.equal(streamed.generate(llama_checkpoint.ids[2:], **GREEDY), expected)


def test_threads_that_go_on_from_caches_take_turns(streamed: LanguageModel, llama_checkpoint: Any) -> None:
    """An answer that goes on from a cache is one call too: another thread's has its turn before or after it."""
    ids, failed = llama_checkpoint.ids[2:], []
    alone, started = streamed.generate(OTHER, **GREEDY), threading.Event()
    begun = streamed.generate(ids[:, :6], **GREEDY | dict(max_new_tokens=1), return_dict_in_generate=True)
    cache = getattr(begun, CACHE_NAME)

    def other() -> None:
        started.set()
        failed.append(torch.equal(streamed.generate(OTHER, **GREEDY), alone))

    thread = threading.Thread(target=other, daemon=True)
    found = streamed.generate(ids, **GREEDY, past_key_values=cache, on_token=lambda column: (
        started.is_set() or thread.start(), started.wait(60)))
    thread.join(60)
    assert failed == [True]
    assert torch.equal(found, llama_checkpoint.model.generate(ids, **GREEDY))
