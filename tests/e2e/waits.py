"""Whether a program waits for nothing that it need not wait for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forebay.rewriter.ir.program import UNORDERED, Program, Wait
from forebay.rewriter.verify.program import ProgramError, verify_program


def assert_waits_are_needed(program: Program) -> None:
    """Without any one wait of the compute stream a program is refused, and without most of those for slots; the others
    are implied by an earlier one, and without both it is refused."""
    waits = [i for i, item in enumerate(program.step) if isinstance(item, Wait)]
    assert len(waits) > 10
    refused = 0
    for i in waits:
        try:
            verify_program(replace(program, step=(*program.step[:i], *program.step[i + 1 :])))
        except ProgramError:
            refused += 1
        else:
            assert program.step[i].stream in UNORDERED, "a launch waits for what it does not need"
            rest = (*program.step[:i], *program.step[i + 1 :])
            earlier = [k for k in waits if k < i and program.step[k].stream == program.step[i].stream]
            assert earlier, "only a later wait can be implied by one before it"
            with pytest.raises(ProgramError):  # together with the one that implies it
                verify_program(replace(program, step=tuple(item for k, item in enumerate(rest) if k not in earlier)))
    assert refused >= 0.8 * len(waits)
