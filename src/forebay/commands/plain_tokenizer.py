"""A tokenizer that is its tokenizer.json and nothing else, read without transformers, which takes two seconds to load.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from forebay.commands.tokenizer_bounds import check_folder
from forebay.rewriter.checkpoints.config import require_regular_files
from forebay.rewriter.checkpoints.named_errors import panicking
from forebay.rewriter.ir.files import read_input

CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")  # those that add no code of their own
# entries of tokenizer_config.json that change neither the ids of a text nor the text of ids
KNOWN = {"backend", "bos_token", "eos_token", "pad_token", "unk_token", "is_local", "local_files_only",
         "model_max_length", "tokenizer_class", "chat_template", "padding_side", "model_input_names"}


class PlainTokenizer:
    """As transformers' tokenizer for the same folder, for plain text."""

    chat_template = None

    def __init__(self, folder: Path, eos_token: str | None) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.eos_token_id = None if eos_token is None else self._tokenizer.token_to_id(eos_token)

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": self._tokenizer.encode(text).ids}

    def decode(self, ids: Any, skip_special_tokens: bool = False) -> str:
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)


def plain_tokenizer(folder: Path) -> PlainTokenizer | None:
    """The tokenizer of a folder, where it is plain: its config says nothing that transformers would have to do."""
    require_regular_files(folder)
    try:
        settings = json.loads(read_input(folder / "tokenizer_config.json"))
        if set(settings) - KNOWN or settings.get("tokenizer_class") not in CLASSES:
            return None
        if (folder / "special_tokens_map.json").exists() or (folder / "added_tokens.json").exists():
            return None
        eos = settings.get("eos_token")
        if not (eos is None or isinstance(eos, str)):
            return None
        check_folder(folder)
        with panicking():
            return PlainTokenizer(folder, eos)
    except Exception:  # the tokenizers library raises plain Exception; transformers says what is wrong
        return None
