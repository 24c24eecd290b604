"""Traces of a wrapped model's steps, for ui.perfetto.dev."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forebay.call_turns import ModelCall
from forebay.runtime.run.trace import Trace, write_trace


class TraceCalls:
    """Trace calls of a `LanguageModel`, whose steps are recorded."""

    trace: Trace | None = None

    def start_trace(self) -> None:
        """Record every launch, wait and copy from here on (slower by a few microseconds each)."""
        lm: Any = self
        with lm.turn(ModelCall("start_trace")):
            lm._end_sessions()
            self.trace = Trace()

    def save_trace(self, path: str | Path) -> int:
        """Write what is kept, beside the predicted step, for ui.perfetto.dev; how many of the first items are not."""
        if self.trace is None:
            raise RuntimeError("save_trace: call start_trace before generate")
        from forebay.rewriter.predict.simulate import simulate

        lm: Any = self
        program, trace = lm.steps.program(1), self.trace
        write_trace(path, trace.spans(), simulate(program, lm.machine).spans, trace.moved(), program.link_nbytes())
        return trace.gone
