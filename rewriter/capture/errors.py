"""The error of models that cannot be captured."""

from __future__ import annotations

from forebay.rewriter.ir.printable import PrintableError


class CaptureError(PrintableError):
    """The model cannot be captured; the message names the reason."""
