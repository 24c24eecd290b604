"""`forebay run --image` and `/image` in `forebay chat`, through a model's own processor."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
import transformers as T
from multimodal import CONFIGS, save
from tokenizers import Tokenizer, models, pre_tokenizers
from typer.testing import CliRunner

from forebay.commands.app import app
from forebay.commands.prompts import BadPrompt
from forebay.images.processor import open_image

Image = pytest.importorskip("PIL.Image")
pytestmark = [pytest.mark.filterwarnings("ignore:.*lies in memory"),
              pytest.mark.filterwarnings("ignore:OpenMP threads spin")]
TEMPLATE = """{% for m in messages %}{{ m.role }} : {% if m.content is string %}{{ m.content }}{% else %}\
{% for p in m.content %}{% if p.type == 'image' %}<image> {% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %} \
{% endfor %}assistant :"""


def llava(folder: Path) -> tuple[Any, Any]:
    """A folder of a model with its processor, which are returned."""
    plain = CONFIGS["llava"]
    whole = save("llava", folder, plain | {"text_config": plain["text_config"] | {"max_position_embeddings": 600}})
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


def test_commands_answer_as_transformers_does(tmp_path: Path) -> None:
    whole, processor = llava(tmp_path)
    one, other = picture(tmp_path / "one.png", (200, 10, 30)), picture(tmp_path / "other.png", (7, 90, 250))
    limits = ["--budget", "4MB", "--new-tokens", "5"]
    found = CliRunner().invoke(app, ["run", str(tmp_path), "w6 w7", *limits, "--image", str(one), "--image",
                                     str(other)])
    assert found.exit_code == 0, found.output + repr(found.exception)
    text = "user : <image> <image> w6 w7 assistant :"
    assert found.stdout.strip() == answer(whole, processor, text, one, other).strip()
    planned = CliRunner().invoke(app, ["plan", str(tmp_path), "--budget", "4MB", "--prompt", "20"])
    assert "of a vision tower, read once per batch of images before the prefill" in planned.stdout, planned.output
    said = f"w9\n/image {tmp_path / 'none.png'}\n/image {other}\nw8\n"
    found = CliRunner().invoke(app, ["chat", str(tmp_path), *limits, "--temperature", "0"], input=said)
    assert found.exit_code == 0, found.output + repr(found.exception)
    first, second = found.stdout.strip().splitlines()
    text = f"user : w9 assistant : {first.strip()} user : <image> w8 assistant :"
    assert second.strip() == answer(whole, processor, text, other).strip()
    assert "none.png cannot be read: No such file or directory" in found.stderr
    refused = CliRunner().invoke(app, ["run", str(tmp_path), "--prompts", "a", "--output", "b", "--image", str(one)])
    assert refused.exit_code == 2 and "--image is for one PROMPT" in refused.stderr


def test_images_come_from_files_and_data_urls_alone(tmp_path: Path) -> None:
    path, bad = picture(tmp_path / "one.png", (1, 2, 3)), tmp_path / "bad.png"
    url = f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"
    assert open_image(url).tobytes() == open_image(str(path)).tobytes()
    bad.write_bytes(b"no image")
    Image.new("1", (1 << 14, 1 << 13)).save(tmp_path / "large.png")
    for source, message in (("https://example.com/a.png", "not fetched from the network"),
                            ("data:image/png;base64,!", "cannot be read"), (str(bad), "cannot be read"),
                            (str(tmp_path / "large.png"), "16384 x 8192 pixels; make it smaller"),
                            (str(tmp_path), "cannot be read")):
        with pytest.raises(BadPrompt, match=message):
            open_image(source)
