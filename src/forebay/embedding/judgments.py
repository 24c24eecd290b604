"""Causal models that score documents: asked whether a document answers a query, by the prompt they were trained on."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from forebay.commands.prompts import text_ids
from forebay.embedding.sentence_files import MODULES, scores_by_logits
from forebay.rewriter.checkpoints.records import CheckpointError

USER, ANSWER = "<|im_end|>\n<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
FIELD = re.compile(r"\{(\w+)\}")
QUERY_SHARE = 0.75  # of the tokens that a query and a document may have together


@dataclass(frozen=True)
class Judgment:
    """The question of one family of models.

    Attributes:
        parts: Texts of the prompt with `{query}`, `{document}` and `{instruction}`, which become tokens one by one.
        yes: Text of the token that stands for an answer.
        no: Text of the token whose logit is subtracted, if any.
        instruction: The task.
        starts: Whether the tokenizer's first token is in front.
        probability: Whether scores are probabilities, else logits.
    """

    parts: tuple[str, ...]
    yes: str
    no: str | None = None
    instruction: str = ""
    starts: bool = False
    probability: bool = False

    def ids(self, tokenizer: Any, query: str, document: str, most: int | None) -> list[int]:
        """Token ids of one prompt, of which at most so many: a long query is cut, then the document."""
        values = {"query": query, "document": document, "instruction": self.instruction}
        found = [text_ids(tokenizer, FIELD.sub(lambda name: values[name[1]], part), add_special_tokens=False)
                 for part in self.parts]
        asked, shown = (next(i for i, part in enumerate(self.parts) if f"{{{name}}}" in part)
                        for name in ("query", "document"))
        room = None if most is None else max(0, most - self.starts - sum(
            len(each) for i, each in enumerate(found) if i not in (asked, shown)))
        if room is not None and asked != shown:
            found[asked] = found[asked][: int(room * QUERY_SHARE)]
            room -= len(found[asked])
        found[shown] = found[shown][:room]
        return [*[tokenizer.bos_token_id] * self.starts, *(token for each in found for token in each)]

    def scores(self, logits: torch.Tensor, tokenizer: Any) -> torch.Tensor:
        """Scores [B] by the logits [B, vocabulary] after the prompts."""
        found = logits[:, text_ids(tokenizer, self.yes, add_special_tokens=False)[0]]
        if self.no is not None:
            found = found - logits[:, text_ids(tokenizer, self.no, add_special_tokens=False)[0]]
        return torch.sigmoid(found) if self.probability else found


# By model type: Qwen3-Reranker, bge-reranker-v2-gemma and mxbai-rerank-v2, as their cards ask them.
JUDGMENTS = {
    "qwen3": Judgment((
        '<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct '
        f'provided. Note that the answer can only be "yes" or "no".{USER}',
        "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}", f"{ANSWER}<think>\n\n</think>\n\n"),
        "yes", "no", "Given a web search query, retrieve relevant passages that answer the query", probability=True),
    "gemma": Judgment((
        "A: {query}", "\n", "B: {document}", "\n", "Given a query A and a passage B, determine whether the passage "
        "contains an answer to the query by providing a prediction of either 'Yes' or 'No'."), "Yes", starts=True),
    "qwen2": Judgment((
        f"<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.{USER}",
        "query: {query}", "\n", "document: {document}", "\n",
        "You are a search relevance expert who evaluates how well documents match search queries. For each "
        "query-document pair, carefully analyze the semantic relationship between them, then provide your binary "
        "relevance judgment (0 for not relevant, 1 for relevant).\nRelevance:",
        ANSWER), "1", "0")}


def judgment_of(model_type: str, folder: Path) -> Judgment:
    """The question of a kind of causal models; CheckpointError for a kind without one."""
    if model_type not in JUDGMENTS:
        raise CheckpointError(f"{folder} holds a causal model of type {model_type!r}, which is no known reranker; "
                              "known are Qwen3-Reranker, bge-reranker-v2-gemma and mxbai-rerank-v2")
    return JUDGMENTS[model_type]


def judges(folder: Path) -> bool:
    """Return whether files of sentence-transformers, or else the name of a folder, say that its causal model scores
    documents."""
    if (folder / MODULES).is_file():
        return scores_by_logits(folder)
    names = (folder.name, *(each.name for each in folder.parents if each.name.startswith("models--")))
    return any("rerank" in name.lower() for name in names)
