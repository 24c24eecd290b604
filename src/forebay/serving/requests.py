"""Bodies of requests for completions and chat completions, as OpenAI's API reference has them, and what other servers
add to it."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from forebay.runtime.run.sampling import Sampling
from forebay.serving.messages import read_messages
from forebay.serving.output_fields import OUTPUT_FIELDS, call_grammar, read_grammar, read_tools
from forebay.serving.refusal import Refusal
from forebay.serving.request_fields import RequestFields
from forebay.structured_output import OutputGrammar

MOST_STOPS, MOST_STOP_CHARACTERS = 16, 256  # strings that end an answer
MOST_TOP_K = (1 << 31) - 1
MOST_CHOICES = 64  # answers to one request
MOST_TOP_LOGPROBS = 20
MOST_BIASES = 1024
MOST_PRIORITY = (1 << 31) - 1
COMPLETION_TOKENS = 16  # of a completion that names no number, as OpenAI has it
# Fields that change no answer here, and values of others that ask for nothing.
IDLE = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_options",
        "prompt_cache_retention", "cache_prompt", "keep_alive", "parallel_tool_calls", "include_reasoning",
        "reasoning_format", "parse_tool_calls"}
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,), "echo": (False,), "suffix": ("",), "functions": ([],), "function_call": ("none", "auto"),
    "modalities": (["text"],), "verbosity": ("medium",), "top_a": (0,), "typical_p": (1,), "xtc_probability": (0,),
    "dry_multiplier": (0,), "mirostat": (0,), "length_penalty": (1,), "min_tokens": (0,), "stop_token_ids": ([],),
    "ignore_eos": (False,), "use_beam_search": (False,), "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,), "add_generation_prompt": (True,), "continue_final_message": (False,),
    "documents": ([],)}
SERVED = {"model", "max_tokens", "max_completion_tokens", "n", "temperature", "top_p", "top_k", "min_p", "seed", "stop",
          "stream", "stream_options", "logprobs", "top_logprobs", "logit_bias", "presence_penalty", "frequency_penalty",
          "repetition_penalty", "repeat_penalty", "reasoning_effort", "enable_thinking", "chat_template_kwargs",
          "priority"}
PLAIN = Sampling(True, 1.0, 0, 1.0)  # where a model's generation config says nothing
UNLIMITED = -1  # of max_tokens: as many as the server gives


@dataclass(frozen=True)
class Inquiry:
    """The content of one request.

    Attributes:
        prompts: Of a completion, texts or token ids.
        messages: Of a chat.
        new_tokens: Tokens of an answer at most; None: as many as the server gives.
        sampling: How tokens are chosen.
        seed: Of the first answer; each further one has the next.
        stops: Strings that end an answer.
        stream: Whether it is told as it comes.
        usage: Whether a stream's end tells numbers of tokens.
        choices: Answers to each prompt.
        top_logprobs: Most likely tokens that are told with each token's log probability; None: none of both.
        template: What the chat template is told with messages.
        tools: That the model may call, in OpenAI's form.
        called: The tools of which it must call one.
        grammar: What an answer must be.
        warnings: What was passed over.
        adapter: The name of its adapter; "": the base alone.
        priority: Of those that wait, lower ones get a slot first.
    """

    prompts: tuple[str | tuple[int, ...], ...]
    messages: tuple[dict[str, Any], ...] | None
    new_tokens: int | None
    sampling: Sampling
    seed: int | None
    stops: tuple[str, ...] = ()
    stream: bool = False
    usage: bool = False
    choices: int = 1
    top_logprobs: int | None = None
    template: dict[str, Any] = field(default_factory=dict)
    tools: tuple[dict[str, Any], ...] = ()
    called: tuple[dict[str, Any], ...] = ()
    grammar: OutputGrammar | None = None
    warnings: tuple[str, ...] = ()
    adapter: str = ""
    priority: int = 0

    @property
    def is_chat(self) -> bool:
        return self.messages is not None


def default_sampling(named: Mapping[str, Any]) -> Sampling:
    """Return how tokens are drawn for requests that do not say: as the model's generation config has `named` it, else
    at temperature 1 from all tokens."""
    penalty = named.get("repetition_penalty") or 1.0
    if named.get("temperature") == 0:
        return Sampling(repetition_penalty=penalty)
    return Sampling(True, named.get("temperature") or 1.0, named.get("top_k") or 0, named.get("top_p") or 1.0,
                    named.get("min_p") or 0.0, penalty)


def read_inquiry(
    body: bytes | dict[str, Any], name: str, *, chat: bool, sampling: Sampling = PLAIN, strict: bool = False,
    adapters: Collection[str] = (),
) -> Inquiry:
    """Return the inquiry in a body, for the model of that name.

    Args:
        body: JSON, or the object in it.
        name: The model's.
        chat: Whether it holds messages.
        sampling: For what the body does not say.
        strict: Whether fields that are not served are refused, not passed over.
        adapters: Names of adapters, each of which is a model to clients.

    Raises:
        Refusal: 400 or 404, where it is none that is served.
    """
    fields = RequestFields(body, strict)
    fields.pass_over_unknown(SERVED | OUTPUT_FIELDS | IDLE | NEUTRAL.keys() | {"messages" if chat else "prompt"})
    for field_name, values in NEUTRAL.items():
        value = fields.get(field_name)
        if value is not None and not any(type(value) in _kinds(v) and value == v for v in values):
            fields.pass_over(field_name, f"is not served but as {json.dumps(values[0])}")
    adapter = adapter_of(fields, name, adapters)
    options = fields.mapping("stream_options")
    if not all(isinstance(v, bool) for v in options.values()):
        raise Refusal(400, 'stream_options must be {"include_usage": true} or be left out', "stream_options")
    messages = read_messages(fields, fields.get("messages")) if chat else None
    tools, called = read_tools(fields) if chat else ((), ())
    grammar = read_grammar(fields)
    if grammar is not None and tools and not called:
        fields.warnings.append("response_format is not enforced while tools may be called")
        grammar = None
    return Inquiry(
        () if chat else _prompts(fields.get("prompt")), messages, _new_tokens(fields, None if chat else
        COMPLETION_TOKENS), read_sampling(fields, sampling), fields.integer("seed", -(1 << 63), (1 << 63) - 1),
        read_stops(fields, "stop"), fields.flag("stream"), options.get("include_usage", False),
        fields.integer("n", 1, MOST_CHOICES) or 1, _top_logprobs(fields, chat),
        read_template(fields) if chat else {}, tools, called, call_grammar(called) if called else grammar,
        tuple(fields.warnings), adapter, fields.integer("priority", -MOST_PRIORITY, MOST_PRIORITY) or 0)


def adapter_of(fields: RequestFields, name: str, adapters: Collection[str]) -> str:
    """The adapter that a body names as its model; "" for this model, or none. Refusal (404) for other names."""
    model = fields.get("model")
    if model in (None, "", name):
        return ""
    if not isinstance(model, str) or model not in adapters:
        raise no_such_model(name, adapters)
    return model


def no_such_model(name: str, adapters: Collection[str]) -> Refusal:
    """Return the refusal (404) of a model's name."""
    return Refusal(404, f"there is no such model here; this server has {', '.join(map(repr, (name, *adapters)))}",
                   "model", "model_not_found")


def read_sampling(fields: RequestFields, sampling: Sampling) -> Sampling:
    """Return how tokens are chosen, by the fields of a body, else by `sampling`."""
    temperature = fields.number("temperature", 0.0, 2.0, sampling.temperature if sampling.do_sample else 0.0)
    top_k = fields.number("top_k", -1, MOST_TOP_K, sampling.top_k)  # -1 and 0: all tokens
    if not float(top_k).is_integer():
        raise Refusal(400, "top_k must be an integer", "top_k")
    repetition = "repeat_penalty" if fields.get("repetition_penalty") is None else "repetition_penalty"
    top_p, min_p = fields.number("top_p", 0.0, 1.0, sampling.top_p), fields.number("min_p", 0.0, 1.0, sampling.min_p)
    changes: dict[str, Any] = {
        "repetition_penalty": fields.number(repetition, 0.01, 100.0, sampling.repetition_penalty),
               **{name: fields.number(name, -2.0, 2.0, 0.0) for name in ("frequency_penalty", "presence_penalty")},
               "logit_bias": _logit_bias(fields)}
    if not temperature:
        return Sampling(**changes)
    return Sampling(True, temperature, max(0, int(top_k)), top_p, min_p, **changes)


def read_template(fields: RequestFields) -> dict[str, Any]:
    """Read the variables of the chat template: `chat_template_kwargs`, `enable_thinking` and `reasoning_effort`."""
    told: dict[str, Any] = {}
    effort = fields.get("reasoning_effort")
    if effort is not None:
        if not isinstance(effort, str):
            raise Refusal(400, 'reasoning_effort must be text, such as "low"', "reasoning_effort")
        told |= {"enable_thinking": False} if effort == "none" else {"reasoning_effort": effort}
    if fields.get("enable_thinking") is not None:
        told["enable_thinking"] = fields.flag("enable_thinking")
    return told | fields.mapping("chat_template_kwargs")


def read_stops(fields: RequestFields, name: str) -> tuple[str, ...]:
    """The strings that end an answer; an empty one asks for nothing."""
    value = fields.get(name)
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MOST_STOPS or not all(
            isinstance(s, str) and len(s) <= MOST_STOP_CHARACTERS for s in stops):
        raise Refusal(400, f"{name} must be a string or a list of at most {MOST_STOPS}, each of at most "
                      f"{MOST_STOP_CHARACTERS} characters", name)
    return tuple(stop for stop in stops if stop)


def _kinds(value: Any) -> tuple[type, ...]:
    """Types whose values may stand for a neutral value: 0 and 0.0 alike, but not False for 0."""
    return (int, float) if type(value) is int else (type(value),)


def _logit_bias(fields: RequestFields) -> tuple[tuple[int, float], ...]:
    given = fields.mapping("logit_bias")
    if len(given) > MOST_BIASES or not all(
            token.isascii() and token.isdigit() and len(token) < 18 and type(bias) in (int, float)
            and -100 <= bias <= 100 for token, bias in given.items()):
        raise Refusal(400, f"logit_bias must map at most {MOST_BIASES} token ids to numbers from -100 to 100",
                      "logit_bias")
    return tuple((int(token), float(bias)) for token, bias in given.items() if bias)


def _top_logprobs(fields: RequestFields, chat: bool) -> int | None:
    """Most likely tokens to tell with each: of a chat `top_logprobs`, where `logprobs` asks for any."""
    if not chat and type(fields.get("logprobs")) is not bool:
        return fields.integer("logprobs", 0, MOST_TOP_LOGPROBS)
    top = fields.integer("top_logprobs", 0, MOST_TOP_LOGPROBS) or 0
    return top if fields.flag("logprobs") or top else None


def _new_tokens(fields: RequestFields, typical: int | None) -> int | None:
    """The most tokens of an answer, or None for as many as the server gives; `typical` if the body names no number."""
    named: list[int | None] = []
    for name in ("max_completion_tokens", "max_tokens"):
        value = fields.get(name)
        if type(value) is int and value == UNLIMITED:
            named.append(None)
        elif value is not None:
            named.append(fields.integer(name, 1, 1 << 31))
    return named[0] if named else typical


def _prompts(value: Any) -> tuple[str | tuple[int, ...], ...]:
    several = isinstance(value, list) and value and isinstance(value[0], str | list)
    prompts = value if several else [value]
    if len(prompts) > MOST_CHOICES:
        raise Refusal(400, f"prompt must be at most {MOST_CHOICES} prompts", "prompt")
    return tuple(_prompt(each) for each in prompts)


def _prompt(value: Any) -> str | tuple[int, ...]:
    if isinstance(value, list) and value and all(type(i) is int and 0 <= i < 1 << 62 for i in value):
        return tuple(value)
    if not isinstance(value, str) or not value:
        raise Refusal(400, "prompt must be a string that is not empty, a list of token ids, or a list of several of "
                      "these", "prompt")
    return value


def tokens_of(
    inquiry: Inquiry, tokenize: Callable[[Inquiry], list[list[int]]], prompt: int, new_tokens: int
) -> tuple[list[tuple[list[int], int]], list[str]]:
    """Token ids of an inquiry's prompts and the most that are made of each, in slots of so many tokens of prompt and of
    answer, with warnings of answers that are cut; Refusal (400) for a prompt that has no room."""
    asked, warnings = [], []
    for ids in tokenize(inquiry):
        if len(ids) > prompt:
            raise Refusal(400, f"the prompt has {len(ids)} tokens; this server was started for at most {prompt} "
                          "(forebay serve --prompt)", "messages" if inquiry.is_chat else "prompt",
                          "context_length_exceeded")
        most = prompt + new_tokens - len(ids)
        if inquiry.new_tokens is not None and inquiry.new_tokens > most:
            warnings.append(f"max_tokens is {most} here, since a slot has room for {prompt + new_tokens} tokens of "
                            "prompt and answer")
        asked.append((ids, new_tokens if inquiry.new_tokens is None else min(inquiry.new_tokens, most)))
    return asked, warnings
