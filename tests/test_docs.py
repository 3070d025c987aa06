"""The paper map names files and names that exist."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
ENTRY = re.compile(r"`((?:fullband|tests)/[\w/]+\.py)(?:: (\w+))?`((?:, `\w+`)*)")


def names_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    defined = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    assigned = {t.id for node in tree.body if isinstance(node, ast.Assign) for t in node.targets if isinstance(t, ast.Name)}
    annotated = {node.target.id for node in tree.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
    return defined | assigned | annotated


def test_paper_map_names_exist() -> None:
    text = (ROOT / "docs" / "paper-map.md").read_text(encoding="utf-8")
    entries = list(ENTRY.finditer(text))
    assert len(entries) > 20
    for match in entries:
        file, name, more = match.groups()
        path = ROOT / file if file.startswith("tests/") else ROOT / "src" / file
        assert path.is_file(), f"paper-map.md names {file}, which does not exist"
        wanted = {n for n in [name, *re.findall(r"\w+", more)] if n}
        assert wanted <= names_in(path), f"paper-map.md: {file} has no {wanted - names_in(path)}"


def test_paper_map_covers_the_paper() -> None:
    text = (ROOT / "docs" / "paper-map.md").read_text(encoding="utf-8")
    rows = " ".join(line.split("|")[1] for line in text.splitlines() if line.startswith("|") and line.count("|") >= 4)
    mentioned = set(re.findall(r"\d+", " ".join(re.findall(r"Eq\. [\d, ]+", rows))))
    assert {str(n) for n in range(1, 14)} <= mentioned
    figures = set(re.findall(r"\d+", " ".join(re.findall(r"Fig\. [\d, ]+", rows))))
    assert {str(n) for n in range(1, 11)} <= figures
    assert all(f"App. {letter}" in rows for letter in "ABCDEFG")
    assert "Listing 1, 3" in rows and "Listing 2" in rows and "Table 1" in rows and "Table 2" in rows


def test_relative_links_in_docs_resolve() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "results").rglob("*.md")]:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)}: {target} does not exist"
