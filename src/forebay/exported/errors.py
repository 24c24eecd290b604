"""One kind of error for all that keeps a model from being exported."""

from __future__ import annotations

from forebay.rewriter.ir.printable import PrintableError


class ExportError(PrintableError, ValueError):
    """A model that cannot be exported as asked, or a place that cannot be written; the message says what to do."""
