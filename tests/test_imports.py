"""The shape of the source: imports point one way, importing the package loads no heavy library, files stay short."""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

import fullband

SOURCE = Path(fullband.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))

# What each part may import, besides itself. A part that is missing here (the command line) may import everything and is imported by none.
CONFIG = {"config", "data_config", "feedback_config", "layout"}
BELOW: dict[str, set[str]] = {
    "strict": set(),
    "amounts": set(),
    "shipped": set(),
    "data_config": {"strict"},
    "feedback_config": {"strict"},
    "config": {"data_config", "feedback_config", "strict", "shipped"},
    "layout": set(),
    "files": set(),
    "device": set(),
    "run_folder": {"files"},
    "presets": CONFIG | {"strict"},
    "spans": CONFIG,
    "trunk": CONFIG,
    "feedback": CONFIG | {"trunk", "spans"},
    "optim": CONFIG,
    "data": CONFIG | {"files", "run_folder", "strict"},
    "decode": CONFIG | {"feedback", "trunk", "data"},
    "model": CONFIG | {"decode", "feedback", "trunk", "presets", "files", "run_folder"},
}
BELOW["evaluate"] = CONFIG | {
    "decode",
    "data",
    "feedback",
    "trunk",
    "model",
    "presets",
    "files",
    "hf",
    "loading",
    "strict",
    "device",
    "amounts",
}
BELOW["training"] = BELOW["evaluate"] | {"optim", "evaluate", "hf", "loading", "costs", "spans", "run_folder"}
BELOW["hf"] = CONFIG | {"decode", "data", "feedback", "trunk", "model", "presets", "files"}
BELOW["serve"] = CONFIG | {"decode", "data", "feedback", "trunk", "strict", "files", "model"}
BELOW["vllm"] = CONFIG | {"decode", "data", "feedback", "files", "hf", "model", "serve", "trunk"}
BELOW["loading"] = {"hf", "model"}
BELOW["diagnose"] = BELOW["evaluate"] | {"evaluate"}
BELOW["probe"] = CONFIG | {"decode", "data", "feedback", "trunk"}
BELOW["costs"] = CONFIG | {"spans"}
BELOW["planning"] = CONFIG | {"costs"}
BELOW["plots"] = CONFIG | {"training", "evaluate", "files", "strict"}  # reads run folders; never a model
BELOW["experiments"] = BELOW["training"] | {"training", "diagnose", "probe", "costs", "plots", "shipped"}
HEAVY = [
    "transformers",
    "starlette",
    "uvicorn",
    "prometheus_client",
    "vllm",
    "lm_eval",
    "matplotlib",
    "datasets",
    "pandas",
    "pyarrow",
    "tiktoken",
    "wandb",
    "tensorboard",
    "sklearn",
]
ALONE = SOURCE / "evaluate" / "sandbox" / "inside"  # mounted without the package around it, so it imports its own files relatively


def part_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_parts(path: Path) -> set[str]:
    """Parts of the package that a file imports, anywhere in it."""
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 or ALONE in path.parents, f"{path}: relative import"
            names += [f"{node.module}.{alias.name}" if node.module == "fullband" else str(node.module) for alias in node.names]
    return {name.split(".")[1] for name in names if name.startswith("fullband.")}


@pytest.mark.parametrize("path", FILES, ids=[str(p.relative_to(SOURCE)) for p in FILES])
def test_imports_point_one_way(path):
    part = part_of(path)
    if part in BELOW:
        above = imported_parts(path) - BELOW[part] - {part}
        assert not above, f"{part} must not import {', '.join(sorted(above))}"
    elif part not in ("cli", "__main__"):
        assert "cli" not in imported_parts(path)


def modules_imported() -> dict[str, set[str]]:
    """{module: the modules of the package that it imports, at the top, in a function, or for type checkers alone}."""
    modules = {".".join(("fullband", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__"): path for path in FILES}
    imported: dict[str, set[str]] = {}
    for module, path in modules.items():
        names = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                names |= {name if name in modules else str(node.module) for name in inner}
        imported[module] = names & modules.keys() - {module}
    return imported


def test_no_module_imports_what_imports_it():
    imported = modules_imported()
    try:
        graphlib.TopologicalSorter(imported).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" imports ".join(error.args[1][::-1]))


def test_the_table_has_no_cycle():
    for part, below in BELOW.items():
        for lower in below:
            assert part not in BELOW[lower], f"{part} and {lower} may import each other"


@pytest.mark.parametrize("path", FILES, ids=[str(p.relative_to(SOURCE)) for p in FILES])
def test_a_file_has_one_subject(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) < 420
    assert not {"utils", "helpers", "common"} & {path.stem, *path.relative_to(SOURCE).parts}


@pytest.mark.parametrize(
    "modules", ["fullband", "fullband, fullband.model, fullband.presets, fullband.feedback.schedule, fullband.feedback.loss"]
)
def test_importing_loads_no_heavy_library(modules):
    code = f"import sys, {modules}; print([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.strip() == "[]"
