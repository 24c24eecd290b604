"""Assistants of another tokenizer are refused by what differs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forebay.huggingface.same_tokenizer import refuse_other_tokenizer


@pytest.mark.parametrize(("theirs", "added", "says"), [
    ({"a": 0, "b": 1}, [{"content": "<s>", "id": 2}], None),
    ({"a": 1, "b": 0}, [{"content": "<s>", "id": 2}], "'a' has id 0 for the model and 1 for the assistant"),
    ({"a": 0, "b": 1}, [{"content": "<e>", "id": 2}], "'<s>' has id 2 for the model and none for the assistant"),
    ({"a": 0, "b": 1}, [], "it has 2 tokens, the model's 3"),
    ([["a", -1.0], ["b", -2.0]], [{"content": "<s>", "id": 2}], None),
    (7, None, None),  # no list of tokens: nothing to compare
])
def test_what_differs_is_named(tmp_path: Path, theirs: Any, added: Any, says: str | None) -> None:
    folders = []
    for name, vocab, more in (("ours", {"a": 0, "b": 1}, [{"content": "<s>", "id": 2}]), ("theirs", theirs, added)):
        folders.append(tmp_path / name)
        folders[-1].mkdir()
        (folders[-1] / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": more}))
    if says is None:
        return refuse_other_tokenizer(*folders)
    with pytest.raises(ValueError, match=says):
        refuse_other_tokenizer(*folders)
    refuse_other_tokenizer(folders[0], tmp_path)  # a folder without one
