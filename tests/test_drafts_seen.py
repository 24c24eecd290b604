"""What is kept of how many drafts stood."""

from __future__ import annotations

from pathlib import Path

import pytest

from forebay.drafts_seen import KNOWN, MOST, DraftsSeen


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FOREBAY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_next_process_knows_what_was_seen_and_of_these_two_alone() -> None:
    seen, other = DraftsSeen("m", "d", 0.75), DraftsSeen("m", "d", 0.75)
    assert seen.chance == 0.75 and str(seen) == "75 % are assumed"
    seen.add(10, 30)
    other.add(6, 18)  # both count
    later = DraftsSeen("m", "d", 0.75)
    assert later.known == 64 and str(later) == "75 % are assumed, and 64 were checked"
    assert later.chance == pytest.approx((KNOWN * 0.75 + 16) / (KNOWN + 64))
    assert DraftsSeen("m", "e", 0.5).chance == 0.5


def test_old_counts_weigh_less() -> None:
    seen = DraftsSeen("m", "d", 0.5)
    for _ in range(20):
        seen.add(1000, 0)
    assert seen.known == MOST and seen.chance > 0.98
    for _ in range(5):
        seen.add(0, 1000)
    assert seen.chance < 0.15 and DraftsSeen("m", "d", 0.5).chance == seen.chance


@pytest.mark.parametrize("text", ["", "[]", "{", '{"right": "x", "wrong": 1}', '{"right": NaN, "wrong": 1}',
                                  '{"right": -3, "wrong": 1}', '{"right": 1e9, "wrong": 1}'])
def test_what_cannot_be_read_counts_nothing(cache: Path, text: str) -> None:
    DraftsSeen("m", "d", 0.5).add(1, 1)
    (file,) = (cache / "drafts").iterdir()
    file.write_text(text)
    seen = DraftsSeen("m", "d", 0.5)
    assert seen.chance == 0.5
    seen.add(3, 1)
    assert DraftsSeen("m", "d", 0.5).known == 4


def test_a_folder_that_cannot_be_written_is_done_without(cache: Path) -> None:
    cache.write_text("a file")
    seen = DraftsSeen("m", "d", 0.5)
    for _ in range(2):
        seen.add(8, 0)
    assert seen.known == 16 and DraftsSeen("m", "d", 0.5).known == 0
