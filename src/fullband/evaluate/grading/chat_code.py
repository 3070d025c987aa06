"""The program in a chat answer: its fenced blocks, and the draft among them that counts."""

from __future__ import annotations

import ast
import re
import warnings
from dataclasses import dataclass

_PYTHON = {"python", "py", "python3", "py3", "{.python}"}
_FENCE = re.compile(r"(?P<lead>[ \t>]*(?:(?:[-*+]|\d{1,9}[.)])[ \t]+)?)(?P<fence>`{3,}|~{3,})[ \t]*(?P<info>[^`\n]*)$")
_BEHIND_TEXT = re.compile(r"\S.{0,200}?(?P<lead>)(?P<fence>`{3,})[ \t]*(?P<info>(?i:python|py)3?)$")  # Answer: ```python
_TRIPLE = re.compile(r'"""|' + "'''")
_STARTS_CODE = re.compile(r"\s*(?:(?:async\s+)?def|class|import|from|return|@\w)\b|[ \t]+\S")


@dataclass(frozen=True)
class Block:
    """A fenced block: its first word of information (lower case; "" without), and its lines without the indentation of its fence."""

    language: str
    code: str


def after_thinking(answer: str) -> str:
    """What a model says after it has thought: the text after its last `</think>`. All of it without one, or with nothing after it."""
    parts = re.split(r"</think(?:ing)?>", answer)
    return parts[-1] if parts[-1].strip() else answer


def defines(name: str, code: str) -> bool:
    """Does this code define the name at its top level?"""
    return (
        re.search(rf"^(?:(?:async[ \t]+)?def|class)[ \t]+{re.escape(name)}\b|^{re.escape(name)}[ \t]*=[^=]", code, re.MULTILINE) is not None
    )


def fenced_code(answer: str, entry_point: str | None = None) -> str:
    """The Python of a chat answer, thoughts aside: the last block that defines `entry_point`. Without one (a body only, or no name known),
    the first block marked as Python, else the first unmarked one, else all of the answer.

    Names which that block uses and does not define come from the other blocks (imports, helpers, constants). An unfinished block counts.
    """
    answer = after_thinking(answer)
    found = [block for block in fenced_blocks(answer) if not block.language or block.language in _PYTHON]
    everything = [block.code for block in found]
    if not everything:
        return answer
    drafts = [i for i, code in enumerate(everything) if entry_point and defines(entry_point, code)]
    marked = [i for i, block in enumerate(found) if block.language]
    chosen = drafts[-1] if drafts else marked[0] if marked else 0
    others = [*reversed(everything[:chosen]), *everything[chosen + 1 :]]
    return _with_missing_names(everything[chosen], others, entry_point)


def fenced_blocks(answer: str) -> list[Block]:
    """Fenced blocks in their order, by CommonMark's rules, with more that models need: a fence inside a triple-quoted string is text; one
    may open after text, if it is marked as Python, and close after the last line of code; and text before a lone closing fence is a
    block if it looks like code."""
    lines = answer.splitlines(keepends=True)
    blocks: list[Block] = []
    at = 0
    while at < len(lines):
        opening = _FENCE.match(lines[at].rstrip()) or _BEHIND_TEXT.match(lines[at].rstrip())
        if opening is None:
            at += 1
            continue
        if not blocks and not opening["info"] and (head := "".join(lines[:at])).strip() and _STARTS_CODE.match(head):
            blocks.append(Block("python", head))  # the prompt, or nobody, opened it
            at += 1
            continue
        code, at = _block(lines, at + 1, opening["fence"], len(opening["lead"].expandtabs(4)))
        words = opening["info"].split()
        blocks.append(Block(words[0].lower().rstrip(",:") if words else "", code))
    return blocks


def _block(lines: list[str], start: int, fence: str, indentation: int) -> tuple[str, int]:
    """The code from line `start` to the fence that closes it, and the line behind that. A string that never ends hides no fence."""
    quote: str | None = None
    first: tuple[int, str, int] | None = None  # the first end, inside a string: line, what stands before the fence, next line
    for number in range(start, len(lines)):
        text = lines[number].rstrip()
        found = _FENCE.match(text)
        closes = found is not None and found["fence"][0] == fence[0] and len(found["fence"]) >= len(fence)
        if found is not None and closes:
            end = (number, "", number if found["info"] else number + 1)  # one with a language opens the next: this one was left open
        elif text.endswith(fence) and not text.endswith(fence + fence[0]):
            end = (number, text.removesuffix(fence) + "\n", number + 1)
        else:
            quote = _open_string(text, quote)
            continue
        if (quote if not end[1] else _open_string(end[1], quote)) is None:
            return _dedented([*lines[start:number], end[1]], indentation), end[2]
        first = first or end
        quote = _open_string(text, quote)
    if first is not None:
        return _dedented([*lines[start : first[0]], first[1]], indentation), first[2]
    return _dedented(lines[start:], indentation), len(lines)


def _open_string(line: str, quote: str | None) -> str | None:
    """The triple quote that is open after a line, given the one open before it."""
    for mark in _TRIPLE.findall(line):
        quote = mark if quote is None else None if mark == quote else quote
    return quote


def _dedented(lines: list[str], indentation: int) -> str:
    """Lines without as much white space (and quotation marks of a quoted block) as stood before the fence."""
    return "".join(line[min(indentation, len(line) - len(line.lstrip(" \t>"))) :] if indentation else line for line in lines)


def parsed(code: str) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def bound_names(statement: ast.stmt) -> set[str]:
    """Names that an import, a function, a class or an assignment gives; nothing for other statements."""
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name.partition(".")[0] for alias in statement.names}
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {statement.name}
    if isinstance(statement, ast.Assign):
        return {target.id for target in statement.targets if isinstance(target, ast.Name)}
    return set()


def used_names(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _with_missing_names(code: str, others: list[str], entry_point: str | None) -> str:
    """The code behind those statements of other blocks, nearest first, that define what it uses and lacks."""
    tree = parsed(code)
    if tree is None or not others:
        return code
    have = {name for statement in tree.body for name in bound_names(statement)} | {entry_point or ""}
    giver: dict[str, ast.stmt] = {}
    for other in others:
        for statement in reversed(found.body if (found := parsed(other)) else []):
            if _is_harmless(statement):
                giver |= {name: statement for name in bound_names(statement) if name not in giver}
    before: list[str] = []
    missing = (used_names(tree) | {"*"}) - have  # a star import may bring any name
    while missing:
        name = missing.pop()
        if name in giver and not bound_names(giver[name]) & have:
            before.append(ast.unparse(giver[name]))
            have |= bound_names(giver[name])
            missing = (missing | used_names(giver[name])) - have
    before.reverse()  # what a helper needs stands before it
    return "\n".join([*before, code]) if before else code


def _is_harmless(statement: ast.stmt) -> bool:
    """Definitions and constants: an example that calls the function is none."""
    return not isinstance(statement, ast.Assign) or not any(isinstance(node, ast.Call) for node in ast.walk(statement.value))
