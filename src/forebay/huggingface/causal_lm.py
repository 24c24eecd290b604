"""transformers' `generate` and `forward` over a model's steps and cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedConfig
from transformers.generation import GenerationMode
from transformers.modeling_outputs import CausalLMOutputWithPast

from forebay.call_turns import ModelCall
from forebay.drafting import drafting
from forebay.huggingface.constrained import LOOP, constraining, take_adapters, take_grammar
from forebay.huggingface.drawing import DrawEach, drawing_from
from forebay.huggingface.inputs import Prompts, check_positions, merge_mapping, read_embeds, read_prompts, take_prompts
from forebay.huggingface.listener import Listener
from forebay.huggingface.nn_module_compat import NnModuleCompat
from forebay.huggingface.refusals import NoPositionsError, refuse_generation
from forebay.huggingface.row_cache import RowCache, take_cache
from forebay.huggingface.same_tokenizer import refuse_other_tokenizer
from forebay.huggingface.served import SERVED
from forebay.images.prompts import see_images, take_image_inputs
from forebay.rewriter.capture.cache_name import CACHE_NAME
from forebay.rewriter.ir.graph import Gives
from forebay.runtime.run.generation import EachAnswer, Stop, generate_as_planned
from forebay.runtime.run.progress import WorkDone
from forebay.runtime.run.rows import SequenceRows, require_movable_rows
from forebay.runtime.run.sampling import Generators, Sampling
from forebay.step_model import OnToken, StepModel

DEFAULT_NEW_TOKENS = 20  # as transformers has it
_PASSED_ON = ("tokenizer", "assistant_tokenizer")  # by generate, which needed them itself


class StreamedCausalLM(GenerationMixin):
    """A model for transformers' generation, over `lm`: its forward runs steps, its cache is the session's. One is made
    for each `call`, whose turn it is.

    Calls that need nothing beyond greedy decoding or sampling by temperature, top-k and top-p take the runtime's own
    loop instead; the tokens are the same.
    """

    main_input_name = "input_ids"
    base_model_prefix = "model"
    _is_stateful = False

    def __init__(self, lm: StepModel, call: ModelCall) -> None:
        self.lm, self.call = lm, call
        self.draws: tuple[torch.Generator, ...] = ()  # one for each prompt, if any
        self.pictured: Prompts | None = None  # those of the call, where they hold images

    @property
    def config(self) -> PreTrainedConfig:
        return self.lm.config

    @property
    def generation_config(self) -> GenerationConfig:  # type: ignore[override]
        return self.lm.generation_config

    @property
    def device(self) -> torch.device:
        return self.lm.device

    @property
    def dtype(self) -> torch.dtype:
        return self.lm.dtype

    def can_generate(self) -> bool:
        return True

    def is_remote_code(self) -> bool:
        return False

    def get_experts_implementation(self) -> dict[str, str]:
        return {}

    def answer(
        self, inputs: Any, generation_config: GenerationConfig | None, generator: Generators, on_token: OnToken | None,
        options: dict[str, Any],
    ) -> Any:
        """Run transformers' `generate` with these arguments."""
        inputs, grammar = merge_mapping(inputs, options), take_grammar(options)
        tokenizer = None if grammar is None else options.pop("tokenizer", None)
        adapters, held, images = take_adapters(options), take_cache(options), take_image_inputs(options)
        prompts = self._take_prompts(inputs, generation_config, options, held)
        if images:
            prompts = see_images(self.lm, self.call, prompts, images, held is not None and held.seen > 0)
        if held is not None:
            options[CACHE_NAME] = held
        if any(options.get(name) is not None for name in ("max_new_tokens", "max_length")):
            _check_lengths(options, prompts)
        config, rest = cast(Any, self)._prepare_generation_config(generation_config, **options)
        rest = {name: value for name, value in rest.items() if value is not None}
        ends = [] if config.eos_token_id is None else [*torch.as_tensor(config.eos_token_id).reshape(-1).tolist()]
        seen = 0 if held is None else held.seen
        if not prompts.masked and prompts.ids.shape[1] > seen and config.pad_token_id not in (None, *ends):
            prompts = prompts.without(config.pad_token_id)
        new_tokens = self._new_tokens(config, prompts, options)
        helper = self._drafter_of(rest)
        plain = (helper is not None or not rest) and prompts.embeds is None and self._plain(config)
        constrain = None if grammar is None else constraining(self.lm, grammar, tokenizer, ends, plain)
        if adapters and (not plain or len(adapters) != len(prompts.ids)):
            raise ValueError(f"generate: adapter_names, one for each prompt, go with {LOOP}")
        if not plain:
            return self._answer_through_mixin(prompts, config, new_tokens, generation_config, generator, on_token,
                                              options)
        pad = config.pad_token_id if config.pad_token_id is not None else ends[0] if ends else 0
        sampling = Sampling(bool(config.do_sample), 1.0 if config.temperature is None else config.temperature,
                            config.top_k or 0, 1.0 if config.top_p is None else config.top_p)
        rows = prompts.rows()
        stop = Stop(new_tokens, frozenset(ends), int(pad))
        with self.lm.running(len(rows), prompts.longest, new_tokens, continuous=True, call=self.call) as session:
            self.lm.tally = WorkDone()
            with drafting(helper or self.lm.helper, session, rows, new_tokens, sampling, generator) as drafter:
                new = generate_as_planned(session, rows, sampling, stop, generator, on_token, self.lm.tally, drafter,
                                          EachAnswer(constrain, adapters))
        return torch.cat((prompts.ids, new), 1)

    def _take_prompts(
        self, inputs: Any, config: GenerationConfig | None, options: dict[str, Any], held: RowCache | None
    ) -> Prompts:
        """The prompts of a call, taken out of its arguments; without any, the model's first token (bos) is one."""
        named = (options, {} if config is None else config.to_dict(), self.generation_config.to_dict())
        bos = next((given["bos_token_id"] for given in named if given.get("bos_token_id") is not None), None)
        return take_prompts(inputs, options, self.lm.captured.vocab_size, self.lm.captured.token_types, bos,
                            0 if held is None else held.seen)

    def _drafter_of(self, rest: dict[str, Any]) -> StepModel | None:
        """The wrapped model that is to draft for the plan's speculative steps, where a call asks for that alone.
        ValueError where its tokenizer is another."""
        helper = rest.get("assistant_model")
        if not (set(rest) == {"assistant_model"} and isinstance(helper, NnModuleCompat) and helper is not self.lm
                and self._checks_drafts):
            return None
        other = cast(StepModel, helper)
        if other.captured.vocab_size != self.lm.captured.vocab_size:
            return None
        refuse_other_tokenizer(self.lm.checkpoint.folder, other.checkpoint.folder)
        return other

    @property
    def _checks_drafts(self) -> bool:
        """Whether steps check drafts, of this plan or, where it is of calls too short for them, of others."""
        forced = isinstance(self.lm.options.prompt_lookup_num_tokens, int)
        return forced or bool(self.lm.plan.schedule.speculative_steps)

    def _plain(self, config: GenerationConfig) -> bool:
        """Return whether the runtime's loop gives what `config` asks for."""
        plain = GenerationConfig().to_dict() | self.generation_config._get_default_generation_params()
        drafts = {"prompt_lookup_num_tokens"} if self._checks_drafts else set()
        return all(name in SERVED | drafts or name.startswith("_") or value is None or value == plain.get(name)
                   or (value is False and plain.get(name) is None) for name, value in config.to_dict().items())

    def _new_tokens(self, config: GenerationConfig, prompts: Prompts, options: dict[str, Any]) -> int:
        """Return the most tokens to follow the prompts; ValueError where the model has no positions for them."""
        limit, longest, width = self.lm.captured.max_positions, prompts.longest, prompts.ids.shape[1]
        if config.max_new_tokens is not None:
            wanted = config.max_new_tokens
        elif options.get("max_length") is not None or self.generation_config.max_length is not None:
            wanted = config.max_length - width
        else:
            wanted = min(DEFAULT_NEW_TOKENS, max(1, limit - longest)) if limit else DEFAULT_NEW_TOKENS
        if wanted < 1:
            raise ValueError(f"generate: max_length {config.max_length} leaves no room for a new token after a prompt "
                             f"of {width}")
        if getattr(config, "is_assistant", False) and 0 < limit - longest < wanted:  # of drafts a few will do
            options["max_new_tokens"] = wanted = limit - longest
        if limit and longest + wanted > limit:
            raise NoPositionsError(f"generate: {longest} prompt tokens and {wanted} new ones exceed the model's "
                                   f"{limit} positions")
        return wanted

    def _answer_through_mixin(
        self, prompts: Prompts, config: GenerationConfig, new_tokens: int, given: GenerationConfig | None,
        generator: Generators, on_token: OnToken | None, options: dict[str, Any],
    ) -> Any:
        mode = config.get_generation_mode(options.get("assistant_model"))
        refuse_generation(config, mode, options)
        helper = options.get("assistant_model")
        if isinstance(helper, NnModuleCompat):
            self._admit(cast(StepModel, helper), prompts, new_tokens, config)
        if on_token is not None:
            if options.get("streamer") is not None:
                raise ValueError("generate: give a streamer or on_token, not both")
            options["streamer"] = Listener(on_token)
        copies = max(config.num_beams or 1, config.num_return_sequences or 1)
        shown, count = prompts.at_the_right(), len(prompts.ids) * copies
        held: RowCache | None = options.pop(CACHE_NAME, None)
        # one pass checks several tokens there, so every position's logits are wanted
        assisted = mode == GenerationMode.ASSISTED_GENERATION
        embeds = prompts.embeds is not None
        lm = held.model if held is not None and embeds <= bool(held.model.captured.embeds) else (
            self.lm.giving("all" if assisted else self.lm.captured.gives, embeds))
        if isinstance(generator, Sequence):
            if config.do_sample and (copies > 1 or len(generator) != len(prompts.ids)):
                raise ValueError("generate: with several generators each draws for one prompt and one answer to it")
            self.draws, generator = tuple(generator), None
        looked_up = min(config.prompt_lookup_num_tokens or 0, new_tokens - 1) if assisted else 0
        limit = shown.mask.shape[1] + new_tokens - 1 if assisted and options.get("custom_generate") is None else 0
        self.pictured = shown if prompts.with_images else None
        with drawing_from(generator):
            if held is not None and held.serves(shown, new_tokens):
                with held.model.turn(self.call), held.limited(limit):
                    held.call = self.call
                    return self._generate(shown, given, options, **{CACHE_NAME: held})
            if held is not None:  # as long an answer as planned for, lest a draft's every few tokens be a new plan
                new_tokens = max(new_tokens, lm.plan.workload.new_tokens)
            if not config.use_cache and prompts.embeds is None:
                with lm.running(count, prompts.longest + new_tokens - 1, 1, call=self.call):
                    found = self._generate(shown, given, options)
            else:
                if (config.num_beams or 1) > 1:
                    lm.reserve(count, prompts.longest, new_tokens, call=self.call)
                    require_movable_rows(lm.plan, lm.captured.cache_parts)
                # the first drafts are computed with the prompt
                with lm.running(count, prompts.longest + looked_up, new_tokens - looked_up, call=self.call):
                    cache = RowCache(lm, self.call) if held is None else held
                    cache.empty(lm, prompts.longest + new_tokens, self.call)
                    with cache.limited(limit):
                        found = self._generate(shown, given, options, **{CACHE_NAME: cache})
        return found if shown is prompts or config.token_healing else self._restored(found, prompts)

    def _admit(self, helper: StepModel, prompts: Prompts, new_tokens: int, config: GenerationConfig) -> None:
        """Plan for all that an assistant will draft; ValueError for one that cannot."""
        if helper is self.lm:
            raise ValueError("generate: a wrapped model cannot assist itself, its memory has room for one cache; wrap "
                             "a smaller one, with a budget of its own, as assistant_model")
        if config.do_sample and helper.captured.vocab_size != self.lm.captured.vocab_size:
            raise ValueError("generate: a wrapped assistant with a tokenizer of its own drafts greedily alone; leave "
                             "do_sample out, or give transformers' own model as assistant_model")
        helper.reserve(len(prompts.ids), prompts.longest, new_tokens)

    def _get_logits_processor(self, generation_config: GenerationConfig, *args: Any, **options: Any) -> Any:
        """transformers' own, and last, where each prompt has a generator, what draws from it."""
        found = super()._get_logits_processor(generation_config, *args, **options)  # type: ignore[misc]
        if self.draws and generation_config.do_sample:
            found.append(DrawEach(self.draws))
        return found

    def _get_candidate_generator(self, *args: Any, **options: Any) -> Any:
        """transformers' own; a wrapped assistant without positions for more drafts makes none."""
        made: Any = super()._get_candidate_generator(*args, **options)  # type: ignore[misc]
        made.get_candidates = partial(_drafts_or_none, made.get_candidates)
        return made

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: Any, mode: GenerationMode, *args: Any
    ) -> Any:
        """transformers' own, but for the cache that it makes where a call within a call has none."""
        if generation_config.use_cache and model_kwargs.get(CACHE_NAME) is None:
            made = model_kwargs[CACHE_NAME] = RowCache(self.lm, self.call)
            if mode == GenerationMode.ASSISTED_GENERATION:
                made.limit = generation_config.max_length - 1
        return super()._prepare_cache_for_generation(generation_config, model_kwargs, mode, *args)  # type: ignore[misc]

    def _generate(self, prompts: Prompts, config: GenerationConfig | None, options: dict[str, Any], **more: Any) -> Any:
        """`GenerationMixin.generate`; where the cache lies and how a prompt is cut into chunks is the plan's affair."""
        planned = dict.fromkeys(("cache_implementation", "cache_config", "prefill_chunk_size"))
        if prompts.embeds is not None and not prompts.with_images:
            more["inputs_embeds"] = prompts.embeds
        return cast(Any, self).generate(input_ids=None if prompts.nameless else prompts.ids,
                                        attention_mask=prompts.mask.long(), generation_config=config,
                                        trust_remote_code=False, **{**options, **planned, **more})

    @staticmethod
    def _restored(result: Any, prompts: Prompts) -> Any:
        """`result` with the prompts as they were given, wherever their padding was; other results stay."""
        sequences = result if isinstance(result, torch.Tensor) else getattr(result, "sequences", None)
        if sequences is None or prompts.nameless:
            return result
        each = len(sequences) // len(prompts.ids)
        sequences[:, : prompts.ids.shape[1]] = prompts.ids.repeat_interleave(each, 0)
        return result

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        cache: RowCache | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        return_dict: bool | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **others: Any,
    ) -> Any:
        """Logits [B, T, V] of input_ids [B, T], or of the last (or those) `logits_to_keep` tokens, and with `labels`
        [B, T] (-100 does not count) the loss: the mean cross-entropy of each label given the tokens before it.

        The logits at padding are 0. They are the caller's memory, beside the budget. Attention masks as for `generate`;
        `cache`, or by its former name `past_key_values`, is the cache, for tokens that follow: as many as the plan
        answers with `use_cache`, none of it with False, else as many as there happens to be room for. `position_ids`
        [B, T] or [1, T] may say what the mask says, and `inputs_embeds` [B, T, H] stand for the ids. ValueError for
        other inputs of transformers' models, which a step does not have.
        """
        if cache is not None:
            others["cache"] = cache
        held = take_cache(others)
        if held is not None and (beyond := held.beyond(input_ids)):
            return self._forward_within(beyond, input_ids, attention_mask, held, logits_to_keep, position_ids,
                                        dict(use_cache=use_cache, **others))
        if isinstance(logits_to_keep, torch.Tensor):
            found = self.forward(input_ids, attention_mask, held, labels, use_cache, 0, True, position_ids,
                                 inputs_embeds, **others)
            found.logits = found.logits[:, logits_to_keep]
            return found.to_tuple() if return_dict is False else found
        unknown = [name for name, value in others.items() if value is not None and value is not False
                   and name not in _PASSED_ON]
        if unknown:
            raise ValueError(f"{unknown[0]}: a captured step reads input_ids and attention_mask alone; leave it out")
        if inputs_embeds is not None and input_ids is not None:
            raise ValueError("give input_ids or inputs_embeds, not both")
        if held is not None and held.seen:
            ids = torch.full(inputs_embeds.shape[:2], -1) if inputs_embeds is not None else (
                torch.as_tensor(input_ids).cpu())
            check_positions(position_ids, attention_mask, held.lengths, ids.shape[1])
            logits = held.extend(self.call, ids, attention_mask, logits_to_keep or ids.shape[1], inputs_embeds)
        else:
            vocab_size = self.lm.captured.vocab_size
            holes = position_ids is not None  # these say, then, that the mask's are no positions
            prompts = read_prompts(input_ids, attention_mask, vocab_size, 0, holes) if inputs_embeds is None else (
                read_embeds(inputs_embeds, None, attention_mask, vocab_size, holes))
            check_positions(position_ids, prompts.mask, None, prompts.ids.shape[1])
            logits, held = self._begin(prompts, held, use_cache, logits_to_keep)
        loss = None
        if labels is not None:
            if logits.shape[1] != labels.shape[1]:
                raise ValueError(f"labels has {labels.shape[1]} columns, the logits {logits.shape[1]}")
            targets = labels[:, 1:].reshape(-1).cpu()
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].reshape(len(targets), -1).float(), targets)
        made = CausalLMOutputWithPast(loss=loss, logits=logits, **{CACHE_NAME: held})  # type: ignore[arg-type]
        return made.to_tuple() if return_dict is False else made

    def _begin(
        self, prompts: Prompts, cache: RowCache | None, use_cache: bool | None, keep: int
    ) -> tuple[torch.Tensor, RowCache | None]:
        """Run prompts from the start, on the model of `cache` where one is given, else on the one that serves."""
        if self.pictured is not None:  # copies of its rows are next to each other
            prompts = self.pictured.repeated(len(prompts.ids) // len(self.pictured.ids))
        count, width = prompts.ids.shape
        ends_alike = bool(prompts.mask[:, -1].all())
        gives: Gives = "last" if keep == 1 and ends_alike else "all"
        lm = cache.model if cache is not None else self.lm.giving(gives, prompts.embeds is not None)
        if prompts.embeds is not None and prompts.embeds.shape[2] != lm.captured.embeds:
            raise ValueError(f"inputs_embeds has width {prompts.embeds.shape[2]}, the model's embeddings "
                             f"{lm.captured.embeds}")
        new_tokens = cache.expected(prompts.longest) if cache is not None else 1
        if cache is None and (use_cache or (use_cache is None and getattr(self.config, "use_cache", True))):
            cache, new_tokens = RowCache(lm, self.call), self.lm.plan.workload.new_tokens if use_cache else 1
        with lm.running(count, prompts.longest, new_tokens, call=self.call) as session:
            rows = SequenceRows(session, lm.captured.states, lm.captured.cache_parts)
            if cache is None:
                found = rows.begin(prompts.rows(), 1, prompts.feature_rows())
            else:
                found = cache.begin(self.call, rows, prompts, new_tokens)
                lm.hold(rows)
        if found.dim() == 2:
            return found[:, None], cache
        logits = torch.zeros(count, width, found.shape[-1], dtype=found.dtype)
        for i, keeps in enumerate(prompts.mask):
            logits[i, keeps] = found[i, : int(keeps.sum())]
        return logits[:, -keep:], cache

    def _forward_within(
        self, beyond: int, ids: Any, mask: torch.Tensor | None, cache: RowCache, keep: Any,
        positions: torch.Tensor | None, options: dict[str, Any],
    ) -> Any:
        """`forward` without the last `beyond` tokens, drafts of tokens that nobody wants: their logits are 0."""
        found = self.forward(ids[:, :-beyond], None if mask is None else mask[:, :-beyond], cache,
                             logits_to_keep=max(1, keep - beyond) if keep else 0,
                             position_ids=None if positions is None else positions[:, :-beyond], **options)
        found.logits = torch.nn.functional.pad(found.logits, (0, 0, 0, beyond))
        cache.skip(beyond)
        return found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return self.forward(*args, **kwargs)


def _drafts_or_none(draft: Callable[..., Any], input_ids: torch.Tensor, *args: Any, **options: Any) -> Any:
    """Return the result of `draft`, ids [1, T] with drafts and their logits or None; `input_ids` alone without
    positions."""
    try:
        return draft(input_ids, *args, **options)
    except NoPositionsError:
        return input_ids, None


def _check_lengths(options: dict[str, Any], prompts: Prompts) -> None:
    wanted, most = options.get("max_new_tokens"), options.get("max_length")
    if wanted is not None and wanted < 1:
        raise ValueError(f"generate: max_new_tokens must be at least 1, found {wanted}")
    if wanted is None and most is not None and most <= prompts.ids.shape[1]:
        raise ValueError(f"generate: max_length {most} leaves no room for a new token after a prompt of "
                         f"{prompts.ids.shape[1]}")
