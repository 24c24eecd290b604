"""`forebay embed`: embeddings of the texts of a file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from forebay.commands.options import (
    BudgetOption,
    DebugOption,
    ModelArgument,
    in_input,
    in_output,
    model_folder,
    named_budget,
    panel_option,
    require_writable,
)
from forebay.commands.terminal import JobError, clean_errors, progress_bar, say

if TYPE_CHECKING:
    from forebay.embedding.embedder import Embedder

in_batch = panel_option("Batch")

PART = 1024  # texts between two notes of how far a job is
SETTINGS_SUFFIX = ".settings"  # out.npy.settings says what the embeddings were made of
COLUMN = "text"


def embed_command(
    model: ModelArgument,
    source: Annotated[Path, in_input("--input", help="Texts: JSON lines, CSV, TSV, Parquet, or a saved data set.")],
    output: Annotated[Path, in_output(help="NumPy file of float32 [texts, width].")],
    budget: BudgetOption = None,
    column: Annotated[str, in_input(help="Column of the texts.")] = COLUMN,
    prompt_name: Annotated[str | None, in_input(
        help="Name of the model's prompt in front of each text, such as query.")] = None,
    batch_size: Annotated[int, in_batch(min=1, help="Texts at once at most.")] = 32,
    debug: DebugOption = False,
) -> None:
    """Write the embeddings of the texts of a file. The same command resumes an interrupted job.

    Exit code: 0 done, 2 failed, 130 interrupted.
    """
    with clean_errors(debug):
        from forebay.embedding.embedder import Embedder

        require_writable(output, "--output")
        if output.suffix != ".npy":
            raise JobError(f"--output {output} must end in .npy")
        texts = _texts(source, column)
        lm = Embedder(model_folder(model), named_budget(budget))
        width = lm.get_sentence_embedding_dimension()
        digest = hashlib.sha256(json.dumps(texts).encode("utf-8", "surrogatepass")).hexdigest()
        made_of = {"model": lm.fingerprint, "texts": digest, "prompt_name": prompt_name, "width": width}
        _embed(lm, texts, output, made_of, prompt_name, batch_size)
        say(f"{output}: {len(texts)} embeddings of {width} numbers")


def _texts(source: Path, column: str) -> list[str]:
    """The texts of a file. JobError where it cannot be read, or a row has none."""
    from forebay.commands.prompt_tables import TableError, open_table

    texts = []
    try:
        for number, unit, columns in open_table(source, column):
            text = columns if isinstance(columns, str) else columns.get("prompt")
            if isinstance(columns, str) or not isinstance(text, str):
                raise JobError(f"{source} {unit} {number}: "
                               f"{columns if isinstance(columns, str) else f'{column} must be text'}")
            texts.append(text)
    except OSError as error:
        raise JobError(f"cannot read the texts {source}: {error.strerror}") from error
    except TableError as error:
        raise JobError(str(error)) from error
    return texts


def _embed(
    lm: Embedder, texts: Sequence[str], output: Path, made_of: dict[str, Any], prompt_name: str | None, batch_size: int
) -> None:
    """Write the embeddings, from where an earlier job of the same texts ended."""
    import numpy as np

    from forebay.rewriter.checkpoints.packed_writer import write_json
    from forebay.rewriter.ir.files import read_input

    noted, done = output.with_name(output.name + SETTINGS_SUFFIX), 0
    if output.exists():
        try:
            known = json.loads(read_input(noted))
            done = known.pop("done")
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise JobError(f"{output} exists, and {noted.name} does not say of which texts it is; name another output"
                           ) from error
        if known != made_of or type(done) is not int:
            raise JobError(f"{output} is of other texts or of another model; name another output")
        say(f"{output}: {done} of {len(texts)} texts are embedded already")
    else:
        write_json(noted, {**made_of, "done": 0})
    shape = (len(texts), made_of["width"])
    made = np.lib.format.open_memmap(output, "r+" if output.exists() else "w+", np.float32, shape)
    if made.shape != shape or made.dtype != np.float32:
        raise JobError(f"{output} is no array of {shape[0]} x {shape[1]} numbers of float32; name another output")
    with lm.held(), progress_bar() as bar:
        task = bar.add_task("embedding", total=len(texts), completed=done, note="")
        for start in range(done, len(texts), PART):
            part = texts[start : start + PART]
            made[start : start + len(part)] = lm.encode(part, prompt_name, None, batch_size)
            made.flush()  # to the disk, before it is noted
            write_json(noted, {**made_of, "done": start + len(part)})
            bar.update(task, completed=start + len(part))
