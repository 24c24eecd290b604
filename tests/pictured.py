"""A tiny LLaVA with its processor, and pictures for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers as T
from multimodal import CONFIGS, save
from tokenizers import Tokenizer, models, pre_tokenizers

Image = pytest.importorskip("PIL.Image")
TEMPLATE = """{% for m in messages %}{{ m.role }} : {% if m.content is string %}{{ m.content }}{% else %}\
{% for p in m.content %}{% if p.type == 'image' %}<image> {% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %} \
{% endfor %}assistant :"""


def llava(folder: Path, positions: int = 600) -> tuple[Any, Any]:
    """A folder of a model with its processor, which are returned."""
    plain = CONFIGS["llava"]
    text = plain["text_config"] | {"max_position_embeddings": positions}
    whole = save("llava", folder, plain | {"text_config": text})
    whole.generation_config.eos_token_id = whole.generation_config.pad_token_id = 2
    whole.generation_config.save_pretrained(folder)
    words = ["<pad>", "<unk>", "</s>", "user", "assistant", ":", *(f"w{i}" for i in range(6, 150)), "<image>"]
    vocab = {word: i for i, word in enumerate(words)}
    made = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = T.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", unk_token="<unk>",
                                          eos_token="</s>", additional_special_tokens=["<image>"])
    size = {"height": 28, "width": 28}
    processor = T.LlavaProcessor(
        T.CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=size), tokenizer, patch_size=14,
        vision_feature_select_strategy="default", chat_template=TEMPLATE, image_token="<image>",
        num_additional_image_tokens=1)
    processor.save_pretrained(folder)
    return whole, T.AutoProcessor.from_pretrained(folder)


def picture(path: Path, color: tuple[int, int, int]) -> Path:
    Image.linear_gradient("L").resize((40, 30)).convert("RGB").point(lambda v: v * sum(color) // 255 % 256).save(path)
    return path


def answer(whole: Any, processor: Any, text: str, *images: Path) -> str:
    given = processor(text=[text], images=[Image.open(each).convert("RGB") for each in images], return_tensors="pt")
    out = whole.generate(**given, max_new_tokens=5, do_sample=False)[0, given["input_ids"].shape[1]:]
    return processor.tokenizer.decode(out, skip_special_tokens=True)
