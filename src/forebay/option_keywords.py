"""Functions whose keywords are the table of options."""

from __future__ import annotations

import functools
import inspect
import textwrap
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, Protocol, TypeVar, overload

from forebay.huggingface.nn_module_compat import refuse_options
from forebay.rewriter.planning.options import OPTIONS, Options, make_options

Keywords = ParamSpec("Keywords")
Wrapped = TypeVar("Wrapped", covariant=True)


def options_of(given: Mapping[str, Any], base: Options | None = None) -> Options:
    """The options that keywords name, and otherwise as in `base`. TypeError for a name that is none."""
    refuse_options([name for name in given if name not in OPTIONS])
    return make_options(given, base)


class TakesOptions(Protocol[Keywords, Wrapped]):
    """A function of a model, a budget, and `Options` or its fields as keywords."""

    @overload
    def __call__(self, model: Any, budget: Any, options: Options, /) -> Wrapped: ...

    @overload
    def __call__(
        self, model: Any, budget: Any = None, /, *args: Keywords.args, **kwargs: Keywords.kwargs
    ) -> Wrapped: ...


def with_keywords(
    of: Callable[Keywords, Options]
) -> Callable[[Callable[[Any, Any, Options], Wrapped]], TakesOptions[Keywords, Wrapped]]:
    """Let a function of (model, budget, options) take each option as a keyword too, and its docstring list them."""
    def decorate(function: Callable[[Any, Any, Options], Wrapped]) -> TakesOptions[Keywords, Wrapped]:
        @functools.wraps(function)
        def takes(model: Any, budget: Any = None, options: Options | None = None, **given: Any) -> Wrapped:
            return function(model, budget, options_of(given, options))

        model_, budget_, options = inspect.signature(function).parameters.values()
        keywords = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=record.default)
                    for name, record in OPTIONS.items()]
        takes.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [model_, budget_.replace(default=None), options.replace(default=None), *keywords])
        takes.__doc__ = "\n".join([inspect.cleandoc(function.__doc__ or ""), "", "Options:", *(
            textwrap.fill(f"{name} ({record.kind.words}): {record.help}. Default: "
                          f"{record.said_default or record.default}.", 120, initial_indent="    ",
                          subsequent_indent="        ") for name, record in OPTIONS.items())])
        return takes  # type: ignore[return-value]

    return decorate
