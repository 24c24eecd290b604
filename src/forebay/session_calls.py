"""Calls of a wrapped model that keep prompts from one process to the next."""

from __future__ import annotations

import logging
import os
from typing import Any

from forebay.call_turns import ModelCall
from forebay.prefix_identity import PrefixIdentity, identity_of
from forebay.rewriter.ir.plan import PlanError
from forebay.rewriter.planning.options import Options
from forebay.runtime.run.prefix_cache import PrefixCache
from forebay.runtime.run.prefix_files import PrefixFiles
from forebay.session_file import SavedSession, read_session, write_session

LOG = logging.getLogger("forebay")
CACHE_DIR_NBYTES = 8 << 30  # that `cache_dir` may hold where nobody says


def kept_prompts(options: Options) -> PrefixCache | None:
    """Make the store for the KV cache of prompts, in memory and on disk, as the options request."""
    if not options.keeps_prompts or options.mesh is not None:
        return None
    return PrefixCache(int(options.prefix_cache or 0), None if options.cache_dir is None else PrefixFiles(
        options.cache_dir, int(options.cache_dir_size or CACHE_DIR_NBYTES)))


class SessionCalls:
    """Session calls of a `LanguageModel` that keeps the KV cache of prompts (`prefix_cache`)."""

    prefixes: PrefixCache | None = None

    @property
    def prefix_identity(self) -> PrefixIdentity:
        """Return the identity of a prompt's KV cache besides its tokens."""
        lm: Any = self
        return identity_of(lm.plan, lm.checkpoint)

    def save_session(self, path: str | os.PathLike[str], said: Any = None) -> None:
        """Write the KV cache of the prompts so far to a file, whole or not at all, and `said`, which may be any JSON.

        Raises:
            PlanError: The model keeps nothing.
            OSError: The file cannot be written.
        """
        lm: Any = self
        with lm.turn(ModelCall("save_session")):
            work, identity = lm.plan.workload, self.prefix_identity
            write_session(path, SavedSession(identity, (work.prompt, work.new_tokens), said,
                                             self._kept("save_session").tree(identity.digest())))

    def load_session(self, path: str | os.PathLike[str]) -> Any:
        """Take over what `save_session` wrote, as far as the cache has room; what was `said`.

        The model is planned for prompts as long as those of the session. Where its steps round differently all the
        same, prompts are computed again.

        Raises:
            SessionError: The session is of another model, format or release, or the file is damaged.
            PlanError: The model keeps nothing.
        """
        lm: Any = self
        kept = self._kept("load_session")
        with lm.turn(ModelCall("load_session")):
            saved = read_session(path, self.prefix_identity)
            lm._reserve(1, *saved.lengths, bool(lm.plan.schedule.batching.admitted))
            identity = self.prefix_identity
            if saved.identity == identity:
                kept.restore(identity.digest(), saved.tree)
            else:
                LOG.info("%s: the steps of this plan round differently: prompts are computed again", path)
        return saved.said

    def _give_back(self) -> None:
        if self.prefixes is not None:
            self.prefixes.close()

    def _kept(self, name: str) -> PrefixCache:
        if self.prefixes is None:
            raise PlanError(f"{name}: this model keeps no prompts; give it memory for them (prefix_cache, as \"1GiB\")")
        return self.prefixes
