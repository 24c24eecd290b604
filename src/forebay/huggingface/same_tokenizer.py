"""Whether two models' folders have one tokenizer: drafts are ids, which must mean the same to both."""

from __future__ import annotations

import json
from pathlib import Path

from forebay.rewriter.ir.files import read_input


def refuse_other_tokenizer(folder: Path, other: Path, given: str = "assistant_model") -> None:
    """ValueError, naming what differs, if both folders have a tokenizer.json whose tokens have not the same ids;
    `given` is the argument that named the other."""
    ours, theirs = (_token_ids(Path(each) / "tokenizer.json") for each in (folder, other))
    if ours is None or theirs is None or ours == theirs:
        return
    if len(ours) != len(theirs):
        what = f"it has {len(theirs)} tokens, the model's {len(ours)}"
    else:
        token = min(token for token in ours if ours[token] != theirs.get(token))
        what = f"{token!r} has id {ours[token]} for the model and {theirs.get(token, 'none')} for the assistant"
    raise ValueError(f"{given}: its tokenizer is another: {what}; give a model of the same tokenizer")


def _token_ids(file: Path) -> dict[str, int] | None:
    """The id of each token, special ones too; None where there is no such file or it lists no tokens by name."""
    try:
        read = json.loads(read_input(file))
        listed = read["model"]["vocab"]
        found = dict(listed) if isinstance(listed, dict) else {piece[0]: i for i, piece in enumerate(listed)}
        return found | {added["content"]: added["id"] for added in read.get("added_tokens") or ()}
    except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError):
        return None
