"""Commands of the pages, and folders in which the files exist that they name."""

from __future__ import annotations

import json
import re
import shlex
import textwrap
import wave
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import lora_folders
import numpy as np
import pictured
import small_experts
import tiny_gguf
import transformers as T
from embedding import folders as embedders
from modules import test_encoder_decoder as encoder_decoders
from serving.served import TEMPLATE, byte_tokenizer, save_byte_model
from tokenizers import Tokenizer, models, pre_tokenizers
from words import ROOT

from forebay.rewriter.machine.profile import Machine, save_machine

COMMAND = re.compile(r"^    ((?:torchrun .*)?forebay (?:.*\\\n)*.*)$", re.MULTILINE)
REQUEST = re.compile(r"^    (curl .*(?:\n     .*)*)", re.MULTILINE)
# A block that a sentence announces as output, below a command.
SHOWN = re.compile(r"\n\n(?:\S.*\n)*(?:\S.*\b(?:output|prints)\b.*\n)(?:\S.*\n)*\n((?:    .*\n)+)")
QUESTIONS = ("Name three rivers.", "Name three lakes.")
# Python blocks: fenced, or indented with a first line that begins so.
BEGINS = re.compile(r"(import |from \w+ import |lm = |lm\.|with wrap|forebay\.\w+\()")


def python_blocks(text: str) -> list[str]:
    """Fenced Python, and indented blocks that begin like Python, without `…`."""
    fenced = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    plain = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    indented = [block for block in re.findall(r"(?:^    .*\n|^\n(?=    ))+", plain, re.MULTILINE)
                if BEGINS.match(block.strip())]
    return [re.sub(r"^ *…$", "", textwrap.dedent(block), flags=re.MULTILINE) for block in (*fenced, *indented)]


@dataclass(frozen=True)
class Command:
    """A line of a page that begins with `forebay`, and what the page shows below it."""

    words: tuple[str, ...]  # after `forebay`, up to a pipe
    ranks: int  # processes of torchrun
    pattern: str  # of `| grep`
    request: tuple[str, ...]  # words of the `curl` that follows, with its options
    shown: tuple[str, ...]  # lines of its output

    @property
    def line(self) -> str:
        return shlex.join(self.words)


def commands(page: Path) -> list[Command]:
    """The commands of a page, in its order."""
    text = page.read_text(encoding="utf-8")
    matches = list(COMMAND.finditer(text))
    found, ends = [], [*(match.start() for match in matches), len(text)][1:]
    for match, end in zip(matches, ends, strict=bool(matches)):
        line, after = shlex.split(match[1], comments=True), text[match.end():end]
        start, pipe = line.index("forebay"), line.index("|") if "|" in line else len(line)
        assert line[pipe : pipe + 2] in ([], ["|", "grep"]), match[1]
        ranks = next((int(word.partition("=")[2]) for word in line[:start] if word.startswith("--nproc")), 1)
        request, shown = REQUEST.search(after), SHOWN.match(after)
        found.append(Command(tuple(line[start + 1 : pipe]), ranks, " ".join(line[pipe + 2 :]),
                             tuple(shlex.split(request[1].replace("\\\n", " "))) if request else (),
                             tuple(map(str.strip, shown[1].splitlines())) if shown else ()))
    return found


class Workspace:
    """Folders of the pages, with files made when a command first names them; models are shared by all pages."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.made: dict[str, Path] = {}

    def provide(self, page: str, text: str) -> Path:
        """The folder in which a page's lines run, with the files that a text names."""
        folder = self.root / "pages" / page.partition(".")[0]
        folder.mkdir(parents=True, exist_ok=True)
        for name in re.findall(r"[\w.~-]+", text):
            kind = PAGES.get(page, {}).get(name) or NAMES.get(name)
            if name == "MODEL":
                kind = next((kind for part, kind in LINES.items() if part in text), kind)
            path = folder / name
            if kind is None or (path.exists() and not path.is_symlink()):
                continue
            path.unlink(missing_ok=True)
            path.symlink_to(self.make(kind, name))
        return folder

    def make(self, kind: str, name: str) -> Path:
        """The file or folder of a kind, made when it is first asked for."""
        if kind not in self.made:
            self.made[kind] = self.root / "made" / kind / name
            self.made[kind].parent.mkdir(parents=True)
            MAKERS[kind](self, self.made[kind])
        return self.made[kind]


def _model(space: Workspace, path: Path) -> None:
    save_byte_model(path, TEMPLATE, layers=2, max_position_embeddings=4096)


def _wide(space: Workspace, path: Path) -> None:
    """Rows long enough that padding adds little."""
    save_byte_model(path, TEMPLATE, layers=1, hidden_size=512, intermediate_size=1024)


def _experts(space: Workspace, path: Path) -> None:
    config = small_experts.small_config("qwen3_moe", vocab_size=320, max_position_embeddings=4096)
    small_experts.random_model(config).save_pretrained(path)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)


def _gguf(space: Workspace, path: Path) -> None:
    short = path.with_suffix(".short")
    tiny_gguf.write_model(short, "qwen3", kinds=("Q4_0", "Q8_0"), loadable=True)
    tiny_gguf.copy_of(short, path, {"qwen3.context_length": 4096})


def _adapter(space: Workspace, path: Path) -> None:
    base = space.make("model", "MODEL")
    lora_folders.write_lora(path, T.AutoModelForCausalLM.from_pretrained(base), r".*\.(q|v)_proj", base)


def _pictured(space: Workspace, path: Path) -> None:
    pictured.llava(path, positions=4096)


def _photo(space: Workspace, path: Path) -> None:
    pictured.picture(path, (90, 120, 200))


def _embedder(space: Workspace, path: Path) -> None:
    embedders.save("bert", path)
    embedders.save_modules(path, {"pooling_mode_mean_tokens": True})


def _reranker(space: Workspace, path: Path) -> None:
    embedders.save("xlm-roberta", path, T.AutoModelForSequenceClassification, num_labels=1)


def _encoder_decoder(kind: str) -> Maker:
    def make(space: Workspace, path: Path) -> None:
        encoder_decoders.save(kind, path)
        made = Tokenizer(models.WordLevel({f"w{i}": i for i in range(100)}, unk_token="w3"))
        made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        T.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="w3", pad_token="w0",
                                  eos_token="w2").save_pretrained(path)
        if kind == "whisper":
            T.WhisperFeatureExtractor(feature_size=8, chunk_length=1, n_fft=400, hop_length=500).save_pretrained(path)

    return make


def _recording(space: Workspace, path: Path) -> None:
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, 16000, 0, "NONE", ""))
        file.writeframes((np.sin(np.arange(16000) / 9) * 9000).astype("<i2").tobytes())


def _profile(space: Workspace, path: Path) -> None:
    save_machine(Machine.default(), path)


def _rows(lines: Iterable[str]) -> Maker:
    text = "".join(f"{line}\n" for line in lines)

    def make(space: Workspace, path: Path) -> None:
        path.write_text(text, encoding="utf-8")

    return make


def _source(name: str) -> Maker:
    return lambda space, path: path.symlink_to(ROOT / name)


Maker = Callable[[Workspace, Path], None]
MAKERS: dict[str, Maker] = {
    "model": _model, "wide": _wide, "experts": _experts, "gguf": _gguf, "adapter": _adapter, "other adapter": _adapter,
    "pictured": _pictured, "photo": _photo, "embedder": _embedder, "reranker": _reranker,
    "t5": _encoder_decoder("t5"),
    "whisper": _encoder_decoder("whisper"), "recording": _recording, "profile": _profile,
    "prompts": _rows(json.dumps({"prompt": text, "text": text, "max_new_tokens": 3}) for text in QUESTIONS),
    "table": _rows(["question,topic", *(f"{text},water" for text in QUESTIONS)]),
    "buffers": _rows(["id,lower,upper,size", "a,0,3,4096", "b,1,4,8192", "c,4,6,8192"]),
    "text": _source("README.md"), "examples": _source("examples")}
NAMES = {
    "MODEL": "model", "BASE": "model", "Qwen3-8B-Q4_K_M.gguf": "gguf", "ADAPTER": "adapter", "FOLDER": "model",
    "OTHER": "other adapter", "flan-t5-large": "t5", "flan-t5-xxl": "t5", "whisper-small": "whisper",
    "recording.wav": "recording", "photo.jpg": "photo", "Qwen2.5-VL-7B-Instruct": "pictured",
    "Qwen3-Embedding-8B": "embedder", "bge-reranker-v2-m3": "reranker", "in.jsonl": "prompts",
    "prompts.jsonl": "prompts", "texts.jsonl": "prompts", "questions.csv": "table", "buffers.csv": "buffers",
    "profile.json": "profile", "prompts.txt": "text", "README.md": "text", "examples": "examples"}
PAGES = {"adapters.md": {"FOLDER": "adapter"}, "experts.md": {"MODEL": "experts"}, "images.md": {"MODEL": "pictured"},
         "embeddings.md": {"MODEL": "embedder"}}
LINES = {"--experts": "experts", "embed ": "embedder", "--bits": "wide"}  # kinds of MODEL that a command asks for
