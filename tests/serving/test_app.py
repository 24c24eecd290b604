"""The endpoints as OpenAI's client and curl meet them, over a tiny model within a budget."""

from __future__ import annotations

import json
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from budgets import attention_nbytes
from serving.served import (
    ASK,
    BATCH_SLOTS,
    BUDGET,
    NEW,
    PROMPT,
    TEMPLATE,
    WORDS,
    Running,
    asked,
    serving,
    wait_until,
)
from transformers import PreTrainedTokenizerFast

import forebay
from forebay.commands.plan_serving import plan_serving
from forebay.rewriter.machine.profile import Machine, save_machine
from forebay.rewriter.pipeline import plan_draft
from forebay.rewriter.planning.options import Options
from forebay.runtime.run.draft_choice import DraftChoice
from forebay.serving.requests import read_inquiry


@pytest.fixture(scope="module")
def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    return [" ".join(WORDS[7 * i : 7 * i + 1 + 5 * i % 23]) for i in range(8)]


@pytest.fixture(scope="module")
def expected(folder: Path, prompts: list[str]) -> list[str]:
    """What `generate` continues each prompt with, one at a time."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    found = []
    with forebay.wrap(folder, BUDGET, prompt=PROMPT, new_tokens=NEW, machine=Machine.default()) as lm:
        for prompt in prompts:
            ids = tokenizer(prompt)["input_ids"]
            whole = lm.generate(torch.tensor([ids]), max_new_tokens=NEW, do_sample=False)
            found.append(tokenizer.decode(whole[0, len(ids) :], skip_special_tokens=True))
    assert len(set(found)) > len(found) // 2
    return found


def test_concurrent_answers_are_those_of_generate(
    client: openai.OpenAI, prompts: list[str], expected: list[str]
) -> None:
    """More requests than slots, of unequal lengths, half of them streamed, one in four drawn beside them."""
    def ask(number: int) -> str:
        stream = number % 2 == 0
        reply = client.completions.create(model="tiny", prompt=prompts[number], max_tokens=NEW, temperature=0,
                                          stream=stream)
        return "".join(c.choices[0].text for c in reply) if stream else reply.choices[0].text

    def draw(seed: int) -> str:
        return client.completions.create(model="tiny", prompt="w5 w6", max_tokens=NEW, seed=seed).choices[0].text

    with ThreadPoolExecutor(12) as pool:
        drawn = [pool.submit(draw, seed) for seed in (1, 1, 2)]
        found = list(pool.map(ask, range(len(prompts))))
        first, again, other = (each.result() for each in drawn)
    assert found == expected
    assert first == again != other


def test_lengths_of_answers_are_each_its_own(client: openai.OpenAI, prompts: list[str], expected: list[str]) -> None:
    def ask(number: int) -> openai.types.Completion:
        return client.completions.create(model="tiny", prompt=prompts[number], max_tokens=1 + number, temperature=0)

    with ThreadPoolExecutor(8) as pool:
        for number, reply in enumerate(pool.map(ask, range(8))):
            words = expected[number].split()[: 1 + number]
            assert reply.choices[0].text.split() == words and reply.usage is not None
            assert reply.usage.prompt_tokens == len(prompts[number].split())
            if len(words) == 1 + number:
                assert reply.choices[0].finish_reason == "length" and reply.usage.completion_tokens == 1 + number


def test_chats_run_through_the_template(
    client: openai.OpenAI, folder: Path, server: Running
) -> None:
    messages = [{"role": "w3", "content": "w4 w5"}, {"role": "w6", "content": [{"type": "text", "text": "w7"}]}]
    whole = client.chat.completions.create(model="tiny", messages=messages, max_tokens=6, temperature=0)  # type: ignore[arg-type]
    pieces = list(client.chat.completions.create(
        model="tiny", messages=messages, max_completion_tokens=6, temperature=0, stream=True,  # type: ignore[arg-type]
        stream_options={"include_usage": True}))
    streamed = "".join(p.choices[0].delta.content or "" for p in pieces if p.choices)
    assert "add_generation_prompt" in TEMPLATE
    _, same = server.complete(prompt="w3 w4 w5 w6 w7 w9", max_tokens=6, temperature=0)
    assert whole.choices[0].message.content == streamed == same["choices"][0]["text"]
    assert pieces[0].choices[0].delta.role == "assistant" and pieces[-2].choices[0].finish_reason == "length"
    assert pieces[-1].usage is not None and pieces[-1].usage.total_tokens == 12 and whole.usage is not None
    assert whole.usage.completion_tokens == 6


def test_stop_strings_end_an_answer_and_are_not_told(
    client: openai.OpenAI, prompts: list[str], expected: list[str]
) -> None:
    words = expected[7].split()
    stop = " " + " ".join(words[4:6])
    kept = expected[7][: expected[7].index(stop)]
    whole = client.completions.create(model="tiny", prompt=prompts[7], max_tokens=NEW, temperature=0, stop=stop)
    pieces = list(client.completions.create(model="tiny", prompt=prompts[7], max_tokens=NEW, temperature=0,
                                            stop=[stop], stream=True))
    assert whole.choices[0].text == "".join(p.choices[0].text for p in pieces) == kept
    assert whole.choices[0].finish_reason == pieces[-1].choices[0].finish_reason == "stop"
    assert whole.usage is not None and whole.usage.completion_tokens == 6


def test_token_ids_may_be_prompts(client: openai.OpenAI, prompts: list[str], expected: list[str], folder: Path) -> None:
    ids = PreTrainedTokenizerFast.from_pretrained(folder)(prompts[2])["input_ids"]
    reply = client.completions.create(model="tiny", prompt=ids, max_tokens=NEW, temperature=0)
    assert reply.choices[0].text == expected[2]


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_reads_a_stream(server: Running, prompts: list[str], expected: list[str]) -> None:
    body = json.dumps({"prompt": prompts[1], "max_tokens": NEW, "temperature": 0, "stream": True})
    said = subprocess.run(["curl", "-sN", f"{server.url}/v1/completions", "-H", "Content-Type: application/json", "-d",
                           body], capture_output=True, text=True, timeout=60, check=True).stdout
    events = [line.removeprefix("data: ") for line in said.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    assert "".join(json.loads(e)["choices"][0]["text"] for e in events[:-1]) == expected[1]
    status = subprocess.run(["curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", f"{server.url}/v1/completions",
                             "-d", body], capture_output=True, text=True, timeout=60, check=True).stdout
    assert status == "415"


def test_an_answer_is_a_message_of_the_next_chat(client: openai.OpenAI) -> None:
    """As the client gives it back, whole with all that it lacks; a name is the template's to use."""
    said: list[Any] = [{"role": "w3", "content": "w4", "name": "w5"}]
    asked: dict[str, Any] = dict(model="tiny", max_tokens=4, temperature=0)
    answer = client.chat.completions.create(messages=said, **asked).choices[0].message
    told = [answer, answer.model_dump(), {"role": "assistant", "content": answer.content}]
    whole = [client.chat.completions.create(messages=[*said, each, said[0]], **asked) for each in told]
    assert whole[0].choices == whole[1].choices == whole[2].choices and "tool_calls" in told[1]
    for message, says in (({"tool_calls": [{"id": "a"}], "content": None}, "tool_calls of messages[0] must be"),
                          ({"name": 5}, "name of messages[0]"), ({"content": None}, "content of messages[0]")):
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(messages=[{"role": "w3", "content": "w4", **message}], **asked)
        assert says in refused.value.message


def test_a_name_reaches_the_template() -> None:
    body = {"messages": [{"role": "user", "content": "hi", "name": "bob"}, {"role": "user", "content": "hi"}]}
    found = read_inquiry(json.dumps(body).encode(), "tiny", chat=True).messages
    assert found == ({"role": "user", "content": "hi", "name": "bob"}, {"role": "user", "content": "hi"})


@pytest.mark.parametrize(("fields", "status", "says"), [
    ({}, 400, "prompt must be"), ({"prompt": ""}, 400, "prompt must be"), ({"prompt": [1, -1]}, 400, "prompt must be"),
    ({"prompt": ["w1", ""]}, 400, "prompt must be"), ({"prompt": [500]}, 400, "token 500 is none"),
    ({"prompt": "w1 " * 99}, 400, "at most 24"), ({"prompt": "w1", "max_tokens": 0}, 400, "max_tokens"),
    ({"prompt": "w1", "logit_bias": {"500": 9}}, 400, "token 500 of logit_bias"),
    ({"prompt": "w1", "model": "gpt"}, 404, "this server has 'tiny'"),
])
def test_what_cannot_be_answered_is_refused_by_name(server: Running, fields: dict, status: int, says: str) -> None:
    found, body = server.complete(**fields)
    assert found == status and says in body["error"]["message"], body


def test_what_is_passed_over_and_cut_is_said(server: Running, client: openai.OpenAI, folder: Path) -> None:
    raw = client.completions.with_raw_response.create(
        model="tiny", prompt="w1", max_tokens=1000, user="me", temperature=0, logit_bias={"2": -100},
        extra_body={"wish": 1, "é": 2})
    assert raw.headers["x-forebay-warning"] == (
        "wish is not known here; ? is not known here; max_tokens is 39 here, since a slot has room for 40 tokens of "
        "prompt and answer")
    answer = raw.parse()
    assert answer.usage is not None and answer.usage.completion_tokens == 39
    with serving(folder, strict=True) as other:
        status, body = other.complete(prompt="w1", wish=1)
        assert status == 400 and "wish is not known here" in body["error"]["message"]


def test_several_prompts_and_answers(client: openai.OpenAI, prompts: list[str], expected: list[str]) -> None:
    """In order, whole and streamed; each has its own seed."""
    asked: dict[str, Any] = dict(model="tiny", prompt=prompts[:3], max_tokens=NEW, n=2)
    found = client.completions.create(**asked, temperature=0)
    assert [c.text for c in found.choices] == [each for each in expected[:3] for _ in range(2)]
    assert found.usage is not None and found.usage.prompt_tokens == sum(len(p.split()) for p in prompts[:3])
    texts = ["" for _ in range(6)]
    for piece in client.completions.create(**asked, temperature=0, stream=True):
        texts[piece.choices[0].index] += piece.choices[0].text
    assert texts == [c.text for c in found.choices]
    drawn = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "w1"}], n=3, seed=5,
                                           max_tokens=NEW)
    one = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "w1"}], seed=6,
                                         max_tokens=NEW)
    said = [c.message.content for c in drawn.choices]
    assert len(set(said)) == 3 and said[1] == one.choices[0].message.content


def test_log_probabilities_are_the_models(client: openai.OpenAI, folder: Path) -> None:
    """Of a chat and of a completion, whatever penalties and temperature; streamed, too."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    ids = tokenizer("user w4 w9")["input_ids"]
    asked: dict[str, Any] = dict(model="tiny", messages=[{"role": "user", "content": "w4"}], max_tokens=5, seed=3,
                                 logprobs=True, top_logprobs=2, presence_penalty=1.5)
    whole = client.chat.completions.create(**asked).choices[0].logprobs
    streamed = [each for piece in client.chat.completions.create(**asked, stream=True) if piece.choices[0].logprobs
                for each in piece.choices[0].logprobs.content or ()]
    assert whole is not None and whole.content is not None and len(streamed) == 5
    for one, other in zip(whole.content, streamed, strict=True):
        assert one.token == other.token and one.logprob == pytest.approx(other.logprob, abs=1e-4)
    with forebay.wrap(folder, "9MB", machine=Machine.default()) as lm:
        new = [tokenizer.convert_tokens_to_ids(each.token) for each in streamed]
        scores = lm(torch.tensor([[*ids, *new]])).logits[0, len(ids) - 1 : -1].log_softmax(-1)
    for each, row, token in zip(streamed, scores, new, strict=True):
        assert each.logprob == pytest.approx(float(row[token]), abs=1e-3)
        assert [t.token for t in each.top_logprobs] == tokenizer.convert_ids_to_tokens(row.topk(2).indices.tolist())
    told = client.completions.create(model="tiny", prompt="user w4 w9", max_tokens=5, logprobs=2, seed=3,
                                     presence_penalty=1.5).choices[0].logprobs
    assert told is not None and told.tokens == [each.token for each in streamed]
    assert told.token_logprobs == pytest.approx([each.logprob for each in streamed], abs=1e-4)


def test_biases_and_penalties_reach_the_tokens(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = dict(model="tiny", prompt="w1", max_tokens=6, temperature=0)
    same = client.completions.create(**asked, logit_bias={"11": 100}).choices[0].text.split()
    other = client.completions.create(**asked, logit_bias={"11": 100, "12": 99}, presence_penalty=2).choices[0].text
    assert set(same) == {"w7"} and len(same) == 6 and other.split()[:2] == ["w7", "w8"]


def test_tokens_of_texts_and_back(server: Running) -> None:
    def post(path: str, **fields: Any) -> Any:
        status, body = server.send("POST", path, json.dumps(fields).encode())
        return json.loads(body) if status == 200 else status

    assert post("/tokenize", prompt="w1 w2") == {"tokens": [5, 6], "count": 2, "max_model_len": 40}
    assert post("/tokenize", content="w1 w2")["tokens"] == [5, 6] and post("/tokenize", content="")["tokens"] == []
    assert post("/tokenize", messages=[{"role": "w3", "content": "w4"}])["tokens"] == [7, 8, 13]
    assert post("/detokenize", tokens=[5, 6])["content"] == "w1 w2"
    assert post("/tokenize", prompt=5) == post("/detokenize", tokens=[200]) == post("/detokenize", tokens="a") == 400


def test_the_rest_of_the_endpoints(server: Running, client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["tiny"] and client.models.retrieve("tiny").max_model_len == 40
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")
    assert json.loads(server.send("GET", "/health")[1]) == {"status": "ok"}
    text = server.send("GET", "/metrics")[1].decode()
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(values["forebay_batch_slots"]) == BATCH_SLOTS and float(values["forebay_budget_bytes"]) == BUDGET
    assert float(values['forebay_tokens_total{kind="generated"}']) > 0
    assert values["forebay_time_to_first_token_seconds_count"] == values[
        'forebay_time_to_first_token_seconds_bucket{le="+Inf"}'] != "0"
    state = json.loads(server.send("GET", "/state")[1])
    assert sum(state["memory"]["kinds"].values()) <= BUDGET
    assert state["batch_slots"] == BATCH_SLOTS and state["requests"]
    status, page = server.send("GET", "/")
    assert status == 200 and b"/page/page.js" in page and server.send("GET", "/page/page.js")[0] == 200
    assert server.send("GET", "/nothing")[0] == 404 and server.send("GET", "/v1/completions")[0] == 405
    assert server.send("GET", "/health", Host="evil.example")[0] == 403


def test_a_single_place_checks_what_is_looked_up(
    folder: Path, prompts: list[str], expected: list[str], tmp_path: Path
) -> None:
    """Where reading weights binds a step; the answers are those of one token a step, and it is counted what stood."""
    save_machine(Machine.default(), tmp_path / "machine.json")
    budget = 1_500_000 + max(0, attention_nbytes(1, 4, PROMPT + NEW, 32, PROMPT))
    lm, plain = (plan_serving(folder, budget, Options(
        prompt=PROMPT, new_tokens=NEW, batch_slots=1, machine=tmp_path / "machine.json",
        prompt_lookup_num_tokens=looked)).lm
                 for looked in ("auto", None))
    assert lm.plan.schedule.speculative_steps and not plain.plan.schedule.speculative_steps
    with serving(folder, planned=lm) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)
        said = "w5 w6 w7 w5 w6 w7 w5 w6"
        drawn = [client.completions.create(model="tiny", prompt=said, max_tokens=NEW, seed=1) for _ in range(2)]
        found = [client.completions.create(model="tiny", prompt=prompt, max_tokens=NEW, temperature=0)
                 for prompt in prompts]
        assert [each.choices[0].text for each in found] == expected and drawn[0].choices == drawn[1].choices
        counts = dict(line.rsplit(" ", 1) for line in server.send("GET", "/metrics")[1].decode().splitlines()
                      if not line.startswith("#"))
    checked = sum(int(counts[f'forebay_drafted_tokens_total{{kind="{kind}"}}']) for kind in ("accepted", "refused"))
    assert checked and int(counts['forebay_steps_total{kind="decode"}']) < sum(
        each.usage.completion_tokens for each in (*drawn, *found) if each.usage is not None)


def test_a_draft_serves_requests_in_all_places(
    folder: Path, prompts: list[str], expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that come and go, drawn or not, and their seeds give what they give without it."""
    monkeypatch.setattr(plan_draft, "MIN_SPEEDUP", 0.0)  # whatever is predicted
    monkeypatch.setattr(DraftChoice, "_worth", lambda *_: (3, 0.0))
    save_machine(Machine.default(), tmp_path / "machine.json")
    lm, plain = (plan_serving(folder, "9MB", Options(
        prompt=PROMPT, new_tokens=NEW, batch_slots=BATCH_SLOTS, machine=tmp_path / "machine.json", draft=draft,
        prompt_lookup_num_tokens="auto" if draft else None)).lm for draft in (str(folder), None))
    assert lm.helper is not None and lm.plan.schedule.speculative_steps and lm.plan.schedule.batching.admitted
    texts = []
    for each in (lm, plain):
        with serving(folder, planned=each) as server:
            client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)

            def ask(i: int, client: openai.OpenAI = client) -> str:
                drawn = {"seed": i, "temperature": 0.8} if i % 3 == 2 else {"temperature": 0}
                return client.completions.create(  # type: ignore[call-overload, no-any-return]
                    model="tiny", prompt=prompts[i % len(prompts)], max_tokens=NEW, **drawn).choices[0].text

            with ThreadPoolExecutor(5) as asking:
                texts.append(list(asking.map(ask, range(12))))
            stood = 'forebay_drafted_tokens_total{kind="accepted"} '
            counts = [int(line.removeprefix(stood)) for line in server.send("GET", "/metrics")[1].decode().splitlines()
                      if line.startswith(stood)]
            assert bool(counts and counts[0]) is (each is lm)
            memory = json.loads(server.send("GET", "/state")[1])["memory"]
            assert memory["budget_nbytes"] == 9_000_000 >= sum(memory["kinds"].values()) > (
                4_800_000 if each is lm else 2_400_000), "the copy's weights are of the budget too"
    assert lm.helper.drafts_seen is not None and lm.helper.drafts_seen.known, "nothing was a model's draft"
    assert texts[0] == texts[1] and all(
        text == expected[i % len(prompts)] for i, text in enumerate(texts[0]) if i % 3 != 2)


@pytest.mark.parametrize("queue", [1, 0])
def test_a_key_is_asked_for_and_a_full_queue_says_so(folder: Path, queue: int) -> None:
    """One place, held by an answer whose client does not read on; the queue holds one more, or none."""
    with serving(folder, batch_slots=1, queue=queue, api_key="secret", hosts=None) as server:
        assert server.send("GET", "/v1/models")[0] == 401 and server.send("GET", "/health")[0] == 200
        assert server.send("GET", "/v1/models", Authorization="Bearer secres")[0] == 401
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0, timeout=60)
        assert client.models.list().data[0].id == "tiny"
        server.gate.clear()
        with ThreadPoolExecutor(2) as pool:
            replies = [pool.submit(client.completions.create, model="tiny", prompt="w1", max_tokens=2, temperature=0)
                       for _ in range(1 + queue)]  # greedy: a draw may be the end
            wait_until(lambda: server.run.batcher.waiting == queue and len(server.run.batcher.running) == 1)
            with pytest.raises(openai.RateLimitError, match=f"1 slots are taken, and {queue} .*--queue"):
                client.completions.create(model="tiny", prompt="w1", max_tokens=2)
            server.gate.set()
            assert [reply.result().usage.completion_tokens for reply in replies] == [2] * (1 + queue)


def test_those_that_wait_are_admitted_by_priority(folder: Path) -> None:
    """Lower numbers first, and those that are alike as they came; others than integers are refused."""
    with serving(folder, batch_slots=1) as server:
        batcher = server.run.batcher
        assert server.complete(**ASK, priority=0.5)[0] == 400
        server.gate.clear()
        sent = [asked(server)]
        wait_until(lambda: len(batcher.running) == 1)
        for count, priority in enumerate((None, 5, -1, 0, 5, -1), 4):
            sent.append(asked(server, prompt="w1 " * count, priority=priority, max_tokens=2))
            wait_until(lambda count=count: batcher.waiting == count - 3)  # type: ignore[misc]
        server.gate.set()
        wait_until(lambda: len(batcher.recent) == 7)
        for each in sent:
            each.close()
        assert [len(each.ids) for each in batcher.recent] == [3, 6, 9, 4, 7, 5, 8]
