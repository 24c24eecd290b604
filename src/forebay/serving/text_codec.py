"""A model's texts as token ids, and the parts of its answers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from forebay.commands.chat_template import ChatTemplate
from forebay.commands.prompts import BadPrompt, chat_ids, check_ids, ids_text, text_ids
from forebay.images.parts import has_media
from forebay.runtime.run.logits_processing import Constraint
from forebay.serving.answer_parser import BARE, CONTENT, REASONING, AnswerParser, WholeText, answer_format
from forebay.serving.refusal import Refusal
from forebay.serving.requests import Inquiry
from forebay.structured_output import StructuredOutput, StructuredOutputError

if TYPE_CHECKING:
    from forebay.runtime.run.step_inputs import PromptFeatures
    from forebay.serving.served_images import ServedImages

LAST_TOKENS = 16  # of a prompt, in which a mark of reasoning is looked for


@dataclass(frozen=True)
class AnswerParts:
    """How the answers to one request are read: their text, its parser, and what constrains them, for each."""

    decode: Callable[[list[int]], str]
    parsers: list[AnswerParser]
    constraints: list[Callable[[], Constraint] | None]


class TextCodec:
    """The tokenizer and chat template of a model whose logits are for `vocab_size` tokens; answers end with `eos`, and
    `images` reads those of chats. For use from several threads."""

    def __init__(
        self, tokenizer: Any, template: ChatTemplate, vocab_size: int, eos: Collection[int],
        images: ServedImages | None = None,
    ) -> None:
        self.tokenizer, self.template, self.vocab_size, self.images = tokenizer, template, vocab_size, images
        self.has_template = bool(getattr(tokenizer, "chat_template", None))
        self.format = answer_format(tokenizer.get_chat_template() if self.has_template else None)
        self.structured = StructuredOutput(tokenizer, vocab_size, eos)
        self._lock = threading.Lock()  # one process renders
        marks = set(tokenizer.convert_tokens_to_ids(list(self.format.marks)))
        self._unmarked = frozenset(tokenizer.all_special_ids) - marks

    def decode(self, ids: list[int], special: bool = False) -> str:
        """The text of token ids, without special tokens or with them."""
        return ids_text(self.tokenizer, ids, special)

    def _decode_marks(self, ids: list[int]) -> str:
        """The text of token ids, of special tokens with the marks of answers alone."""
        return ids_text(self.tokenizer, [i for i in ids if i not in self._unmarked], True)

    def tokenize(self, inquiry: Inquiry) -> list[list[int]]:
        """Token ids of each prompt of an inquiry; Refusal (400) for one that has none."""
        biased = max((token for token, _ in inquiry.sampling.logit_bias), default=0)
        if biased >= self.vocab_size:
            raise Refusal(400, f"token {biased} of logit_bias is none of the model's vocabulary, which has "
                          f"{self.vocab_size}", "logit_bias")
        try:
            prompts = [self._image_ids(inquiry)] if has_media(inquiry.messages) else self._text_ids(inquiry)
            for ids in prompts:
                check_ids(ids, None, self.vocab_size)
        except BadPrompt as error:
            raise Refusal(400, str(error), "messages" if inquiry.is_chat else "prompt") from error
        return prompts

    def _text_ids(self, inquiry: Inquiry) -> list[list[int]]:
        with self._lock:
            if inquiry.messages is not None:
                return [chat_ids(list(inquiry.messages), self.tokenizer, self.template, _told(inquiry))]
            return [self._ids(prompt) for prompt in inquiry.prompts]

    def _image_ids(self, inquiry: Inquiry) -> list[int]:
        if self.images is None:
            raise BadPrompt("images and videos: this server takes text alone; start it with --image-memory SIZE")
        return self.images.ids(inquiry.messages or (), _told(inquiry))

    def features(self, inquiry: Inquiry) -> PromptFeatures | None:
        """Return the features of a chat's image tokens, if it has any; Refusal (400) where they cannot be computed."""
        if self.images is None or not has_media(inquiry.messages):
            return None
        return self.images.features(inquiry.messages or (), _told(inquiry))

    def _ids(self, prompt: str | tuple[int, ...]) -> list[int]:
        if isinstance(prompt, str):
            return text_ids(self.tokenizer, prompt)
        if max(prompt) >= self.vocab_size:
            raise BadPrompt(f"token {max(prompt)} is none of the model's vocabulary, which has {self.vocab_size}")
        return list(prompt)

    def parts(self, inquiry: Inquiry, prompt: list[int], count: int) -> AnswerParts:
        """Return how `count` answers to an inquiry with these tokens are read; Refusal (400) for a grammar that cannot
        be."""
        if not inquiry.is_chat:
            whole = [WholeText() for _ in range(count)]
            return AnswerParts(self.decode, [*whole], self._constraints(inquiry, count, None))
        format, opens = self.format, self.format.opens_reasoning
        reasons = opens is not None and self._decode_marks(prompt[-LAST_TOKENS:]).rstrip().endswith(opens)
        closes = f"{opens[0]}/{opens[1:]}" if opens is not None and reasons else None
        constraints = self._constraints(inquiry, count, closes)
        if inquiry.called:
            format = BARE.with_marks({closes: CONTENT} if closes else {})
        elif not inquiry.tools:
            format = format.without_calls()
        return AnswerParts(self._decode_marks if self.format.special else self.decode,
                           [format.parser(REASONING if reasons else CONTENT) for _ in range(count)], constraints)

    def _constraints(
        self, inquiry: Inquiry, count: int, after: str | None
    ) -> list[Callable[[], Constraint] | None]:
        """Make the constraint of each answer; this may take a while."""
        grammar, structured = inquiry.grammar, self.structured
        if grammar is None:
            return [None] * count
        try:
            return [partial(_same, structured.constraint(grammar, after)) for _ in range(count)]
        except StructuredOutputError as error:
            field = "tools" if inquiry.called else "response_format"
            raise Refusal(400, f"{field}: {error}", field) from error


def _told(inquiry: Inquiry) -> dict[str, Any]:
    """Return the variables for the chat template besides messages."""
    return {**inquiry.template, **({"tools": list(inquiry.tools)} if inquiry.tools else {})}


def _same(constraint: Constraint) -> Constraint:
    return constraint
