"""How a text is split into words before byte-level BPE, by the names that GGUF files give to pre-tokenizers.

A name is that of the tokenizer.json whose patterns are used one after the other, each on the pieces that those before
have left. Source of names: llama.cpp, src/llama-vocab.cpp.
"""

from __future__ import annotations

_LAST = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASES = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"


def _words(digits: str, letters: str = r"\p{L}", other: str = r"\p{L}") -> str:
    """Llama 3's pattern, and those that differ from it in few places."""
    return (rf"{_CASES}|[^\r\n\p{{L}}\p{{N}}]?{letters}+|{digits}| ?[^\s{other}\p{{N}}]+[\r\n]*{_LAST}")


def _cased(digits: str, contractions: str = "") -> str:
    """A pattern that parts words where small letters are followed by capital ones."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    words = "|".join(rf"[^\r\n\p{{L}}\p{{N}}]?{upper}{first}{lower}{second}{contractions}"
                     for first, second in (("*", "+"), ("+", "*")))
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_LAST}"


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3, _QWEN2 = _words(r"\p{N}{1,3}"), _words(r"\p{N}")
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# Letters of both cases, but those of Armenian's small ones, of Georgian and of mathematics.
_BICAMERAL = "[[\\p{Lu}\\p{Ll}\\p{Lt}]&&[^\u0560-\u0588\u10c7-\u10ff\u2d00-\u2d2d\U0001d400-\U0001d7cb]]"
_POEM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_BY_PATTERNS: dict[tuple[str, ...], str] = {
    (_GPT2,): "gpt-2 gpt2 phi-2 mpt olmo jais trillion granite-docling roberta-bpe gigachat exaone4 mellum a.x-4.0",
    (r"\p{N}", _GPT2): "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2",
    (_LLAMA3,): "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 dbrx smaug-bpe glm4 chatglm-bpe",
    (_QWEN2,): "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2",
    (_words(r"\p{N}", letters=r"[\p{L}\p{M}]", other=r"\p{L}\p{M}"),): "qwen35",
    (_words(r"\p{N}").replace(r"\p{N}]+[\r\n]*", r"\p{N}\r\n]+"),): "seed-coder",
    (_cased(r"\p{N}"),): "tekken",
    (_cased(r"\p{N}{1,3}", f"{_CASES}?"),): "gpt-4o llama4 kanana2 talkie minimax-m2",
    (r"\p{N}{1,3}", _words(r"\p{N}+")): "minicpm5",
    (r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
     r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
     + _LAST): "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
    (r"[\r\n]", rf"\s?{_BICAMERAL}+", "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+", r"\s+$", _CJK, r"\p{N}+"):
        "deepseek-llm",
    (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}"): "deepseek-coder",
    (_POEM,): "poro-chat bloom gpt3-finnish",
    (_POEM, r"\p{N}"): "viking",
}
_PATTERNS = {name: patterns for patterns, names in _BY_PATTERNS.items() for name in names.split()}
# Those of which a word that is a token is that token, whatever the merges would make of it.
WHOLE_WORDS = frozenset(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2",
                         "tekken", "minicpm5"))
# Those whose texts begin with the token of beginnings, unless the file says otherwise.
ADD_BOS = WHOLE_WORDS - {"minicpm5"}
# Those whose texts are composed first: an e and an accent become one letter.
NFC = frozenset(("qwen2", "qwen35"))


def split_patterns(name: object) -> tuple[str, ...] | None:
    """The patterns of a pre-tokenizer; None for one that this release does not know."""
    return _PATTERNS.get(name) if isinstance(name, str) else None
