"""How well a model predicts text, streamed within a budget: perplexity, and accuracy of the next word."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import torch

from forebay.commands.options import (
    BudgetOption,
    DebugOption,
    ModelArgument,
    in_input,
    in_output,
    model_folder,
    with_options,
)
from forebay.commands.prompts import load_tokenizer, text_ids
from forebay.commands.terminal import JobError, clean_errors, doing, progress_bar
from forebay.rewriter.ir.files import read_input_text
from forebay.rewriter.planning.options import Options

if TYPE_CHECKING:
    from forebay.language_model import LanguageModel
    from forebay.rewriter.checkpoints.checkpoint import Progress
    from forebay.rewriter.ir.plan import Budget
    from forebay.rewriter.machine.profile import Machine

CONTEXT = 512

Passage = tuple[torch.Tensor, int]  # token ids, and how many of them stand before the last word


@dataclass(frozen=True)
class Tokens:
    """A text's token ids [T], and those that stand before every text of the tokenizer."""

    opening: torch.Tensor
    ids: torch.Tensor


@dataclass(frozen=True)
class Perplexity:
    """`perplexity` is exp of `loss`, the mean negative log-likelihood in nats of `tokens` tokens; `time_s` seconds."""

    perplexity: float
    loss: float
    tokens: int
    windows: int
    time_s: float


@dataclass(frozen=True)
class WordAccuracy:
    """Last-word accuracy: of `words` last words greedy decoding gives `right` ones in full; `accuracy` is their
    share."""

    accuracy: float
    right: int
    words: int
    time_s: float


def open_scorer(
    model: str | os.PathLike[str], budget: Budget, options: Options | None = None, *, context: int = CONTEXT
) -> LanguageModel:
    """A LanguageModel whose steps give scores instead of logits, planned for a batch of rows of `context` tokens.

    The softmax is part of the step, so that a chunk's logits count against the budget and never leave it. It serves
    `perplexity` and `next_word_accuracy`, not `generate`. Raises as `wrap` does.
    """
    from forebay.language_model import LanguageModel
    from forebay.open_model import open_model
    from forebay.rewriter.checkpoints.resolve import resolve_model
    from forebay.rewriter.ir.plan import Workload

    options = options or Options()
    folder = resolve_model(model, adapter=options.adapter)
    scoring, checkpoint, files = open_model(folder, gives="scores")
    limit = scoring.max_positions
    if limit and context >= limit:
        raise JobError(f"a context of {context} tokens is too long: at most {limit - 1} fit the model's positions")
    return LanguageModel(scoring, checkpoint, files, budget, Workload(options.batch or 1, context, 1), options,
                         cast("Machine | None", options.machine))


def perplexity(
    lm: LanguageModel, text: str | Tokens | torch.Tensor, window: int = CONTEXT, stride: int | None = None, *,
    limit: int | None = None, progress: Progress | None = None,
) -> Perplexity:
    """Perplexity of a text, or of token ids [T], by a model from `open_scorer`; of its first `limit` tokens, if given.

    A text is tokenised here, which may take more memory than a small budget: `tokenize` does it before. It is cut into
    windows of `window` tokens that begin `stride` (default: as far as they are long) apart. In each, the tokens count
    that no earlier window has predicted, so every token counts once: save the text's first, unless the tokenizer puts a
    beginning-of-text token before texts, which then opens every window.
    Raises JobError for a text that is too short.
    """
    if isinstance(text, str):
        text = tokenize(lm.checkpoint.folder, text)
    elif isinstance(text, torch.Tensor):
        text = Tokens(torch.zeros(0, dtype=torch.int64), text.cpu())
    prefix, ids = text.opening, text.ids[:limit].to(torch.int64)
    longest, count = window - prefix.numel(), ids.numel()
    if count < 2:
        raise JobError(f"the text has {count} token(s); at least 2 are needed")
    if longest < 1 or not 1 <= (stride or longest) <= longest:
        raise JobError(f"windows of {window} tokens must hold more than the {prefix.numel()} that open each, and begin "
                       f"1 to {longest} tokens apart, not {stride}")
    spans = _spans(count, longest, stride or longest, 0 if prefix.numel() else 1)
    began, loss, done, rows = time.monotonic(), 0.0, 0, lm.plan.workload.batch
    for i in range(0, len(spans), rows):
        part = spans[i : i + rows]
        scores = lm.token_scores([torch.cat((prefix, ids[start : end + 1])) for start, end, _ in part])
        for found, (start, _, fresh) in zip(scores, part, strict=True):
            counted = found[fresh - start - 1 + prefix.numel() :, 0].double()
            loss -= counted.sum().item()
            done += counted.numel()
        if progress is not None:
            progress(done, count)
    mean = loss / done
    return Perplexity(math.exp(min(mean, 700.0)), mean, done, len(spans), time.monotonic() - began)


def next_word_accuracy(lm: LanguageModel, passages: Sequence[Passage], progress: Progress | None = None
                       ) -> WordAccuracy:
    """Share of the passages whose last word the model from `open_scorer` predicts.

    As on LAMBADA a word counts when every one of its tokens is the likeliest after the passage and the tokens before
    it, which is what greedy decoding gives. Raises JobError where one is too long for the model.
    """
    longest = max(ids.numel() for ids, _ in passages)
    limit = lm.captured.max_positions
    if limit and longest >= limit:
        raise JobError(f"a passage has {longest} tokens; at most {limit - 1} fit the model's positions")
    began, right, rows = time.monotonic(), 0, lm.plan.workload.batch
    lm.reserve(rows, longest, 1)
    order = sorted(passages, key=lambda p: -p[0].numel())
    for i in range(0, len(order), rows):
        part = order[i : i + rows]
        for found, (_, known) in zip(lm.token_scores([ids for ids, _ in part]), part, strict=True):
            right += bool(found[known - 1 :, 1].all())
        if progress is not None:
            progress(i + len(part), len(order))
    return WordAccuracy(right / len(order), right, len(order), time.monotonic() - began)


def tokenize(folder: Path, text: str) -> Tokens:
    """A text by the tokenizer in a model's folder."""
    tokenizer = load_tokenizer(folder)
    opening = [i for i in text_ids(tokenizer, "") if i != tokenizer.eos_token_id]
    ids = text_ids(tokenizer, text, add_special_tokens=False, verbose=False)
    return Tokens(torch.tensor(opening, dtype=torch.int64), torch.tensor(ids, dtype=torch.int64))


def read_passages(folder: Path, jsonl: Path) -> list[Passage]:
    """The lines {"text": …} of a file by the tokenizer in a model's folder. Raises JobError naming the line that has no
    text of two words."""
    texts, tokenizer = _read_texts(jsonl), load_tokenizer(folder)
    return [_passage(text, tokenizer) for text in texts]


def _spans(count: int, window: int, stride: int, fresh: int) -> list[tuple[int, int, int]]:
    """(first token, last token, first it is to predict) of each window; each from `fresh` on is predicted once."""
    spans, start = [], 0
    while fresh < count:
        end = min(start + window, count - 1)
        spans.append((start, end, fresh))
        fresh, start = end + 1, start + stride
    return spans


def read_given_text(path: Path) -> str:
    """The text of a UTF-8 file."""
    try:
        return read_input_text(path, encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise JobError(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from error


def _read_texts(path: Path) -> list[str]:
    texts = []
    for number, line in enumerate(read_given_text(path).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise JobError(f'{path} line {number}: expected {{"text": "…"}}') from error
        if not isinstance(text, str) or len(text.split()) < 2:
            raise JobError(f"{path} line {number}: the text must have two words, the last of which is predicted")
        texts.append(text.strip())
    if not texts:
        raise JobError(f"{path} has no line to predict")
    return texts


def _passage(text: str, tokenizer: Any) -> Passage:
    """Ids of a text, and how many of them stand before the tokens of its last word."""
    before = text[: text.rindex(text.split()[-1])].rstrip()
    ids, known = text_ids(tokenizer, text), text_ids(tokenizer, before)
    if ids[-1] == tokenizer.eos_token_id:
        ids = ids[:-1]
    same = next((i for i, (a, b) in enumerate(zip(ids, known, strict=False)) if a != b), min(len(ids), len(known)))
    return torch.tensor(ids, dtype=torch.int64), max(1, min(same, len(ids) - 1))


@with_options(leave=("prompt", "new_tokens", "typical", "batch_slots", "plan", "mesh", "calibration",
                     "prompt_lookup_num_tokens", "draft"))
def eval_command(
    model: ModelArgument,
    options: Options,
    text: Annotated[Path | None, in_input(help="UTF-8 text file for perplexity.")] = None,
    words: Annotated[Path | None, in_input(help='JSONL file of {"text": "…"} for last-word accuracy.')] = None,
    budget: BudgetOption = None,
    context: Annotated[int, in_input(min=2, help="Tokens of a window.")] = CONTEXT,
    stride: Annotated[int | None, in_input(min=1, help="Tokens from window to window. Default: --context.")] = None,
    tokens: Annotated[int | None, in_input(min=2, help="Most tokens of the text to read. Default: all.")] = None,
    as_json: Annotated[bool, in_output("--json", help="Result as JSON on stdout.")] = False,
    debug: DebugOption = False,
) -> None:
    """Measure perplexity or last-word accuracy of MODEL within a budget.

    \f
    Long: a third of it is the options of its own.
    """
    with clean_errors(debug):
        from forebay.commands.process_memory import MemoryWatch
        from forebay.default_budget import default_budget
        from forebay.rewriter.ir.byte_sizes import format_nbytes, parse_budget
        from forebay.runtime.disk.page_cache import drop_file
        from forebay.runtime.disk.spill_file import require_spill_folder
        from forebay.runtime.measure.kept import kept_machine

        if budget:
            require_spill_folder(parse_budget(budget).disk)
        if text is None and words is None:
            raise JobError("name what to measure on: --text FILE, --words JSONL, or both")
        given = read_given_text(text) if text else ""
        if words is not None:
            _read_texts(words)  # before a model is opened: mistakes show at once
        folder = model_folder(model, options)
        # Before the budget counts, as all input is: a tokenizer takes tens of MB, and none is needed afterwards.
        told = tokenize(folder, given) if text is not None else None
        passages = read_passages(folder, words) if words is not None else []
        options = replace(options, machine=options.machine or kept_machine(folder))
        sizes = parse_budget(budget) if budget else default_budget()
        with doing("capturing and planning"):
            lm = open_scorer(folder, sizes, options, context=context)
        files = {f.path for f in lm.files.values()}
        for path in files:
            drop_file(path)  # what others left in the page cache would be memory beyond the budget
        result: dict[str, Any] = {"model": str(model), "budget": sizes.device}
        with lm, MemoryWatch(files) as memory, progress_bar() as bar:
            if told is not None:
                task = bar.add_task("perplexity", total=None, note="")
                found = perplexity(lm, told, context, stride, limit=tokens, progress=lambda done, total: bar.update(
                    task, completed=done, total=total, note=f"{done}/{total} tokens"))
                result |= asdict(found) | {"text": str(text), "context": context, "stride": stride,
                                           "tokens_per_s": found.tokens / found.time_s}
            if passages:
                task = bar.add_task("next words", total=None, note="")
                said = next_word_accuracy(lm, passages, lambda done, total: bar.update(
                    task, completed=done, total=total, note=f"{done}/{total} passages"))
                result |= {"next_word_accuracy": said.accuracy, "words": said.words, "words_right": said.right}
        result |= {"planned_peak": sum(lm.plan.prediction.peak_nbytes.values()),
                   "measured_peak": memory.peak - memory.before + memory.cached_peak}
        if as_json:
            print(json.dumps(result, indent=1))
            return
        if text is not None:
            print(f"perplexity  {result['perplexity']:.4f} over {result['tokens']} tokens in {result['windows']} "
                  f"windows of {context}, {result['tokens_per_s']:.1f} tokens/s")
        if words is not None:
            print(f"next word   {result['next_word_accuracy']:.3f}: {result['words_right']} of {result['words']} right")
        print(f"memory      the plan used {format_nbytes(result['planned_peak'])} of the budget of "
              f"{format_nbytes(sizes.device)}; the process grew by {format_nbytes(result['measured_peak'])}")
