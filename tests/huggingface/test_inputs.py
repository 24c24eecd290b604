"""Prompts in every form that callers give them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from forebay.huggingface.inputs import read_prompts, take_prompts


def test_forms_of_the_same_prompt() -> None:
    for ids in ([[1, 2, 3]], [1, 2, 3], torch.tensor([[1, 2, 3]]), np.array([[1, 2, 3]]), ((1, 2, 3),),
                torch.tensor([[1, 2, 3]], dtype=torch.int32)):
        found = read_prompts(ids, None, 9)
        assert found.ids.tolist() == [[1, 2, 3]] and found.ids.dtype == torch.int64 and found.mask.all()


def test_rows_of_unequal_length_are_padded_on_the_left() -> None:
    found = read_prompts([[1, 2, 3], [4]], None, 9)
    assert found.ids.tolist() == [[1, 2, 3], [0, 0, 4]] and found.mask.int().tolist() == [[1, 1, 1], [0, 0, 1]]
    assert [row.tolist() for row in found.rows()] == [[1, 2, 3], [4]] and found.longest == 3


def test_padding_moves_to_the_left() -> None:
    ids = [[1, 2, 8, 8], [8, 3, 4, 8], [8, 8, 8, 5], [1, 2, 3, 4]]
    mask = [[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 1], [1, 1, 1, 1]]
    found = read_prompts(ids, mask, 9)
    moved = found.at_the_right()
    assert moved.ids.tolist() == [[8, 8, 1, 2], [8, 8, 3, 4], [8, 8, 8, 5], [1, 2, 3, 4]]
    assert moved.mask.int().tolist() == [[0, 0, 1, 1], [0, 0, 1, 1], [0, 0, 0, 1], [1, 1, 1, 1]]
    assert [row.tolist() for row in moved.rows()] == [row.tolist() for row in found.rows()]
    assert moved.at_the_right() is moved, "what needs no move is not copied"


@pytest.mark.parametrize(("ids", "mask", "message"), [
    (None, None, "at least one token"), ([], None, "at least one token"), ([[]], None, "at least one token"),
    (torch.tensor([1, 2]), None, r"\[B, T\]"), ([[1, 2], [3]], [[1, 1], [1, 0]], "rows of unequal length"),
    ([[1.5]], None, "whole numbers"), ([[9]], None, r"\[0, 9\)"), ([[-1]], None, r"\[0, 9\)"),
    ([[1, 2]], [[1]], "attention_mask has shape"), ([[1], [2]], [[1], [0]], "row 1 has no token"),
    ([[1, 1, 1], [1, 2, 3]], [[1, 1, 1], [1, 0, 1]], "row 1 has a hole")])
def test_what_is_no_prompt_is_refused(ids: Any, mask: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_prompts(ids, mask, 9)


def test_prompts_are_taken_out_of_the_arguments() -> None:
    options = dict(attention_mask=[[1, 1]], token_type_ids=[[0, 0]], top_k=3)
    assert take_prompts([[1, 2]], options, 9, False).ids.tolist() == [[1, 2]]
    assert options == dict(top_k=3)
    with pytest.raises(ValueError, match="twice"):
        take_prompts([[1]], dict(input_ids=[[1]]), 9, False)
    with pytest.raises(ValueError, match="token_type_ids"):
        take_prompts([[1]], dict(token_type_ids=[[0]]), 9, True)
    assert take_prompts(None, {}, 9, False, bos=4).ids.tolist() == [[4]]
    with pytest.raises(ValueError, match="input_ids must be a tensor"):
        take_prompts(None, {}, 9, False)
