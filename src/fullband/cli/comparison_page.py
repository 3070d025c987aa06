"""The comparison as one page that opens offline: paired traces, as in Fig. 8 and App. G. The page itself is comparison_page.html."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

from fullband.cli.comparison import ENDED, UNSEEN, compute_note, mode_table, split_at
from fullband.decode.compare_modes import MODES, ModeComparison
from fullband.decode.modes import ModeName
from fullband.plots.page import fill

TEMPLATE = Path(__file__).with_name("comparison_page.html")
TITLES: dict[ModeName, str] = {"standard": "Standard", "soft": "Soft", "fused": "Fused"}


def page(found: ModeComparison, described: dict[str, Any]) -> str:
    """The page of a comparison; `described` is its `comparison.to_json`."""
    count, modes = len(found.prompts), described["modes"]
    return fill(
        TEMPLATE,
        headline=headline(described),
        prompts="prompt" if count == 1 else f"{count} prompts",
        numbers="".join(
            f'<li class="{colour(mode, modes)}"><b>{modes[mode]["tokens_median"]:g}</b><span>{TITLES[mode]}</span></li>' for mode in MODES
        ),
        lengths=lengths(described),
        modes=modes_table(described),
        batches="one prompt alone" if count == 1 else "over all prompts",
        compute=escape(compute_note(described)),
        index=index_table(described),
        traces="\n".join(traces(found, described, number) for number in range(count)),
        settings=escape(json.dumps({"model": described["model"], **described["settings"]}, indent=2, ensure_ascii=False)),
    )


def colour(mode: ModeName, modes: dict[str, Any]) -> str:
    """The class of the colour in which all pictures show this mode."""
    if mode == "fused":
        return "exact" if isinstance(modes[mode]["feedback_passes"], str) else "fused-8"
    return "standard" if mode == "standard" else "fused-1"


def headline(described: dict[str, Any]) -> str:
    modes = described["modes"]
    if len(described["prompts"]) == 1:
        parted = [TITLES[mode] for mode in MODES[1:] if modes[mode]["identical_texts"] < 1]
        return f"{' and '.join(parted)} differ{'s' * (len(parted) == 1)} from Standard" if parted else "Three modes, one answer"
    shares = {mode: modes[mode]["identical_texts"] for mode in MODES[1:]}
    return "Same as Standard: " + ", ".join(f"{share:.0%} of answers in {TITLES[mode]}" for mode, share in shares.items())


def lengths(described: dict[str, Any]) -> str:
    """How far the medians can be trusted: answers that were cut are as long as the limit, not as long as they would be."""
    cut = {mode: 1 - described["modes"][mode]["ended_by_themselves"] for mode in MODES}
    if not any(cut.values()):
        return "Every answer is complete."
    shares = ", ".join(f"{share:.0%} in {TITLES[mode]}" for mode, share in cut.items())
    return f"Cut off at the token limit: {shares}; those answers would have been longer."


def modes_table(described: dict[str, Any]) -> str:
    headings, rows = mode_table(described, several=True)
    head = "".join(f"<th>{heading}</th>" for heading in ("", *headings))
    body = "".join(f"<tr><th>{TITLES[mode]}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>" for mode, cells in rows)
    return f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"


def index_table(described: dict[str, Any]) -> str:
    """A line a prompt: tokens by mode as numbers and bars."""
    prompts, modes = described["prompts"], described["modes"]
    longest = max(1, *(len(answer["tokens"]) for prompt in prompts for answer in prompt["answers"].values()))
    rows = []
    for number, prompt in enumerate(prompts):
        cells = []
        for mode in MODES:
            answer = prompt["answers"][mode]
            tokens, more = len(answer["tokens"]), "" if answer["finish_reason"] == "stop" else "+"
            cells.append(f'<td class="{colour(mode, modes)}">{tokens}{more}<i class="bar" style="width:{tokens / longest:.0%}"></i></td>')
        start = visible(" ".join(prompt["prompt"].split())[:80])
        rows.append(f'<tr><th><a href="#prompt-{number}">{visible(str(prompt["id"]))} <small>{start}</small></a></th>{"".join(cells)}</tr>')
    headings = "".join(f"<th>{TITLES[mode]}</th>" for mode in MODES)
    return f"<thead><tr><th>prompt</th>{headings}</tr></thead><tbody>{''.join(rows)}</tbody>"


def traces(found: ModeComparison, described: dict[str, Any], number: int) -> str:
    prompt = described["prompts"][number]
    panels = []
    for mode in found.by_mode:
        answer, difference = found.by_mode[mode].answers[number], prompt["answers"][mode]["first_difference"]
        place = found.parting(number) if mode == "standard" else difference
        if mode == "standard":
            where = ""
        elif difference is None:
            where = ", same as Standard"
        else:
            where = f", differs from token {difference} on"
        panels.append(
            f'<section class="trace {colour(mode, described["modes"])}"><h3>{TITLES[mode]}</h3>'
            f'<p class="small">{len(answer.tokens)} tokens, {ENDED[answer.finish_reason]}{where}</p>'
            f'<p class="text">{text(*split_at(answer, place))}</p></section>'
        )
    return (
        f'<h2 id="prompt-{number}">{heading(prompt["id"])}</h2>\n<pre class="prompt">{visible(prompt["prompt"])}</pre>\n'
        f'<div class="traces">{"".join(panels)}</div>'
    )


def heading(identity: int | str) -> str:
    return f"Prompt {identity}" if isinstance(identity, int) else visible(identity)


def text(before: str, token: str | None, after: str) -> str:
    """What the answers share in a soft tone, then the token at which they part, then the rest."""
    if token is None:
        return visible(before)
    shown = visible(token.replace("\n", "↵").replace("\t", "⇥")) or "<small>end of text</small>"
    rest = ("\n" if token.endswith("\n") else "") + after
    return f'<span class="same">{visible(before)}</span><mark>{shown}</mark>{visible(rest)}'


def visible(raw: str) -> str:
    return escape(raw.translate(UNSEEN))
