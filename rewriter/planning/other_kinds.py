"""Options of a model for its steps of another kind, which give other results or take embeddings."""

from __future__ import annotations

from dataclasses import replace

from forebay.rewriter.planning.options import CACHE, HIDDEN, OPTIONS, WEIGHTS, Options, make_options

OF_PROMPTS = ("prefix_cache", "cache_dir", "cache_dir_size", "calibration")  # of what is known from earlier prompts
SCHEDULES = ("micro_batches", "order")
FOLLOWING = ("admitted", "rounds", "chunk_of_images", "score_ranges", "expert_hits")  # from a model, and not a user
OF_ANSWERS = ("cache", "kv_blocks", "activations")  # which would be others without them


def carried(options: Options) -> Options:
    """Return what a user says of weights, caches and hidden states: all but drafts, kept prompts and sizes."""
    left = (*OF_PROMPTS, "prefill_chunk") if options.chunk_of_images else OF_PROMPTS
    found = {name: getattr(options, name) for name, record in OPTIONS.items()
             if name not in left and (record.group in (WEIGHTS, CACHE, HIDDEN) or name in SCHEDULES)}
    return make_options(found, Options(score_ranges=options.score_ranges, expert_hits=options.expert_hits))


def without_choices(options: Options) -> tuple[Options, list[str]]:
    """Return the options without which answers or steps would be others, and the names of those that are left out."""
    kept = (*FOLLOWING, *OF_ANSWERS, *(("prefill_chunk",) if options.chunk_of_images else ()))
    free = replace(Options(), **{name: getattr(options, name) for name in kept})
    return free, [name for name in options.forced() if getattr(free, name) != getattr(options, name)]
