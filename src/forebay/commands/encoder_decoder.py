"""`forebay run` for models with an encoder and a decoder: the answer to a text, or the words of a recording."""

from __future__ import annotations

import wave
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.commands.terminal import JobError, print_answer
from forebay.rewriter.one_thread import one_thread
from forebay.rewriter.planning.options import Options

if TYPE_CHECKING:
    from forebay.modules.encoder_decoder import EncoderDecoder
    from forebay.runtime.run.sampling import Sampling

NEW_TOKENS = 256  # of an answer, where nobody says
MOST_SAMPLES = 1 << 28  # of a recording


def answer_encoded(
    folder: Path, prompt: str, budget: str | None, options: Options, sampling: Sampling, seed: int
) -> None:
    """Print the answer to a text, or the words of the recording in a file of that name."""
    import torch

    from forebay.commands.options import named_budget
    from forebay.commands.prompts import ids_text, load_tokenizer, text_ids
    from forebay.modules.encoder_decoder import EncoderDecoder

    lm, tokenizer = EncoderDecoder(folder, named_budget(budget)), load_tokenizer(folder)
    given = _recording(lm, Path(prompt)) if lm.speech else {"input_ids": torch.tensor([text_ids(tokenizer, prompt)])}
    torch.manual_seed(seed)
    drawing = vars(sampling) if sampling.do_sample else {"do_sample": False}
    drawing = {name: drawing[name] for name in ("do_sample", "temperature", "top_k", "top_p") if name in drawing}
    limit = getattr(lm.config, "max_target_positions", None)
    most = min(options.new_tokens or NEW_TOKENS, limit // 2 if limit else NEW_TOKENS * 64)
    found = lm.generate(**given, max_new_tokens=most, **drawing)
    print_answer(ids_text(tokenizer, found[0].tolist()).strip())


@one_thread
def _load_extractor(folder: Path) -> Any:
    """The folder's own feature extractor; JobError where it has none that works."""
    from transformers import AutoFeatureExtractor

    from forebay.rewriter.checkpoints.config import LOCAL_ONLY

    try:
        return AutoFeatureExtractor.from_pretrained(folder, **LOCAL_ONLY)
    except Exception as error:  # each extractor checks its settings in its own way
        raise JobError(f"{folder} holds no usable feature extractor (preprocessor_config.json): {error}") from error


def _recording(lm: EncoderDecoder, path: Path) -> dict[str, Any]:
    """Return the features of a recording, by transformers' feature extractor; JobError where it cannot be read."""
    extractor = _load_extractor(lm.folder)
    samples = read_wave(path, extractor.sampling_rate)
    made = extractor(samples, sampling_rate=extractor.sampling_rate, return_tensors="pt")
    return dict(made)


def read_wave(path: Path, rate: int) -> Any:
    """Samples [T] float32 of a WAV file of that sampling rate, channels averaged; JobError for anything else."""
    import io

    import numpy as np

    from forebay.rewriter.ir.files import read_input

    convert = f"convert it: ffmpeg -i {path} -ar {rate} -ac 1 -c:a pcm_s16le out.wav"
    try:
        with wave.open(io.BytesIO(read_input(path))) as file:
            channels, width, has_rate, count = file.getparams()[:4]
            if count > MOST_SAMPLES:
                raise JobError(f"{path} has {count} samples, at most {MOST_SAMPLES} are read")
            data = file.readframes(count)
    except OSError as error:
        raise JobError(f"cannot read the recording {path}: {error.strerror or error}") from error
    except (wave.Error, EOFError) as error:
        raise JobError(f"{path} is no WAV file that can be read ({error}); {convert}") from error
    if width not in (2, 4) or has_rate != rate:
        raise JobError(f"{path} has {has_rate} samples a second of {8 * width} bits, and the model takes {rate} of 16 "
                       f"or 32; {convert}")
    samples = np.frombuffer(data, "<i2" if width == 2 else "<i4").astype(np.float32) / (1 << (8 * width - 1))
    return samples.reshape(-1, channels).mean(1)
