"""`fullband chat`: a conversation in the terminal, in any mode, with turns answered again in another."""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fullband.cli.models import Device, Dtype, ModelFolder, open_model

if TYPE_CHECKING:
    from fullband.cli.conversation import Conversation, Turn
    from fullband.decode.modes import Mode

COMMANDS = {
    "/mode": "standard|soft|fused    the mode of the next turns",
    "/passes": "N|exact|converged      feedback passes over the conversation; switches to the mode fused",
    "/replay": "MODE                   answer the last turn again in this mode, with the same random numbers",
    "/reset": "                       forget the conversation",
    "/system": "TEXT                   the system message; without text: none",
    "/save": "FILE                   the conversation as JSON",
    "/help": "",
    "/exit": "                       or Ctrl-D; Ctrl-C cancels an answer",
}
EXAMPLES = """Examples:

\b
  fullband chat smollm2-fullband --mode soft
  fullband chat smollm2-fullband --mode fused --feedback-passes 2 --temperature 0
  printf 'Who are you?\\n/replay fused\\n' | fullband chat smollm2-fullband --json      a line of JSON for each answer

\b
In the conversation:
""" + "".join(f"  {name:9}{what}\n" for name, what in COMMANDS.items() if what)


class Leave(Exception):
    """/exit."""


def chat(
    model: ModelFolder,
    mode: Annotated[str, typer.Option(help="standard: no feedback. soft: plain conversation, fused answers. fused: both fused.")] = "soft",
    feedback_passes: Annotated[
        str | None, typer.Option(metavar="N|exact|converged", help="Feedback passes over the conversation in fused mode; default: 1.")
    ] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System message of the conversation.")] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Maximum number of new tokens in an answer; default: 256, or what still fits the context.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 takes the most likely token.")] = 0.7,
    top_p: Annotated[float, typer.Option(help="Sample from the most likely tokens whose probabilities add up to this.")] = 0.95,
    seed: Annotated[int, typer.Option(help="Random seed for sampling.")] = 0,
    device: Device = "auto",
    dtype: Dtype = "float32",
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON for each answer on stdout.")] = False,
) -> None:
    """Talk to a model.

    Answers appear as they are generated. The mode can be changed between turns, and a turn can be answered again in another mode.
    Each turn is a new prompt: the whole conversation is prefilled again in the current mode. Without a terminal, each line of standard
    input is a turn or a command.
    """
    from fullband.cli.completions import CHUNK
    from fullband.cli.console import messages
    from fullband.cli.conversation import Conversation
    from fullband.data.chat_template import load_chat_template
    from fullband.decode.options import GenerateOptions
    from fullband.feedback_config import parse_feedback_passes

    passes = None if feedback_passes is None else parse_feedback_passes(feedback_passes, "--feedback-passes")
    options = GenerateOptions(
        mode=mode, feedback_passes=passes, max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed, chunk=CHUNK
    )
    network, tokenizer, folder = open_model(model, device, dtype)
    template = load_chat_template(folder)
    conversation = Conversation(network, tokenizer, template, options, dtype, system)
    if not template.is_own:
        messages().print(f"{folder}: this model has no chat template; using ChatML", soft_wrap=True)
    if is_untrained(conversation):
        messages().print(f"{folder}: its fusion is not trained yet: soft and fused give the same text as standard", soft_wrap=True)
    interactive = sys.stdin.isatty() and not as_json
    if interactive:
        messages().print(f"{folder}, mode {mode}. /help lists the commands.", soft_wrap=True)
    session = Session(conversation, folder, interactive, as_json)
    try:
        for line in session.lines():
            session.take(line)
    except Leave:
        pass


def is_untrained(conversation: Conversation) -> bool:
    from fullband.feedback.mergers import Residual

    mergers = conversation.model.connection.mergers
    return all(isinstance(merger, Residual) and not bool(merger.state.weight.any()) for merger in mergers)


class Session:
    """Reads turns and commands, prints answers. In a terminal mistakes are told and the conversation goes on; elsewhere they end it."""

    def __init__(self, conversation: Conversation, folder: Path, interactive: bool, as_json: bool):
        self.conversation, self.folder, self.interactive, self.as_json = conversation, folder, interactive, as_json
        self.commands: dict[str, Callable[[str], None]] = {
            "/mode": self.set_mode,
            "/passes": self.set_passes,
            "/replay": self.replay,
            "/reset": self.reset,
            "/system": self.set_system,
            "/save": self.save,
            "/help": self.help,
            "/exit": self.leave,
        }

    def lines(self) -> Iterator[str]:
        """What the user types, until the end of the input."""
        if not self.interactive:
            yield from sys.stdin
            return
        import readline  # noqa: F401, RUF100  history and editing, where the platform has it

        while True:
            try:
                yield input(f"{self.conversation.options.resolved_mode.name}> ")
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print("\n(/exit or Ctrl-D ends the conversation)", file=sys.stderr)

    def take(self, line: str) -> None:
        """A turn, or a command. Raises ValueError and OSError where nobody is there to mend it."""
        text = line.strip()
        if not text:
            return
        try:
            if text.startswith("/") and not text.startswith("//"):
                self.run(text)
            else:
                self.show(self.conversation.say(text.removeprefix("/") if text.startswith("//") else text, self.stream))
        except (ValueError, OSError) as error:
            if not self.interactive:
                raise
            from fullband.cli.errors import explain

            print(f"error: {explain(error)}", file=sys.stderr)

    def run(self, text: str) -> None:
        name, _, argument = text.partition(" ")
        if name not in self.commands:
            nearest = difflib.get_close_matches(name, self.commands, n=1, cutoff=0.0)[0]
            raise ValueError(f"{name}: no such command; did you mean {nearest}? (a turn that begins with / is written with //)")
        self.commands[name](argument.strip())

    def stream(self, piece: str) -> None:
        if not self.as_json:
            print(piece, end="", flush=True)

    def show(self, turn: Turn) -> None:
        if self.as_json:
            print(json.dumps(turn.to_json(len(self.conversation.turns)), ensure_ascii=False), flush=True)
            return
        print(flush=True)
        if turn.finish_reason != "stop":
            why = {"length": "the answer reached the maximum length", "cancelled": "cancelled"}[turn.finish_reason]
            self.note(f"({why})")

    def note(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def set_mode(self, argument: str) -> None:
        self.use(self.mode_of(argument))

    def set_passes(self, argument: str) -> None:
        from fullband.decode.modes import resolve_mode
        from fullband.feedback_config import parse_feedback_passes

        self.use(resolve_mode("fused", parse_feedback_passes(argument, "/passes")))

    def use(self, mode: Mode) -> None:
        self.conversation.options = self.conversation.options.in_mode(mode)
        self.note(f"mode {mode.name}" + (f", {mode.feedback_passes} feedback passes" if mode.name == "fused" else ""))

    def mode_of(self, name: str) -> Mode:
        """fused keeps the passes that were set."""
        from fullband.decode.modes import resolve_mode

        current = self.conversation.options.resolved_mode
        return current if name == "fused" == current.name else resolve_mode(name)

    def replay(self, argument: str) -> None:
        mode = self.mode_of(argument) if argument else self.conversation.options.resolved_mode
        self.show(self.conversation.replay(mode, self.stream))

    def reset(self, argument: str) -> None:
        self.conversation.reset()
        self.note("the conversation was cleared")

    def set_system(self, argument: str) -> None:
        self.conversation.system = argument or None
        self.note("system message set" if argument else "no system message")

    def save(self, argument: str) -> None:
        from fullband.files import write_json

        if not argument:
            raise ValueError("/save needs the name of a file")
        try:
            write_json(Path(argument), {"model": str(self.folder)} | self.conversation.to_json())
        except OSError as error:
            raise ValueError(f"{argument}: cannot be written ({error.strerror})") from None
        self.note(f"{argument}: written")

    def help(self, argument: str) -> None:
        for name, what in COMMANDS.items():
            if what:
                self.note(f"{name:9}{what}")

    def leave(self, argument: str) -> None:
        raise Leave
