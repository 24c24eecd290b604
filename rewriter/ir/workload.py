"""The workload that a plan is for."""

from __future__ import annotations

from dataclasses import dataclass, replace

from forebay.rewriter.ir.schedule.batch_schedule import BatchSchedule


@dataclass(frozen=True)
class Workload:
    """The workload of a model: sequences at once, and tokens of the longest prompt and answer, for which there is room.
    Times are of usual ones, the means (0: as the longest); medians know nothing of the few that are long."""

    batch: int = 1
    prompt: int = 64
    new_tokens: int = 64
    typical_prompt: int = 0
    typical_new_tokens: int = 0

    @property
    def context(self) -> int:
        """Cache positions each sequence needs: every token but the last answer token is appended."""
        return self.prompt + self.new_tokens

    @property
    def typical(self) -> tuple[int, int]:
        """Tokens of a usual prompt and answer."""
        return (min(self.typical_prompt or self.prompt, self.prompt),
                min(self.typical_new_tokens or self.new_tokens, self.new_tokens))

    def of(self, batch: int, prompt: int, new_tokens: int) -> Workload:
        """So many sequences of at most so many tokens, as long as these usually are."""
        typical = min(self.typical_prompt, prompt), min(self.typical_new_tokens, new_tokens)
        return Workload(batch, prompt, new_tokens, *typical)

    def whole(self, batching: BatchSchedule) -> Workload:
        """Round up to whole micro-batches, and to a prompt that a prefill step can compute."""
        count = batching.micro_batches.count
        prompt = max(self.prompt, 3) if batching.admitted else self.prompt  # steps over fewer decode or check drafts
        return replace(self, batch=-(-self.batch // count) * count, prompt=prompt)

    def effective_lengths(self, batching: BatchSchedule) -> tuple[int, int]:
        """Tokens of the prompt and answer for which steps are counted.

        They are typical lengths where a sequence is alone or has a batch slot, else the longest ones.
        """
        return self.typical if batching.admitted or self.batch == 1 else (self.prompt, self.new_tokens)

    def before(self, tokens: int, batching: BatchSchedule) -> float:
        """Tokens before a step over `tokens` that it attends to, on average: within the answer, or in a prefill within
        the prompt."""
        prompt, answer = self.typical
        if batching.is_prefill(tokens):
            return max(0, self.effective_lengths(batching)[0] - tokens) / 2
        return (prompt + answer / 2) * batching.sparsity.blocks
