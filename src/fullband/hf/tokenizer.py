"""Our own tokenizers as Hugging Face ones, so that an exported App. A model works in a pipeline: the same ids, the same text."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from fullband.data.subword import HuggingFaceTokenizer
from fullband.data.tokenizer import Tokenizer
from fullband.data.tokenizers import ByteTokenizer, TaskTokenizer

END = "<|end_of_document|>"
PAD = "<|padding|>"
NO_TEXT = 255  # a byte that UTF-8 never uses: its id can be padding's, so that the vocabulary stays as large as the model's


def export_tokenizer(tokenizer: Tokenizer, folder: Path, context: int) -> bool:
    """Write `tokenizer` into `folder` as transformers reads it. False for kinds it has no equal of: then the folder's tokenizer is read by
    fullband alone. One that came as a tokenizer.json has been saved as that already."""
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return True
    if isinstance(tokenizer, ByteTokenizer):
        backend, special = _bytes(), {"eos_token": END, "pad_token": PAD}  # apart: collators mask padding, and would mask every end
    elif isinstance(tokenizer, TaskTokenizer):
        backend, special = _words(tokenizer.names), {}  # every token of a task means something
    else:
        return False
    exported = PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=context, clean_up_tokenization_spaces=False, **special)
    exported.save_pretrained(folder)
    return True


def padding_id(tokenizer: Tokenizer) -> int:
    """The id that fills rows which ended: the exported tokenizer's own, else an end, else 0."""
    return NO_TEXT if isinstance(tokenizer, ByteTokenizer) else min(tokenizer.stops, default=0)


def _bytes() -> Backend:
    """Ids 0..254 are bytes, 255, which is in no text, pads, 256 ends a document."""
    vocabulary = {PAD if byte == NO_TEXT else character: byte for byte, character in bytes_to_unicode().items()}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(PAD, normalized=False), AddedToken(END, normalized=False)])
    return backend


def _words(names: list[str]) -> Backend:
    """Names of a task's tokens, with spaces between them."""
    backend = Backend(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token=names[0]))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return backend
