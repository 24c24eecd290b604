"""Cases of missing experts are quarters of the binomial distribution; tests/e2e/test_routed_experts.py has Programs."""

from __future__ import annotations

import numpy as np
import pytest

from forebay.rewriter.predict.missed_experts import CASES, missed_in_cases


@pytest.mark.parametrize(("named", "hit_rate"), [(8, 0.81), (8, 0.25), (1, 0.5), (2, 0.99), (40, 0.7), (900, 0.5)])
def test_cases_are_quarters_of_all_numbers_of_missing_experts(named: int, hit_rate: float) -> None:
    drawn = np.sort(np.random.default_rng(0).binomial(named, 1 - hit_rate, 400_000)).reshape(CASES, -1).mean(1)
    found = missed_in_cases(named, hit_rate)
    assert found == pytest.approx(drawn, abs=0.01 + 0.002 * named) and sum(found) == pytest.approx(
        CASES * named * (1 - hit_rate))
    assert missed_in_cases(named, 1.0) == (0,) * CASES and missed_in_cases(named, 0.0) == (named,) * CASES
