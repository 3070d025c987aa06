"""The program in a chat answer: its fenced blocks, and the draft among them that counts."""

from __future__ import annotations

import ast
import re
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

_PYTHON = re.compile(r"\{?\.?i?py(?:thon)?3?(?![a-z])")  # python, py3, {.python}, ipython, python:area.py
_MOST_CUTS = 5  # of prose after code that stands in no block
_FENCE = re.compile(r"(?P<lead>[ \t>]*(?:(?:[-*+]|\d{1,9}[.)])[ \t]+)?)(?P<fence>`{3,}|~{3,})[ \t]*(?P<info>[^`\n]*)$")
_AFTER_TEXT = re.compile(r"\S.{0,200}?(?P<lead>)(?P<fence>`{3,})[ \t]*(?P<info>(?i:python|py)3?)$")  # Answer: ```python
_MAKERS = {
    "tuple", "list", "dict", "set", "frozenset", "range", "int", "float", "str", "len", "sorted", "zip", "enumerate", "defaultdict",
    "Counter", "deque", "namedtuple", "re", "math", "string", "collections", "itertools",
}  # fmt: skip
_TRIPLE = re.compile(r'"""|' + "'''")
_FIRST_LINE = re.compile(r"(?:(?:async\s+)?def|class)\s+\w+\s*[(:]|import\s+\w|from\s+[\w.]+\s+import\b|@\w|\w+ ?= ?\S")
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
    """The Python of a chat answer, thoughts aside: the last block that defines `entry_point` and gives it a body, whatever its mark.
    Without one (a body only, or no name known), the first block marked as Python, else the first unmarked one, else the answer's code.

    Names which that block uses and does not define come from the other blocks (imports, helpers, constants). An unfinished block counts.
    """
    answer = after_thinking(answer)
    blocks = fenced_blocks(answer)
    found = [block for block in blocks if not block.language or _PYTHON.match(block.language) or _is_python(block.code, entry_point)]
    everything = [block.code for block in found]
    if not everything:
        return answer if blocks or entry_point is None else _outside_of_prose(answer, entry_point)
    drafts = [i for i, code in enumerate(everything) if _drafts(entry_point, code)]
    whole = [i for i in drafts if not _is_signature(everything[i], entry_point)]
    marked = [i for i, block in enumerate(found) if block.language]
    chosen = whole[-1] if whole else drafts[-1] if drafts else marked[0] if marked else 0
    numbered = [*enumerate(everything)]
    others = [*reversed(numbered[:chosen]), *numbered[chosen + 1 :]]
    code = everything[chosen] if drafts else _as_body(everything[chosen])
    return _with_missing_names(code, others, entry_point)


def _drafts(entry_point: str | None, code: str) -> bool:
    return entry_point is not None and defines(entry_point, code)


def _is_python(code: str, entry_point: str | None) -> bool:
    """Python under another mark, such as `text`."""
    return _drafts(entry_point, code) and parsed(code) is not None


def _is_signature(code: str, entry_point: str | None) -> bool:
    """Does this code only say how the function is called, with no body, a docstring or `...`?"""
    tree = parsed(code) or parsed(code.rstrip() + " ...\n")
    found = [s for s in tree.body if isinstance(s, ast.FunctionDef) and s.name == entry_point] if tree else []
    return bool(found) and all(
        isinstance(s, ast.Pass) or (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant)) for s in found[-1].body
    )


def _as_body(code: str) -> str:
    """Lines that return something and stand in no function, indented as the body of one."""
    tree = parsed(textwrap.dedent(code))
    if tree is None or re.match(r"(?:[ \t]*\n)* {4}\S", code) or not any(isinstance(node, ast.Return) for node in _outside_functions(tree)):
        return code
    return textwrap.indent(textwrap.dedent(code), "    ")


def _outside_functions(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield node
            yield from _outside_functions(node)


def _outside_of_prose(answer: str, entry_point: str) -> str:
    """The code of an answer without fences, if it defines the function: from its first line of code to where it no longer is one."""
    lines = [line for line in answer.splitlines(keepends=True) if not re.fullmatch(r"\[/?[A-Z]+\]\s*", line)]  # [PYTHON], [DONE]
    answer = "".join(lines)
    if not defines(entry_point, answer) or parsed(answer) is not None:
        return answer
    start, end = next((at for at, line in enumerate(lines) if _FIRST_LINE.match(line)), 0), len(lines)
    for _ in range(_MOST_CUTS):
        code = "".join(lines[start:end])
        if not defines(entry_point, code):
            break
        found = _parsed_or_error(code)
        if isinstance(found, ast.Module):
            return code
        end = start + found
    return answer


def fenced_blocks(answer: str) -> list[Block]:
    """Fenced blocks in their order, by CommonMark's rules, with more that models need: a fence inside a triple-quoted string is text; one
    may open after text, if it is marked as Python, and close after the last line of code; and text before a lone closing fence is a
    block if it looks like code."""
    lines = answer.splitlines(keepends=True)
    blocks: list[Block] = []
    at = 0
    while at < len(lines):
        opening = _FENCE.match(lines[at].rstrip()) or _AFTER_TEXT.match(lines[at].rstrip())
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
    """The code from line `start` to the fence that closes it, and the line after that. A string that never ends hides no fence."""
    quote: str | None = None
    first: tuple[int, str, int] | None = None  # the first end, inside a string: line, what stands before the fence, next line
    for number in range(start, len(lines)):
        text = lines[number].rstrip()
        found = _FENCE.match(text)
        closes = found is not None and found["fence"][0] == fence[0] and len(found["fence"]) >= len(fence)
        if found is not None and closes:
            end = (number, "", number if found["info"] else number + 1)  # one with a language opens the next: this one was left open
        elif text.endswith(fence) and fence not in text.removesuffix(fence) and not text.endswith(fence + fence[0]):
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
    """None for what is no Python."""
    found = _parsed_or_error(code)
    return found if isinstance(found, ast.Module) else None


def _parsed_or_error(code: str) -> ast.Module | int:
    """The code as Python, or the line, counted from 0, at which it stops being that."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(code)
    except SyntaxError as error:
        return min((error.lineno or 1) - 1, len(code.splitlines()) - 1)
    except (ValueError, RecursionError, MemoryError):
        return 0


def bound_names(statement: ast.stmt) -> set[str]:
    """Names that an import, a function, a class or an assignment gives; nothing for other statements."""
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name.partition(".")[0] for alias in statement.names}
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {statement.name}
    if isinstance(statement, ast.Assign):
        targets = [part for target in statement.targets for part in (target.elts if isinstance(target, ast.Tuple | ast.List) else [target])]
        return {target.id for target in targets if isinstance(target, ast.Name)}
    if isinstance(statement, ast.AnnAssign) and statement.value is not None and isinstance(statement.target, ast.Name):
        return {statement.target.id}
    return set()


def used_names(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _with_missing_names(code: str, others: list[tuple[int, str]], entry_point: str | None) -> str:
    """The code after those statements of other (numbered) blocks, nearest first, that define what it uses and lacks."""
    tree = parsed(code)
    if tree is None or not others:
        return code
    have = {name for statement in tree.body for name in bound_names(statement)} | {entry_point or ""}
    giver: dict[str, tuple[int, int, ast.stmt]] = {}
    for number, other in others:
        for place, statement in reversed([*enumerate(found.body if (found := parsed(other)) else [])]):
            if _is_harmless(statement):
                giver |= {name: (number, place, statement) for name in bound_names(statement) if name not in giver}
    before: list[tuple[int, int, ast.stmt]] = []
    missing = (used_names(tree) | {"*"}) - have  # a star import may bring any name
    while missing:
        name = missing.pop()
        if name in giver and not bound_names(giver[name][2]) & have:
            before.append(giver[name])
            have |= bound_names(giver[name][2])
            missing = (missing | used_names(giver[name][2])) - have
    before.sort(key=lambda one: one[:2])  # as they were written
    return "\n".join([*(ast.unparse(statement) for _, _, statement in before), code]) if before else code


def _is_harmless(statement: ast.stmt) -> bool:
    """Definitions and constants: an example that calls the function is none, tuple([1, 2]) and re.compile("a") are."""
    if not isinstance(statement, ast.Assign | ast.AnnAssign):
        return True
    calls = [node.func for node in ast.walk(statement.value or statement) if isinstance(node, ast.Call)]
    return all(ast.unparse(call).partition(".")[0] in _MAKERS for call in calls)
