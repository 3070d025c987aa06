"""Top states of examples, evaluated in several ways at once: fewer feedback passes are the first of more, so they come free.

`states_of_whole` runs each example from its first input. `states_after_shared` runs the inputs that a group of examples begins with once,
and each example's ending from a copy of the cache that they leave. By laws 2 and 3 both are the same; `states_of_whole` is the reference.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, pairwise, repeat
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fullband.decode.prompts import AlignedPrompts, align_prompts
from fullband.evaluate.harness.sharing import Example, Group
from fullband.feedback.by_passes import states_by_passes, top_states
from fullband.feedback.converged import run_converged
from fullband.feedback.passes import FeedbackModel, Inputs, Pass, PassState, below, check_length, parallel, plain_pass, sequential
from fullband.feedback_config import FeedbackPasses
from fullband.layout import NOWHERE, Layout

# How context and continuation are evaluated: together, after 0, 1, … feedback passes ("exact", "converged"); or as Soft would have made
# the continuation: the context without feedback, the continuation with its states fed back.
Scoring: TypeAlias = FeedbackPasses | Literal["soft"]


def shareable(model: FeedbackModel, scorings: Sequence[Scoring]) -> tuple[list[Scoring], list[Scoring]]:
    """(scorings for which a common beginning can be run once, scorings that need whole examples)."""
    shared: list[Scoring] = [scoring for scoring in scorings if model.trunk.supports_prefix_reuse and scoring != "converged"]
    return shared, [scoring for scoring in scorings if scoring not in shared]


def states_of_whole(model: FeedbackModel, examples: Sequence[Example], scorings: Sequence[Scoring]) -> Iterator[tuple[Scoring, Tensor]]:
    """(scoring, top states [B, T, D]) of examples padded at the right, for each of `scorings`."""
    lengths = [len(example.inputs) for example in examples]
    check_length(model, max(lengths))
    tokens_BT = _padded_right(model, [example.inputs for example in examples])
    counted: list[FeedbackPasses] = [scoring for scoring in scorings if scoring != "soft" and scoring != "converged"]
    yield from states_by_passes(model, tokens_BT, counted)
    if "soft" in scorings:
        plain_BT = _before([example.start for example in examples], tokens_BT)
        # Without a cache to step from: n passes make the first n fused positions exact (law 2), as many as a continuation feeds back.
        fused = max(len(example.inputs) - example.start for example in examples)
        yield "soft", top_states(model, tokens_BT, "exact" if model.trunk.supports_prefix_reuse else fused, Layout(plain_BT=plain_BT))
    if "converged" in scorings:
        yield "converged", run_converged(model, below(model, tokens_BT)[0], torch.tensor(lengths)).top_BTD


def states_after_shared(model: FeedbackModel, groups: Sequence[Group], scorings: Sequence[Scoring]) -> Iterator[tuple[Scoring, Tensor]]:
    """(scoring, top states [B, T, D]) of the endings of all examples, group by group, after what their group shares; padded at the right.

    Pass k of an ending continues the cache of pass k of its beginning, and is first fed the last states of pass k - 1; no older cache is
    needed.
    """
    beginnings = align_prompts(model.trunk, [group.examples[0].inputs[: group.shared] for group in groups])
    inputs, lower = below(model, beginnings.tokens_BT, beginnings.layout, keep="window")
    endings = _Endings.of(model, groups, beginnings, lower)
    deepest = max((scoring for scoring in scorings if isinstance(scoring, int)), default=-1)
    if deepest >= 0 or "soft" in scorings:
        first = plain_pass(model, inputs, keep="window")
        outputs = chain([first], parallel(model, inputs, first, repeat(Pass(keep="window"))))
        # Where pass 1, 2, … stands after the beginnings: its cache, and the states that the next pass is fed with.
        ends = (endings.after(PassState(output.cache, model.connection.roll(None, output.states_BTD))) for output in outputs)
        end = next(ends)
        if "soft" in scorings:
            yield "soft", endings.exactly(model, end, endings.plain_BT)
        if deepest >= 0:
            first_of_endings = plain_pass(model, endings.inputs, end.cache)
            if 0 in scorings:
                yield 0, first_of_endings.top_BTD
            pairs = pairwise(chain([end], ends))
            later = (Pass(before_BWD=previous.before_BWD, cache=own.cache) for previous, own in islice(pairs, deepest))
            passes = enumerate(parallel(model, endings.inputs, first_of_endings, later), start=1)
            yield from ((k, output.top_BTD) for k, output in passes if k in scorings)
    if "exact" in scorings:
        yield "exact", endings.exactly(model, endings.after(sequential(model, inputs)[0]))


@dataclass(frozen=True)
class _Endings:
    """The examples of all groups, each from where its group's common beginning ends.

    group_B     the group of each example
    inputs      padding at the right, which no position sees; documents where beginnings are padded
    plain_BT    the rest of an example's context, which Soft runs without feedback
    """

    group_B: Tensor
    inputs: Inputs
    plain_BT: Tensor

    @staticmethod
    def of(model: FeedbackModel, groups: Sequence[Group], beginnings: AlignedPrompts, lower: Any) -> _Endings:
        examples = [(number, group.shared, example) for number, group in enumerate(groups) for example in group.examples]
        tokens_BT = _padded_right(model, [example.inputs[shared:] for _, shared, example in examples])
        device = tokens_BT.device
        group_B = torch.tensor([number for number, _, _ in examples], device=device)
        layout = NOWHERE
        if beginnings.layout.documents_BT is not None:
            last_B = torch.tensor([len(example.inputs) - shared - 1 for _, shared, example in examples], device=device)
            steps_BT = torch.arange(tokens_BT.shape[1], device=device)[None].minimum(last_B[:, None])  # none beyond the context
            layout = Layout(beginnings.lengths_B[group_B][:, None] + steps_BT, torch.zeros_like(tokens_BT))
        inputs, _ = below(model, tokens_BT, layout, None if lower is None else lower.select(group_B))
        plain_BT = _before([example.start - shared for _, shared, example in examples], tokens_BT)
        return _Endings(group_B, inputs, plain_BT)

    def after(self, state: PassState) -> PassState:
        """The state that a pass left after the beginnings, for each example that continues from there."""
        return state.select(self.group_B)

    def exactly(self, model: FeedbackModel, state: PassState, plain_BT: Tensor | None = None) -> Tensor:
        """Top states position by position; the first positions without feedback (`plain_BT`) of all examples are one step."""
        lead = 0 if plain_BT is None else int(plain_BT.all(dim=0).long().cumprod(dim=0).sum())
        inputs = replace(self.inputs, layout=self.inputs.layout.with_plain(plain_BT))
        parts = []
        if lead:
            state, output = sequential(model, inputs[:lead], state, feeds_back=False)
            parts.append(output.top_BTD)
        if lead < inputs.length:
            parts.append(sequential(model, inputs[lead:], state)[1].top_BTD)
        return torch.cat(parts, dim=1)


def _padded_right(model: FeedbackModel, sequences: Sequence[Sequence[int]]) -> Tensor:
    """Ids [B, T], 0 in padding."""
    tensors = [torch.tensor(tokens, dtype=torch.long) for tokens in sequences]
    return pad_sequence(tensors, batch_first=True).to(model.trunk.device)


def _before(starts: Sequence[int], tokens_BT: Tensor) -> Tensor:
    """[B, T] True in the first `starts[b]` slots of sequence b."""
    device = tokens_BT.device
    return torch.arange(tokens_BT.shape[1], device=device)[None] < torch.tensor(starts, device=device)[:, None]
