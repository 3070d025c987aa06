"""`fullband probe`: what a linear classifier finds in the residual stream at every depth (Fig. 7, App. F)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fullband.cli.models import AsJson, Device, Dtype, ModelFolder, open_model

if TYPE_CHECKING:
    from fullband.probe.result import DepthResult, PrefillResult, ProbeResult, SettingResult

EXAMPLES = """Examples:

\b
  fullband train recipes/probe/program-text.yaml
  fullband probe runs/program-text --output results/probe           everything, with figures
  fullband probe runs/program-text --tasks completion --groups 16   a quick look at a part
  fullband probe runs/program-text --prefill standard,1 --json
"""


def probe(
    model: ModelFolder,
    tasks: Annotated[
        str, typer.Option(metavar="NAME,…", help="Tasks to probe: completion, memory, registers; default: all.")
    ] = "completion,memory,registers",
    prefill: Annotated[
        str,
        typer.Option(
            metavar="WAY,…",
            help="Ways of prefilling: standard; 1, 2 or 4 (that many final tokens recurrent); full (every token recurrent).",
        ),
    ] = "standard,1,2,4,full",
    groups: Annotated[
        int | None, typer.Option(min=4, help="Maximum number of groups of examples in each setting; default: all of App. F's.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Random seed for examples, folds and shuffled labels.")] = 0,
    output: Annotated[Path | None, typer.Option(metavar="DIR", help="Write results.json and figures (PNG, SVG) to this folder.")] = None,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens in a batch; lower it if memory is short.")] = 32768,
    device: Device = "auto",
    dtype: Dtype = "float32",
    as_json: AsJson = False,
) -> None:
    """Probe what each depth of a model knows.

    Linear classifiers on the residual stream at the last token, for standard and recurrent prefill, tested on groups of examples
    they were not fitted to; with shuffled labels and unprocessed inputs as controls. Since what can be decoded need not be used, the
    stream is also swapped between examples to see whether the model's answer follows.
    """
    from fullband.cli.console import messages, print_json
    from fullband.cli.console import output as stdout
    from fullband.cli.progress import forward_progress
    from fullband.files import check_place
    from fullband.probe.probing import plan_probe, run_probe

    if output is not None:
        check_place(output)
    network, tokenizer, folder = open_model(model, device, dtype)
    plan = plan_probe(network, tokenizer, _names(tasks), _names(prefill), seed, groups)  # type: ignore[arg-type]
    about = {"model": str(folder), "tokenizer": tokenizer.name, "dtype": dtype, "groups": groups}
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)

    def keep(result: ProbeResult) -> None:
        """What is finished is on disk, should the rest be interrupted."""
        if output is not None:
            save(output, about | result.to_json())

    with forward_progress(messages(), network, plan.positions, "computing states and probing"):
        result = run_probe(network, plan, batch_tokens, keep)
    if output is not None:
        from fullband.plots.probe import plot_probe

        plot_probe(result.to_json(), output)
    if as_json:
        print_json(about | result.to_json())
    else:
        print_result(stdout(), result)


def save(folder: Path, result: dict[str, Any]) -> None:
    from fullband.files import write_json

    write_json(folder / "results.json", result)


def _names(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def prefill_label(name: str) -> str:
    return {"standard": "standard", "full": "full", "1": "1 step"}.get(name, f"{name} steps")


def print_result(console: Any, result: ProbeResult) -> None:
    for setting in result.settings:
        if setting.task != "registers":
            print_depths(console, setting)
            print_delays(console, setting)
    registers = [setting for setting in result.settings if setting.task == "registers"]
    if registers:
        print_registers(console, registers, result.depths)
    print_causal(console, result.settings)
    notes = dict.fromkeys(f"{setting.setting}: {note}" for setting in result.settings for note in setting.notes)
    console.print("\n".join(notes) or "Token counts are those of App. F: nothing was adjusted to this tokenizer.")


def print_depths(console: Any, setting: SettingResult) -> None:
    from fullband.cli.tables import print_table, table

    made = table(["depth", *(prefill_label(found.prefill) for found in setting.prefills)])
    for depth, row in enumerate(zip(*(found.depths for found in setting.prefills), strict=True)):
        made.add_row(f"{depth} (input)" if depth == 0 else str(depth), *map(accuracy, row))
    made.add_section()
    made.add_row("shuffled labels", *(extremes(found) for found in setting.prefills))
    made.add_row("embedding only", *(f"{found.embedding_only:.3f}" for found in setting.prefills))
    made.add_row("model's answers", *(f"{found.answered:.3f}" for found in setting.prefills))
    print_table(
        console,
        f"{setting.setting}: accuracy of a linear probe at the last token, {setting.examples:,} examples in {setting.groups} groups",
        made,
        "± standard error over four folds of whole groups; chance is 0.5. Shuffled labels: least and most over depths.",
    )


def print_delays(console: Any, setting: SettingResult) -> None:
    from fullband.cli.tables import print_table, table

    made = table(["null updates", "tokens", *(prefill_label(found.prefill) for found in setting.prefills)])
    for updates, tokens in setting.lengths.items():
        made.add_row(str(updates), str(tokens), *(f"{found.depths[0].by_updates[updates]:.3f}" for found in setting.prefills))
    print_table(console, f"{setting.setting}: accuracy at depth 0 by delay", made)


def print_registers(console: Any, settings: Sequence[SettingResult], depths: int) -> None:
    from fullband.cli.tables import print_table, table

    names = [found.prefill for found in settings[0].prefills]
    made = table(["registers", "writes each", "tokens", "examples", "depth", *map(prefill_label, names)], words=0)
    for setting in settings:
        for depth in range(depths):
            shape = (setting.registers, setting.writes_each, max(setting.lengths.values()), f"{setting.examples:,}")
            shown = [str(part) if depth == 0 else "" for part in shape]
            made.add_row(*shown, str(depth), *(accuracy(found.depths[depth]) for found in setting.prefills))
        made.add_row("", "", "", "", "model", *(f"{found.answered:.3f}" for found in setting.prefills))
        made.add_section()
    print_table(
        console,
        "registers, latest write: accuracy of a linear probe at the last token",
        made,
        "± standard error over four folds of whole groups; chance is 0.5. model: the model's own answers.",
    )


def print_causal(console: Any, settings: Sequence[SettingResult]) -> None:
    from fullband.cli.tables import print_table, table

    names = [found.prefill for found in settings[0].prefills]
    made = table(["setting", "depth", *map(prefill_label, names)])
    for setting in settings:
        for depth in range(len(setting.prefills[0].depths)):
            moved = [share(found.depths[depth].moved) for found in setting.prefills]
            made.add_row(setting.setting if depth == 0 else "", str(depth), *moved)
        made.add_section()
    print_table(
        console,
        "Is it used? Share of answers that follow when the residual stream at the last token is swapped with a partner's",
        made,
        "Over pairs of examples with different answers. At depth 0 of a recurrent prefill the carried top states are swapped.",
    )


def accuracy(found: DepthResult) -> str:
    return f"{found.accuracy:.3f} ± {found.stderr:.3f}"


def extremes(found: PrefillResult) -> str:
    values = [depth.shuffled_labels for depth in found.depths]
    return f"{min(values):.3f} to {max(values):.3f}"


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
