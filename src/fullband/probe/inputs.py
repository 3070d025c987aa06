"""Examples as tokens of equal length, and what had to be adjusted to a tokenizer that is not the paper's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile

from fullband.data.tokenizer import Tokenizer
from fullband.data.tokenizers import TaskTokenizer
from fullband.probe.examples import ProbeSetting


@dataclass(frozen=True)
class ProbeInputs:
    """Tokens of a setting's examples, in their order.

    lengths    tokens of every input, by null updates
    steps      the final tokens that the suffix of k covers, by k
    shared     tokens that both answers begin with
    telling    the token of each answer that follows them, where the answers part
    notes      what differs from App. F, in words
    """

    tokens: list[list[int]]
    lengths: dict[int, int]
    steps: dict[int, int]
    shared: list[int]
    telling: tuple[int, int]
    notes: list[str]

    def batches(self, batch_tokens: int) -> Iterator[slice]:
        """Consecutive examples of one length, partners together, about `batch_tokens` tokens at a time."""
        start = 0
        while start < len(self.tokens):
            length = len(self.tokens[start])
            rows = max(2, batch_tokens // length // 2 * 2)
            stop = start
            while stop < min(start + rows, len(self.tokens)) and len(self.tokens[stop]) == length:
                stop += 1
            yield slice(start, stop)
            start = stop


def encode_setting(setting: ProbeSetting, tokenizer: Tokenizer) -> ProbeInputs:
    """Tokens in which all examples of a delay are equally long, as are those of a setting for which App. F says how long they are.

    Shorter ones are padded at the front with newlines. Raises ValueError for a tokenizer in which the two answers are one, and for one
    that has no words for texts.
    """
    if isinstance(tokenizer, TaskTokenizer):
        raise ValueError(f"the tokenizer {tokenizer.name} has no words for App. F's texts: probe a model that was trained on text")
    encoded = [tokenizer.begin(example.text) for example in setting.examples]
    newline, lead = tokenizer.encode("\n")[-1], len(tokenizer.lead)
    longest = Counter[int]()
    for example, tokens in zip(setting.examples, encoded, strict=True):
        longest[example.updates] = max(longest[example.updates], len(tokens))
    notes = []
    lengths = {updates: max(length, setting.tokens or 0) for updates, length in longest.items()}
    if setting.tokens and max(lengths.values()) > setting.tokens:
        notes.append(f"inputs take {max(lengths.values())} tokens, so they are not padded to {setting.tokens}")
    uneven = sum(len(t) != longest[e.updates] for e, t in zip(setting.examples, encoded, strict=True))
    if uneven:
        notes.append(f"{uneven} inputs are shorter than others of their delay, and were padded at the front with newlines")
    padded = [
        [*tokens[:lead], *[newline] * (lengths[example.updates] - len(tokens)), *tokens[lead:]]
        for example, tokens in zip(setting.examples, encoded, strict=True)
    ]
    if len({tokens[-1] for tokens in padded}) > 1:
        notes.append("inputs do not all end in the same token")
    steps = _suffix_steps(setting, tokenizer, encoded)
    notes += [f"the suffix of {k} covers {n} tokens of this tokenizer" for k, n in steps.items() if n != k]
    shared, telling = _answers(setting, tokenizer)
    if shared:
        notes.append(f"answers begin with the same {len(shared)} tokens; the one after them counts")
    return ProbeInputs(padded, dict(lengths), steps, shared, telling, notes)


def _suffix_steps(setting: ProbeSetting, tokenizer: Tokenizer, encoded: list[list[int]]) -> dict[int, int]:
    """For each suffix, the fewest final tokens that cover its text in every example. Examples that end alike are looked at once."""
    endings = {
        (example.updates, *example.tails.values()): (example, tokens) for example, tokens in zip(setting.examples, encoded, strict=True)
    }
    covering = Counter[int]()
    for example, tokens in endings.values():
        for k, tail in example.tails.items():
            head = tokenizer.begin(example.text.removesuffix(tail))
            untouched = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(head, tokens, strict=False)))
            covering[k] = max(covering[k], len(tokens) - untouched)
    return dict(sorted(covering.items()))


def _answers(setting: ProbeSetting, tokenizer: Tokenizer) -> tuple[list[int], tuple[int, int]]:
    """(what both answers begin with, the two tokens that tell them apart)."""
    first, second = (tokenizer.follow(setting.examples[0].text, f" {answer}") for answer in setting.answers)
    for place, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return first[:place], (a, b)
    raise ValueError(f"the tokenizer {tokenizer.name} does not tell the answers {' and '.join(setting.answers)} apart")
