"""The search for a way to serve: every strategy's goodput, over the processor's cores."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import active_children, get_context

from forebay.rewriter.predict.model_shapes import ModelError
from forebay.rewriter.serving.goodput import UNPRICED, Goodput, Prices, ServiceLevel, find_goodput, ranked
from forebay.rewriter.serving.strategies import ServiceWanted, Strategy
from forebay.rewriter.serving.traffic import TrafficError


def _one(strategy: Strategy, service: ServiceWanted, level: ServiceLevel, rate: float | None) -> Goodput | str:
    try:
        return find_goodput(strategy, service, level, rate)
    except (ModelError, TrafficError) as error:
        return str(error)


def search_services(
    candidates: Sequence[Strategy], service: ServiceWanted, level: ServiceLevel, rate: float | None = None,
    workers: int = 1, told: Callable[[int], None] = lambda done: None, prices: Prices = UNPRICED,
) -> tuple[list[Goodput], dict[str, str]]:
    """The goodput of each, ranked, and why others cannot serve; `told` hears how many are done. The answer does not
    depend on `workers`, processes that share the work. Of ways to offload the best are kept, one with caches on the
    device and one with caches in host memory."""
    found: dict[Strategy, Goodput | str] = {}
    if workers <= 1:
        for strategy in candidates:
            found[strategy] = _one(strategy, service, level, rate)
            told(len(found))
    else:
        # On Linux a child has everything imported; elsewhere forking a process with threads is not safe.
        context = get_context("fork" if sys.platform == "linux" else None)
        others = set(active_children())
        with ProcessPoolExecutor(workers, mp_context=context) as pool:
            order = sorted(candidates, key=lambda s: -s.devices)  # what takes longest first
            futures = {pool.submit(_one, strategy, service, level, rate): strategy for strategy in order}
            try:
                for future in as_completed(futures):
                    found[futures[future]] = future.result()
                    told(len(found))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                for child in set(active_children()) - others:  # else the searches under way are waited for, minutes
                    child.terminate()
                raise
    served = [found[s] for s in candidates]
    order_found = ranked([one for one in served if isinstance(one, Goodput)], rate, prices)
    refused = {s.name: one for s, one in zip(candidates, served, strict=True) if isinstance(one, str)}
    best = {one.strategy.staged: one for one in reversed(order_found) if one.strategy.offloaded}
    return [one for one in order_found if not one.strategy.offloaded or one is best[one.strategy.staged]], refused
