"""A tokenizer that is its tokenizer.json and nothing else, read without transformers, which takes two seconds to load.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from forebay.commands.tokenizer_bounds import check_folder
from forebay.rewriter.checkpoints.config import TEMPLATES, require_regular_files
from forebay.rewriter.checkpoints.named_errors import panicking
from forebay.rewriter.ir.files import read_input, read_input_text

SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")
CHAT_TEMPLATE = "chat_template.jinja"
CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")  # those that add no code of their own
# entries of tokenizer_config.json that change neither the ids of a text nor the text of ids
KNOWN = {"backend", "bos_token", "eos_token", "pad_token", "unk_token", "is_local", "local_files_only",
         "model_max_length", "tokenizer_class", "chat_template", "padding_side", "model_input_names"}


class PlainTokenizer:
    """A tokenizer that equals transformers' for the same folder, for plain text and for chats.

    Attributes:
        chat_template: The model's template for chats; None where it has none.
        special_tokens_map: The special tokens that a template may name, by their names.
        all_special_ids: Their ids.
        backend_tokenizer: The tokenizer of the tokenizers library.
        eos_token_id: The token that ends an answer; None where there is none.
    """

    def __init__(self, folder: Path, special_tokens: dict[str, str], chat_template: str | None) -> None:
        from tokenizers import Tokenizer

        self.backend_tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.backend_tokenizer.no_truncation()
        self.backend_tokenizer.no_padding()
        self.chat_template, self.special_tokens_map = chat_template, special_tokens
        eos = special_tokens.get("eos_token")
        self.eos_token_id = None if eos is None else self.backend_tokenizer.token_to_id(eos)
        self._unknown = self.backend_tokenizer.token_to_id(special_tokens.get("unk_token", ""))
        self.all_special_ids = self.convert_tokens_to_ids(list(dict.fromkeys(special_tokens.values())))

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids}

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=True)

    def convert_tokens_to_ids(self, tokens: list[str]) -> list[int | None]:
        """Return the id of each token, of one that is not in the vocabulary the unknown token's."""
        ids = map(self.backend_tokenizer.token_to_id, tokens)
        return [self._unknown if i is None else i for i in ids]

    def get_added_vocab(self) -> dict[str, int]:
        """Return the ids of tokens added to the vocabulary."""
        return {token.content: i for i, token in sorted(self.backend_tokenizer.get_added_tokens_decoder().items())}

    def get_chat_template(self) -> str | None:
        """Return the template for chats."""
        return self.chat_template

    def decode(self, ids: Any, skip_special_tokens: bool = False) -> str:
        return self.backend_tokenizer.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)


def plain_tokenizer(folder: Path) -> PlainTokenizer | None:
    """The tokenizer of a folder, where it is plain: its config says nothing that transformers would have to do."""
    require_regular_files(folder)
    try:
        settings = json.loads(read_input(folder / "tokenizer_config.json"))
        if set(settings) - KNOWN or settings.get("tokenizer_class") not in CLASSES:
            return None
        if (folder / "special_tokens_map.json").exists() or (folder / "added_tokens.json").exists():
            return None
        special = {name: settings[name] for name in SPECIAL if settings.get(name) is not None}
        template = settings.get("chat_template")
        if (folder / CHAT_TEMPLATE).exists():
            template = read_input_text(folder / CHAT_TEMPLATE)
        if not all(isinstance(each, str | None) for each in (*special.values(), template)):
            return None
        if (folder / TEMPLATES).exists():
            return None
        check_folder(folder)
        with panicking():
            return PlainTokenizer(folder, special, template)
    except Exception:  # the tokenizers library raises plain Exception; transformers says what is wrong
        return None
