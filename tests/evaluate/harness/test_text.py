"""lm-eval's rules of encoding: what stands before a text, and what stands in for an empty one."""

from __future__ import annotations

from pathlib import Path

import pytest

from fullband.data.chat_template import ChatTemplate
from fullband.data.tokenizers import ByteTokenizer, TaskTokenizer
from fullband.evaluate.harness.text import HarnessText


@pytest.fixture
def with_lead(tmp_path: Path) -> HarnessText:
    """A tokenizer whose own rule puts <s> before every text."""
    from tokenizers.processors import TemplateProcessing

    from hf.sources import byte_tokenizer

    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 256)])
    tokenizer.save_pretrained(tmp_path)
    return HarnessText.of_folder(tmp_path)


def test_a_tokenizers_own_beginning_is_added_once(with_lead: HarnessText) -> None:
    ids = with_lead.encode("ab")
    assert ids[0] == 256 and ids[1:] == with_lead.encode("ab", special=False)
    assert with_lead.encode("<|im_start|>ab") == ids
    assert (with_lead.prefix, with_lead.stops) == (256, [257])
    assert with_lead.decode([*ids, 257]) == "ab"


def test_it_is_what_transformers_does(with_lead: HarnessText, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in ("", "ab", " a\n\nb", "é→🙂"):
        assert with_lead.encode(text) == theirs.encode(text)
        assert with_lead.encode(text, special=False) == theirs.encode(text, add_special_tokens=False)


def test_add_bos_token(tmp_path: Path) -> None:
    from hf.sources import byte_tokenizer

    byte_tokenizer().save_pretrained(tmp_path)
    assert HarnessText.of_folder(tmp_path).encode("a") == HarnessText.of_folder(tmp_path, add_bos=False).encode("a")
    assert HarnessText.of_folder(tmp_path, add_bos=True).encode("a")[0] == 256
    with pytest.raises(ValueError, match="names no beginning of sequence"):
        HarnessText(ByteTokenizer(), add_bos=True)


def test_our_own_tokenizers() -> None:
    text = HarnessText(ByteTokenizer(), ChatTemplate())
    assert (text.encode("a"), text.prefix, text.stops) == ([97], 256, [256])
    without = HarnessText(TaskTokenizer("s3", ["0", "1"]))
    assert (without.prefix, without.stops) == (None, [])
