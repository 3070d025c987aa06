"""The three modes side by side in the terminal, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from fullband.cli.tables import print_table, table
from fullband.decode.compare_modes import MODES, ModeComparison
from fullband.decode.texts import TextCompletion

if TYPE_CHECKING:
    from fullband.decode.modes import ModeName

NARROW = 90  # columns below which the answers stand one under the other
ENDED = {"stop": "complete", "length": "cut off at the limit", "cancelled": "cancelled"}
MARK = "bold reverse"
UNSEEN = {code: "\ufffd" for code in [*range(9), *range(11, 32), 127]}  # control characters would act on a terminal


def to_json(found: ModeComparison, ids: Sequence[int | str], model: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Everything, as plain data."""
    return {
        "model": model,
        "settings": settings,
        "modes": found.summary(),
        "prompts": [
            {
                "id": ids[number],
                "prompt": prompt,
                "prompt_tokens": found.prompt_tokens[number],
                "answers": {
                    mode: {
                        "text": answers.answers[number].text,
                        "tokens": answers.answers[number].tokens,
                        "finish_reason": answers.answers[number].finish_reason,
                        "first_difference": found.first_difference(number, mode),
                    }
                    for mode, answers in found.by_mode.items()
                },
            }
            for number, prompt in enumerate(found.prompts)
        ],
    }


def print_comparison(console: Console, found: ModeComparison, described: dict[str, Any], listed: bool) -> None:
    """One prompt: its answers, side by side. More of them (`listed`): a line for each. Then what the modes took."""
    if listed:
        print_prompts(console, described)
    else:
        print_answers(console, found)
    print_modes(console, described)


def print_answers(console: Console, found: ModeComparison) -> None:
    columns = []
    for mode in found.by_mode:
        answer = found.by_mode[mode].answers[0]
        place = found.parting(0) if mode == "standard" else found.first_difference(0, mode)
        columns.append((mode, marked(answer, place)))
    if console.width < NARROW:
        for mode, text in columns:
            console.print(Group(Text(mode, style="bold underline"), text, Text()))
        return
    side_by_side = Table(box=box.SIMPLE_HEAD, expand=True)
    for mode, _ in columns:
        side_by_side.add_column(mode, ratio=1, overflow="fold")
    side_by_side.add_row(*(text for _, text in columns))
    console.print(side_by_side)


def split_at(answer: TextCompletion, place: int | None) -> tuple[str, str | None, str]:
    """(text before token `place`, its own characters, text after). None, "" = all equal; "" is also an answer that has ended there.

    A token without a whole character of its own stands for the one it begins.
    """
    if place is None:
        return answer.text, None, ""
    end = place + 1
    while end < len(answer.tokens) and not answer.pieces[end - 1]:
        end += 1
    return "".join(answer.pieces[:place]), "".join(answer.pieces[place:end]), "".join(answer.pieces[end:])


def marked(answer: TextCompletion, place: int | None) -> Text:
    """The answer with token `place` between » and «: the mark survives where there are no colours."""
    before, token, after = (part if part is None else part.translate(UNSEEN) for part in split_at(answer, place))
    text = Text(before or "")
    if token is not None:
        shown = token.replace("\n", "\\n").replace("\t", "\\t") or "end of text"
        text.append(f"»{shown}«", style=MARK)
        text.append(("\n" if token.endswith("\n") else "") + (after or ""))
    return text


def print_prompts(console: Console, described: dict[str, Any]) -> None:
    made = Table(box=box.SIMPLE_HEAD)
    made.add_column("id", overflow="fold", max_width=24)
    made.add_column("prompt", no_wrap=True, overflow="ellipsis", max_width=48)
    for heading in (*MODES, "soft differs at", "fused differs at"):
        made.add_column(heading, justify="right")
    for prompt in described["prompts"]:
        answers = prompt["answers"]
        made.add_row(
            str(prompt["id"]),
            " ".join(prompt["prompt"].translate(UNSEEN).split()),
            *(f"{len(answers[mode]['tokens'])}{'' if answers[mode]['finish_reason'] == 'stop' else '+'}" for mode in MODES),
            *(part(answers[mode]["first_difference"]) for mode in MODES[1:]),
        )
    print_table(
        console,
        f"Length of {len(described['prompts'])} answers in tokens, and the first token (from 0) that differs from standard",
        made,
        "+ cut off at the token limit.",
    )


def print_modes(console: Console, described: dict[str, Any]) -> None:
    headings, rows = mode_table(described, several=len(described["prompts"]) > 1)
    made = table(["mode", *headings])
    for mode, cells in rows:
        made.add_row(mode, *cells)
    print_table(console, "Length and time by mode", made, compute_note(described))


def mode_table(described: dict[str, Any], several: bool) -> tuple[list[str], list[tuple[ModeName, list[str]]]]:
    """(headings, the cells of each mode): how long its answers are, where they differ from Standard's, what they took; medians and shares
    where there are several."""
    headings = ["feedback passes", f"{'median ' * several}tokens", "complete" if several else "ended"]
    headings += ["same text", "differs at", "first token", "each token", "total"]
    rows = []
    for mode, row in described["modes"].items():
        ended = f"{row['ended_by_themselves']:.0%}" if several else ENDED[described["prompts"][0]["answers"][mode]["finish_reason"]]
        same = f"{row['identical_texts']:.0%}" if several else "yes" if row["identical_texts"] else "no"
        differing = ["", ""] if mode == "standard" else [same, part(row["first_difference_median"])]
        each = "-" if row["seconds_per_step"] is None else seconds(row["seconds_per_step"])
        took = [seconds(row["first_token_seconds"]), each, seconds(row["seconds"])]
        rows.append((mode, [str(row["feedback_passes"]), f"{row['tokens_median']:g}", ended, *differing, *took]))
    return headings, rows


def compute_note(described: dict[str, Any]) -> str:
    """Where the compute of the modes differs: the comparison is not at equal compute, and must say so."""
    modes = described["modes"]
    passes, plain = modes["fused"]["feedback_passes"], modes["standard"]["positions_read"]
    if passes == "exact":
        reads = "computes the prompt one position at a time, the others in one parallel pass"
    elif passes == "converged":
        reads = "repeats passes over the prompt until its states settle, the others take one pass"
    else:
        more = "one feedback pass" if passes == 1 else f"{passes} feedback passes"
        reads = f"takes {more} over the prompt ({modes['fused']['positions_read']:,} positions computed, by the others {plain:,})"
    return (
        f"The modes do not cost the same: fused {reads}; soft and fused also compute the fusion at every new token. "
        '"Differs at" is the first token, counted from 0, that differs from standard.'
    )


def part(place: float | None) -> str:
    return "-" if place is None else f"{place:g}"


def seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.3g} ms"
