"""Bodies of requests for completions and chat completions: read, checked, and refused with what to do.

Fields are those of OpenAI's API reference; one that would change answers and is not served is refused by name, unless
its value asks for nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forebay.runtime.run.sampling import Sampling
from forebay.serving.refusal import Refusal

if TYPE_CHECKING:
    from transformers import GenerationConfig

MOST_STOPS, MOST_STOP_CHARACTERS = 4, 256  # strings that end an answer
MOST_MESSAGES = 4096
MOST_TOP_K = (1 << 31) - 1
COMPLETION_TOKENS = 16  # of a completion that names no number, as OpenAI has it
# Fields that change no answer here, and those that are served for the values that ask for nothing.
IDLE = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_options",
        "prompt_cache_retention", "cache_prompt", "keep_alive"}
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "echo": (False,), "suffix": ("",), "logprobs": (False,), "top_logprobs": (0,),
    "logit_bias": ({},), "presence_penalty": (0,), "frequency_penalty": (0,), "tools": ([],), "functions": ([],),
    "tool_choice": ("none", "auto"), "parallel_tool_calls": (True, False), "response_format": ({"type": "text"},),
    "modalities": (["text"],), "function_call": ("none", "auto"), "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    # of other servers' interfaces, which clients send with their defaults
    "min_p": (0,), "top_a": (0,), "typical_p": (1,), "xtc_probability": (0,), "dry_multiplier": (0,),
    "mirostat": (0,), "repetition_penalty": (1,), "repeat_penalty": (1,), "length_penalty": (1,), "min_tokens": (0,),
    "stop_token_ids": ([],), "ignore_eos": (False,), "use_beam_search": (False,), "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,), "add_generation_prompt": (True,), "continue_final_message": (False,),
    "chat_template_kwargs": ({},), "documents": ([],)}
SERVED = {"model", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "seed", "stop", "stream",
          "stream_options"}
PLAIN = Sampling(True, 1.0, 0, 1.0)  # where a model's generation config says nothing
UNLIMITED = -1  # of max_tokens: as many as the server gives


@dataclass(frozen=True)
class Inquiry:
    """What one request asks for: text, token ids or messages to be continued by at most `new_tokens` (None: as the
    server has it), until one of the `stops`."""

    prompt: str | tuple[int, ...] | None
    messages: tuple[dict[str, str], ...] | None
    new_tokens: int | None
    sampling: Sampling
    seed: int | None
    stops: tuple[str, ...] = ()
    stream: bool = False
    usage: bool = False  # is told at the end of a stream

    @property
    def is_chat(self) -> bool:
        return self.messages is not None


def default_sampling(config: GenerationConfig) -> Sampling:
    """Return how tokens are drawn for requests that do not say: as the model's generation config has it, else at
    temperature 1 from all tokens."""
    named = config.to_diff_dict()
    if named.get("temperature") == 0:
        return Sampling()
    return Sampling(True, named.get("temperature") or 1.0, named.get("top_k") or 0, named.get("top_p") or 1.0)


def read_inquiry(body: bytes, name: str, *, chat: bool, sampling: Sampling = PLAIN) -> Inquiry:
    """Return the inquiry in a body, for the model of that name.

    Args:
        body: JSON.
        name: The model's.
        chat: Whether it holds messages.
        sampling: For what the body does not say.

    Raises:
        Refusal: 400 or 404, where it is none that is served.
    """
    given = _object(body)
    text = "messages" if chat else "prompt"
    for field, value in given.items():  # null asks for nothing, whatever it is of
        if value is not None and field not in SERVED and field not in IDLE and field not in NEUTRAL and field != text:
            raise Refusal(400, f"{field} is not known here; leave it out", field)
    for field, values in NEUTRAL.items():
        value = given.get(field)
        if value is not None and not any(type(value) in _kinds(v) and value == v for v in values):
            raise Refusal(400, f"{field} is not served but as {json.dumps(values[0])}; leave it out", field)
    if given.get("model") not in (None, "", name):
        raise Refusal(404, f"there is no such model here; this server has {name!r}", "model", "model_not_found")
    options = given.get("stream_options")
    if options is not None and not (isinstance(options, dict) and set(options) <= {
            "include_usage", "include_obfuscation"} and all(isinstance(v, bool) for v in options.values())):
        raise Refusal(400, 'stream_options must be {"include_usage": true} or be left out', "stream_options")
    temperature = _number(given, "temperature", 0.0, 2.0, sampling.temperature if sampling.do_sample else 0.0)
    top_p = _number(given, "top_p", 0.0, 1.0, sampling.top_p)
    top_k = _number(given, "top_k", -1, MOST_TOP_K, sampling.top_k)  # -1 and 0: all tokens
    if not float(top_k).is_integer():
        raise Refusal(400, "top_k must be an integer", "top_k")
    new_tokens = _new_tokens(given, None if chat else COMPLETION_TOKENS)
    stream = given.get("stream")
    if stream is not None and type(stream) is not bool:
        raise Refusal(400, "stream must be true or false", "stream")
    return Inquiry(
        None if chat else _prompt(given.get("prompt")), _messages(given.get("messages")) if chat else None,
        new_tokens, Sampling(True, temperature, max(0, int(top_k)), top_p) if temperature else Sampling(),
        _integer(given, "seed", -(1 << 63), (1 << 63) - 1), _stops(given.get("stop")), bool(stream),
        bool((options or {}).get("include_usage")))


def _kinds(value: Any) -> tuple[type, ...]:
    """Types whose values may stand for a neutral value: 0 and 0.0 alike, but not False for 0."""
    return (int, float) if type(value) is int else (type(value),)


def _object(body: bytes) -> dict[str, Any]:
    def refuse(word: str) -> float:
        raise ValueError(f"{word} is no number of JSON")

    try:
        given = json.loads(body.decode("utf-8"), parse_constant=refuse)
        json.dumps(given, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise Refusal(400, "the body holds half of a surrogate pair, which is no text") from error
    except UnicodeDecodeError as error:
        raise Refusal(400, f"the body is not UTF-8: {error.reason} at byte {error.start}") from error
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"the body is not JSON: {error}") from error
    if not isinstance(given, dict):
        raise Refusal(400, f"the body must be an object of JSON, not {type(given).__name__}")
    return given


def _number(given: dict[str, Any], field: str, least: float, most: float, typical: float) -> float:
    value = given.get(field)
    if value is None:
        return typical
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise Refusal(400, f"{field} must be a number from {least:g} to {most:g}", field)
    return 0.0 if math.isclose(value, 0.0, abs_tol=1e-6) else float(value)


def _integer(given: dict[str, Any], field: str, least: int, most: int) -> int | None:
    value = given.get(field)
    if value is not None and (type(value) is not int or not least <= value <= most):
        raise Refusal(400, f"{field} must be an integer from {least} to {most}", field)
    return value


def _new_tokens(given: dict[str, Any], typical: int | None) -> int | None:
    """The most tokens of an answer, or None for as many as the server gives; `typical` if the body names no number."""
    named: list[int | None] = []
    for field in ("max_completion_tokens", "max_tokens"):
        value = given.get(field)
        if type(value) is int and value == UNLIMITED:
            named.append(None)
        elif value is not None:
            named.append(_integer(given, field, 1, 1 << 31))
    return named[0] if named else typical


def _stops(value: Any) -> tuple[str, ...]:
    """The strings that end an answer; an empty one asks for nothing."""
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MOST_STOPS or not all(
            isinstance(s, str) and len(s) <= MOST_STOP_CHARACTERS for s in stops):
        raise Refusal(400, f"stop must be a string or a list of at most {MOST_STOPS}, each of at most "
                      f"{MOST_STOP_CHARACTERS} characters", "stop")
    return tuple(stop for stop in stops if stop)


def _prompt(value: Any) -> str | tuple[int, ...]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, list) and value and all(type(i) is int and 0 <= i < 1 << 62 for i in value):
        return tuple(value)
    if not isinstance(value, str) or not value:
        raise Refusal(400, "prompt must be a string that is not empty or a list of token ids; send several prompts as "
                      "several requests, which are answered together", "prompt")
    return value


def _messages(value: Any) -> tuple[dict[str, str], ...]:
    if not isinstance(value, list) or not 0 < len(value) <= MOST_MESSAGES:
        raise Refusal(400, f'messages must be a list of 1 to {MOST_MESSAGES} of {{"role": "…", "content": "…"}}',
                      "messages")
    return tuple(_message(i, each) for i, each in enumerate(value))


def _message(number: int, value: Any) -> dict[str, str]:
    where = f"messages[{number}]"
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise Refusal(400, f'{where} must be {{"role": "…", "content": "…"}}', "messages")
    for field in sorted(value.keys() - {"role", "content", "name"}):
        if not _is_empty(value[field]):
            raise Refusal(400, f"{field} of {where} is not served; leave it out", "messages")
    content, name = value.get("content"), value.get("name")
    if value["role"] == "assistant" and content in (None, []):  # an answer without text, as one that calls tools
        content = ""
    if isinstance(content, list):
        content = _joined(content)
    if not isinstance(content, str):
        raise Refusal(400, f'content of {where} must be text, or a list of {{"type": "text", "text": "…"}}', "messages")
    if name is not None and not isinstance(name, str):
        raise Refusal(400, f"name of {where} must be text", "messages")
    return {"role": value["role"], "content": content, **({} if name is None else {"name": name})}


def _is_empty(value: Any) -> bool:
    """Whether a field of a message says nothing, as those of an answer without tools."""
    parts = value.values() if isinstance(value, dict) else (value,)
    return all(part in (None, "", [], {}) for part in parts)


def _joined(parts: list[Any]) -> str | None:
    """The text of a message in parts; None if one is no text."""
    texts = [p["text"] if isinstance(p, dict) and p.get("type") == "text" and isinstance(p.get("text"), str) else None
             for p in parts]
    return None if None in texts or not texts else "".join(t for t in texts if t is not None)


def tokens_of(
    inquiry: Inquiry, tokenize: Callable[[Inquiry], list[int]], prompt: int, new_tokens: int
) -> tuple[list[int], int]:
    """Token ids of an inquiry and the most that are made of it, in slots of so many tokens of prompt and of answer;
    Refusal (400) where there is no room."""
    ids = tokenize(inquiry)
    if len(ids) > prompt:
        raise Refusal(400, f"the prompt has {len(ids)} tokens; this server was started for at most {prompt} (forebay "
                      "serve --prompt)", "messages" if inquiry.is_chat else "prompt", "context_length_exceeded")
    if inquiry.new_tokens is not None and inquiry.new_tokens > new_tokens:
        raise Refusal(400, f"{inquiry.new_tokens} tokens are asked for; this server was started for answers of at most "
                      f"{new_tokens} (forebay serve --new-tokens)", "max_tokens")
    return ids, inquiry.new_tokens or new_tokens
