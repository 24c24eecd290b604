"""The file of a JSON schema that answers hold to."""

from __future__ import annotations

import json
from pathlib import Path

from forebay.commands.terminal import JobError
from forebay.rewriter.ir.files import read_input
from forebay.structured_output import OutputGrammar, check_grammar


def read_schema(path: Path) -> OutputGrammar:
    """The grammar of the JSON schema in a file; JobError if there is none."""
    try:
        grammar = OutputGrammar.of_schema(json.loads(read_input(path)))
        check_grammar(grammar)
        return grammar
    except OSError as error:
        raise JobError(f"cannot read the schema {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise JobError(f"--json-schema: {path} holds no schema: {error}") from error
