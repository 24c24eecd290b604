"""Work that one thread at a time does, because it changes what all threads share."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

Given = ParamSpec("Given")
Returned = TypeVar("Returned")
# Hold it to import parts of transformers, to build a model or to trace. Imports of transformers replace modules while
# other threads read them. Building sets torch's default dtype and patches its initialization. Tracing patches the
# classes of modules. A thread that holds the lock may take it again. Take it before `compile_lock`.
ONE_THREAD = threading.RLock()


def one_thread(function: Callable[Given, Returned]) -> Callable[Given, Returned]:
    """Make threads take turns in all functions with this decorator, and wherever ONE_THREAD is held."""

    @functools.wraps(function)
    def in_turn(*args: Given.args, **kwargs: Given.kwargs) -> Returned:
        with ONE_THREAD:
            return function(*args, **kwargs)

    return in_turn
