"""Prompts of a batch job: rows of a file, as text and as token ids."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.commands.chat_template import ChatTemplate
from forebay.commands.prompt_tables import TableError, carried, open_table
from forebay.commands.terminal import JobError
from forebay.commands.tokenizer_bounds import UnboundedTokenizer, check_folder, check_loaded
from forebay.images.parts import has_media, take_media
from forebay.rewriter.checkpoints.config import LOCAL_ONLY, read_eos, require_regular_files
from forebay.rewriter.checkpoints.hub import fetching
from forebay.rewriter.checkpoints.identity import TOKENIZER_FILES
from forebay.rewriter.checkpoints.named_errors import panicking
from forebay.rewriter.checkpoints.records import CheckpointError
from forebay.rewriter.one_thread import one_thread
from forebay.runtime.run.request import NO_ADAPTER
from forebay.runtime.run.sampling import Sampling

if TYPE_CHECKING:
    from forebay.commands.batch_requests import BatchRequest

QUESTION = ("prompt", "messages", "max_new_tokens", "adapter")  # of a line: what its answer depends on, and repeats
ANSWER = ("id", *QUESTION, "text", "tokens", "prompt_tokens", "finish")  # what an answer has of its own


@dataclass(frozen=True)
class BadLine:
    """A line of the prompts file that cannot be answered, and why."""

    line: int
    reason: str
    unit: str = "line"  # what is counted


@dataclass(frozen=True)
class PromptLine:
    """One line of the prompts file: `line` counts from 1; either `prompt` or `messages` is given. `max_new_tokens` is
    that of this answer alone; None: the job's. The answer repeats what is `carried`. A `batch` request is of OpenAI's
    form, and `template` what the chat template is given with its messages."""

    line: int
    id: str | int
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    max_new_tokens: int | None = None
    adapter: Any = None
    carried: dict[str, Any] = field(default_factory=dict)
    unit: str = "line"
    batch: BatchRequest | None = None
    template: dict[str, Any] = field(default_factory=dict)

    def refused(self, reason: str) -> BadLine:
        return BadLine(self.line, reason, self.unit)

    @property
    def pictured(self) -> bool:
        """Whether its messages hold images or videos."""
        return has_media(self.messages)

    @property
    def question(self) -> dict[str, Any]:
        """The part of the line that is asked, as it stands in the answer."""
        if self.batch is not None:
            return {"request_id": self.batch.digest}
        return {name: value for name in QUESTION if (value := getattr(self, name)) is not None}


ReadsImages = Callable[[PromptLine], list[int]]  # token ids of messages with images and videos


@dataclass(frozen=True)
class Prompt:
    """A request as token ids."""

    request: PromptLine
    ids: tuple[int, ...]


def read_requests(
    path: str | Path, column: str | None = None, system: str | None = None
) -> tuple[list[PromptLine], list[BadLine]]:
    """Read a file of prompts (`open_table`); blank lines are skipped but counted.

    A row has a `prompt` or `messages`, an optional `id` (a string or integer; by default the row's number) and an
    optional `max_new_tokens` (at least 1; by default the job's). What else it has is carried into its answer. A second
    row with the id of an earlier one is bad. Rows with a `custom_id` and a `body` are of OpenAI's batch form.

    Args:
        path: JSON lines, CSV, TSV, Parquet, or the folder of a saved data set.
        column: Where the prompts are; by default `prompt` or `messages`.
        system: A system message before each prompt, and before each chat that begins without one.

    Returns:
        The rows that can be asked, and the others with the reason.

    Raises:
        JobError: The file cannot be read.
    """
    requests: list[PromptLine] = []
    bad: list[BadLine] = []
    first: dict[str, int] = {}
    try:
        for number, unit, columns in open_table(path, column):
            try:
                request = replace(_request(number, columns, system), unit=unit)
                if first.setdefault(str(request.id), number) != number:
                    raise ValueError(f"id {request.id!r} is already that of {unit} {first[str(request.id)]}")
                requests.append(request)
            except ValueError as error:
                bad.append(BadLine(number, str(error), unit))
    except OSError as error:
        raise JobError(f"cannot read the prompts {path}: {error.strerror}") from error
    except TableError as error:
        raise JobError(str(error)) from error
    return requests, bad


def _request(number: int, columns: dict[str, Any] | str, system: str | None) -> PromptLine:
    """The question of a row. ValueError, in words, for one that has none."""
    if isinstance(columns, str):
        raise ValueError(columns)
    if "custom_id" in columns and "body" in columns:
        return _batch_request(number, columns)
    name = columns.get("id", number)
    if isinstance(name, bool) or not isinstance(name, str | int):
        raise ValueError(f"id must be a string or an integer, found {name!r}")
    prompt, messages = columns.get("prompt"), columns.get("messages")
    if (prompt is None) == (messages is None):
        raise ValueError('expected either "prompt" or "messages"')
    if prompt is not None:
        if not isinstance(prompt, str):
            raise ValueError(f"prompt must be a string, found {type(prompt).__name__}")
        if not prompt.strip():
            raise ValueError("the prompt is empty")
    elif not isinstance(messages, list) or not messages or not all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str | list)
        for m in messages
    ):
        raise ValueError('messages must be a list of {"role": "...", "content": "..."}')
    else:
        take_media(messages)  # which refuses other parts
    most = columns.get("max_new_tokens")
    if most is not None and (type(most) is not int or most < 1):
        raise ValueError(f"max_new_tokens must be an integer of at least 1, found {most!r}")
    others = carried(columns, ("id", *QUESTION), ANSWER)
    _check_text([columns, others])
    if system is not None:
        messages = messages or [{"role": "user", "content": prompt}]
        if messages[0]["role"] != "system":
            messages = [{"role": "system", "content": system}, *messages]
        prompt = None
    return PromptLine(number, name, prompt, messages, most, columns.get("adapter"), others)


def _batch_request(number: int, columns: dict[str, Any]) -> PromptLine:
    from forebay.commands.batch_requests import read_batch_request

    _check_text(columns)
    request = read_batch_request(columns)
    asked = request.inquiry(Sampling())
    template = {**asked.template, **({"tools": list(asked.tools)} if asked.tools else {})}
    messages = None if asked.messages is None else list(asked.messages)
    prompt = next((each for each in asked.prompts if isinstance(each, str)), None)
    return PromptLine(number, columns["custom_id"], prompt, messages, asked.new_tokens, request.body.get("model"),
                      batch=request, template=template)


def _check_text(columns: Any) -> None:
    try:
        json.dumps(columns, ensure_ascii=False, default=str).encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError("holds half of a surrogate pair, which is no text") from error


def encode(
    requests: Iterable[PromptLine], tokenizer: Any, *, chat: bool, vocab_size: int,
    most_tokens: Callable[[PromptLine], int | None] = lambda request: None, images: ReadsImages | None = None,
) -> tuple[list[Prompt], list[BadLine]]:
    """Token ids of each request, through the tokenizer's chat template for messages (with `chat` for prompts too), and
    through `images` for messages with images.

    A prompt longer than `most_tokens` of its request (None: no limit), one without tokens, one with a token that the
    model's vocabulary of `vocab_size` lacks, and one the template refuses are bad lines.
    """
    prompts: list[Prompt] = []
    bad: list[BadLine] = []
    with ChatTemplate(tokenizer) as template:
        for request in requests:
            try:
                ids = images(request) if images is not None and request.pictured else prompt_ids(
                    request, tokenizer, template, chat)
                check_ids(ids, most_tokens(request), vocab_size)
            except BadPrompt as error:
                bad.append(request.refused(str(error)))
            else:
                prompts.append(Prompt(request, tuple(ids)))
    return prompts, bad


def refuse_adapters(prompts: Sequence[Prompt], adapters: Collection[str]) -> tuple[list[Prompt], list[BadLine]]:
    """The prompts whose adapters are known, and the others with the reason. The model of a line of OpenAI's batch form
    may be any."""
    def known(name: object) -> bool:
        return not name or (isinstance(name, str) and (name == NO_ADAPTER or name in adapters))

    advice = "" if adapters else "; --adapter NAME=FOLDER opens one by name"
    bad = [each.request.refused(f"no adapter {each.request.adapter!r}{advice}") for each in prompts
           if each.request.batch is None and not known(each.request.adapter)]
    lines = {each.line for each in bad}
    return [each for each in prompts if each.request.line not in lines], bad


def takes_chats(tokenizer: Any, chat: bool | None) -> bool:
    """Return whether prompts go through the chat template: as asked, or for None where the model has one.

    Raises:
        JobError: It is asked for, and there is none.
    """
    there = bool(getattr(tokenizer, "chat_template", None))
    if chat and not there:
        raise JobError("the model's tokenizer has no chat template; leave --chat and --system out")
    return there if chat is None else chat


class BadPrompt(JobError):
    """Why a prompt cannot be answered."""


def prompt_ids(request: PromptLine, tokenizer: Any, template: ChatTemplate, chat: bool = False) -> list[int]:
    """Token ids of a request, its messages (with `chat` its prompt too) through the template; BadPrompt if there are
    none to be had."""
    messages = request.messages
    if messages is None and chat and request.batch is None:
        messages = [{"role": "user", "content": request.prompt}]
    if messages is None:
        return text_ids(tokenizer, request.prompt or "")
    return chat_ids(messages, tokenizer, template, request.template)


def chat_ids(
    messages: list[dict[str, Any]], tokenizer: Any, template: ChatTemplate, told: dict[str, Any] | None = None
) -> list[int]:
    """Token ids of a chat, whose template is `told` this with the messages; BadPrompt if there are none."""
    if not getattr(tokenizer, "chat_template", None):
        raise BadPrompt('the model\'s tokenizer has no chat template; use "prompt"')
    messages, media = take_media(messages)
    if media:
        raise BadPrompt("images and videos: this model takes text alone; leave them out")
    try:
        text = template.render(messages, told)
    except ValueError as error:
        raise BadPrompt(f"the chat template refuses these messages: {error}") from error
    return text_ids(tokenizer, text, add_special_tokens=False)


def text_ids(tokenizer: Any, text: str, **options: Any) -> list[int]:
    """Token ids of a text, with the tokenizer's own `options`; BadPrompt where it fails."""
    try:
        text.encode("utf-8")
        with panicking():
            return tokenizer(text, **options)["input_ids"]
    except MemoryError:
        raise
    except UnicodeEncodeError as error:  # of a command line, of bytes that are none of the locale's encoding
        raise BadPrompt("it has bytes that are no text in the encoding of this terminal") from error
    except Exception as error:  # the tokenizers library raises plain Exception: an unknown word without an [UNK], say
        raise BadPrompt(f"the tokenizer refuses it: {error}") from error


def ids_text(tokenizer: Any, ids: Sequence[int], special: bool = False) -> str:
    """The text of token ids, without special tokens or with them; JobError where the tokenizer fails."""
    try:
        with panicking():
            return tokenizer.decode(ids, skip_special_tokens=not special)
    except MemoryError:
        raise
    except Exception as error:
        raise JobError(f"the tokenizer cannot read the answer: {error}") from error


def check_ids(ids: Sequence[int], most_tokens: int | None, vocab_size: int) -> None:
    """BadPrompt unless there are ids, at most so many, and all of the vocabulary."""
    if not ids:
        raise BadPrompt("the prompt has no token")
    if most_tokens is not None and most_tokens < 1:
        raise BadPrompt("max_new_tokens leaves no room for a prompt")
    if most_tokens is not None and len(ids) > most_tokens:
        raise BadPrompt(f"the prompt is too long: {len(ids)} tokens, at most {most_tokens} fit")
    if max(ids) >= vocab_size:
        raise BadPrompt(f"the tokenizer gives token {max(ids)}, but the model's vocabulary has {vocab_size}: they do "
                        "not belong together")


@one_thread
def load_tokenizer(folder: Path) -> Any:
    """The folder's own tokenizer; JobError where it has none that works, or one that may make too much of a text."""
    from transformers import AutoTokenizer

    if not any(path for pattern in TOKENIZER_FILES for path in folder.glob(pattern)):
        advice = f"; fetch it: {command}" if (command := fetching(folder)) else ""
        raise JobError(f"{folder} holds no usable tokenizer: there is no tokenizer.json, nor another file of "
                       f"one{advice}")
    try:
        require_regular_files(folder)
        check_folder(folder)
        with panicking():
            tokenizer = AutoTokenizer.from_pretrained(folder, **LOCAL_ONLY)
        check_loaded(tokenizer)
        return tokenizer
    except ModuleNotFoundError:
        raise
    except CheckpointError as error:
        raise JobError(str(error)) from error
    except UnboundedTokenizer as error:
        raise JobError(f"{folder} holds no usable tokenizer: {error}") from error
    except Exception as error:  # the tokenizers library raises plain Exception, and transformers whatever it meets
        raise JobError(f"{folder} holds no usable tokenizer (tokenizer.json): {error!r}") from error


def stop_ids(folder: Path, tokenizer: Any) -> tuple[int, ...]:
    """The token ids that end an answer: of generation_config.json, else config.json, else the tokenizer. JobError for
    a file that cannot be read as such."""
    try:
        found = read_eos(folder)
    except CheckpointError as error:
        raise JobError(str(error)) from error
    if found:
        return found
    return () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
