"""Tools to write an operator's meaning in ONNX: values by name, and the graph that they are put into. A meaning is a
function of the operator's arguments, values where they are tensors; it needs no ONNX package itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import torch

MICROSOFT = "com.microsoft"  # the domain of onnxruntime's own operators
Dialect = Literal["microsoft", "standard"]
OnnxForm = Literal["microsoft", "standard", "static"]  # the last: the standard dialect over caches written in place
TO_THE_END = 2**63 - 1  # the end of a Slice, as torch writes it too


class OnnxValue(str):
    """The name of a value, with its dtype and shape as far as they are known (None: a size that varies), and `sizes`,
    the shape as the captured graph writes it; of a size the size itself. Packed rows are three values: `parts` are
    codes uint8 [..., groups, bytes of a group], scales and lows [..., groups], none where the middle code is 0."""

    dtype: torch.dtype
    shape: tuple[int | None, ...]
    parts: Parts | None
    sizes: tuple[str, ...]

    def __new__(
        cls, name: str, dtype: torch.dtype = torch.float32, shape: Sequence[int | None] = (),
        parts: Parts | None = None, sizes: Sequence[str] = (),
    ) -> OnnxValue:
        made = super().__new__(cls, name)
        made.dtype, made.shape, made.parts, made.sizes = dtype, tuple(shape), parts, tuple(sizes)
        return made


Parts = tuple[OnnxValue, OnnxValue, OnnxValue | None]


class OnnxGraph(Protocol):
    """A graph under construction, in one dialect."""

    dialect: Dialect
    in_place: bool  # a cache has a length of its own, and a step writes at position_ids into it
    int8_activations: bool  # products of packed rows may round what they are given to 8 bits

    def op(
        self, kind: str, *inputs: str, outputs: int = 1, domain: str = "", named: Sequence[str] = (), **attributes: Any
    ) -> Any:
        """The name of what an operator gives, a tuple of them where it gives several; "" leaves an input out. `named`
        are names to give to results behind those, "" for one that is not wanted."""

    def sum(self, a: str, b: str) -> str:
        """Two values of one shape, added, unless an operator that follows adds them itself (`summands`)."""

    def summands(self, value: str, *others: str) -> tuple[str, str] | None:
        """Return the operands that `sum` adds to make `value`, for an operator that adds them itself and gives `value`
        as well (`named`), and stands in the sum's place. None where one of the `others` that it reads is younger."""

    def constant(self, value: Any, dtype: torch.dtype = torch.int64) -> str:
        """A number, or a list of them."""

    def source(self, value: str, kind: str) -> tuple[list[str], dict[str, Any]] | None:
        """Inputs and attributes of the operator that gave `value`, if it is a `kind`."""

    def numbers(self, value: str) -> list[int] | None:
        """The list that `constant` was given for a value."""

    def once(self, key: object, make: Callable[[], str]) -> str:
        """Return the result of `make` for a key, made only once."""

    def transposed(self, weight: OnnxValue) -> str:
        """A matrix [N, K] as [K, N]."""

    def cast(self, value: str, dtype: torch.dtype) -> str:
        """A value in another dtype."""

    def turn(self, value: str, x: OnnxValue, cos: OnnxValue, sin: OnnxValue) -> None:
        """Note that `value` is x [B, H, S, D] turned by angles with these cosines and sines, for an operator that
        turns x itself (`turned`)."""

    def turned(self, value: str) -> tuple[OnnxValue, OnnxValue, OnnxValue] | None:
        """The x of which `turn` says that it gave `value`, and the cosines and sines [positions, D / 2] at every
        position. None for another value, and where the angles follow more than a token's position."""

    def cut_from(self, parts: Sequence[str], widths: Sequence[int]) -> str | None:
        """The [B, S, sum of widths] that is cut along its last dimension into `parts`, of these widths and in this
        order; None for other parts."""

    def append(self, cache: OnnxValue, new: str) -> None:
        """Let `new` [B, Hkv, S, D] be what follows in a cache."""

    def appended(self, cache: OnnxValue) -> tuple[str, str]:
        """Return a cache's earlier content with the new rows appended."""

    def present(self, cache: OnnxValue, value: str) -> None:
        """Let `value` be what the cache holds after this step."""


Meaning = Callable[..., Any]
