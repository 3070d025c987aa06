"""Examples to score, and which of them begin alike, so that the common beginning is run once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from operator import eq

LEAST_SAVED = 64  # positions: sharing takes a second call of the trunk


@dataclass(frozen=True)
class Example:
    """Inputs of one or several requests: those that differ in their last token alone share it.

    start   position of the first input of a continuation; the state before it is the first that is scored
    places  of the requests
    """

    inputs: tuple[int, ...]
    start: int
    places: list[int]


@dataclass(frozen=True)
class Group:
    """Examples whose first `shared` inputs are the same, and are none that is scored; 0 = nothing is shared."""

    examples: list[Example]
    shared: int

    @property
    def saved(self) -> int:
        """Positions that need not be run."""
        return self.shared * (len(self.examples) - 1)


def examples_of(inputs_and_starts: Sequence[tuple[tuple[int, ...], int]]) -> list[Example]:
    """The examples to run for requests of these inputs, whose continuation begins at `start`."""
    examples: dict[tuple[tuple[int, ...], int], Example] = {}
    for place, (inputs, start) in enumerate(inputs_and_starts):
        examples.setdefault((inputs, start), Example(inputs, start, [])).places.append(place)
    return list(examples.values())


def alone(examples: Sequence[Example]) -> list[Group]:
    """Each example by itself, to be run whole."""
    return [Group([example], 0) for example in examples]


def group_examples(examples: Sequence[Example], most: int, whatever_saved: bool = False) -> list[Group]:
    """Groups of at most `most` examples; those that are better run whole are alone.

    An example joins the one before it in order of inputs as long as that saves positions, wherever the common part comes from: the
    choices of one question, or few-shot examples that questions share.

    whatever_saved   groups however little they save: of a single example, too, whose context is then run apart
    """
    groups: list[Group] = []
    for example in sorted(examples, key=lambda example: example.inputs):
        if groups and len(groups[-1].examples) < most:
            last = groups[-1]
            common = sum(takewhile(bool, map(eq, last.examples[0].inputs, example.inputs)))
            joined = Group([*last.examples, example], min(last.shared, example.start - 1, common))
            if joined.saved > last.saved:
                groups[-1] = joined
                continue
        groups.append(Group([example], example.start - 1))
    least = 0 if whatever_saved else LEAST_SAVED
    return [own for group in groups for own in ([group] if group.shared and group.saved >= least else alone(group.examples))]


def batches_of(groups: Sequence[Group], size: int) -> Iterator[list[Group]]:
    """Batches of at most `size` examples, all of groups that share something or all of examples alone. Longest first: a batch then has
    little padding, and the first one shows the memory needed."""
    batch: list[Group] = []
    for group in sorted(groups, key=lambda group: (-group.shared, -max(len(example.inputs) for example in group.examples))):
        together = sum(len(other.examples) for other in [*batch, group])
        if batch and (together > size or (group.shared > 0) != (batch[0].shared > 0)):
            yield batch
            batch = []
        batch.append(group)
    if batch:
        yield batch
