"""An experiment as yaml: one recipe, the cells that change it, the seeds, and what is measured. Typed and strict, as recipes are."""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import Annotated, Any, Literal, Union

from pydantic import BeforeValidator, Field, model_validator

from fullband.feedback_config import Control, FeedbackPasses
from fullband.probe.examples import TASKS, Task
from fullband.shipped import shipped_recipes
from fullband.strict import Strict, one_is_a_list, parse, read_mapping

OWN = ("name", "seed", "output")  # keys of a recipe that the experiment sets
NAME = r"^[a-z0-9][a-z0-9-]*$"


Amount = Literal["tokens", "token-equivalent", "flops"]
Prefill = Literal["standard", "1", "2", "4", "full"]  # as `probe` names them


class EqualTo(Strict):
    """As many steps as make this cell's expected compute equal to that of the cell `cell`, to within a step.

    by  tokens; token-equivalent (tokens x passes, section 4); flops (executed, by formula); several, if they ask for the same steps
    """

    cell: str
    by: Annotated[list[Amount], BeforeValidator(one_is_a_list), Field(min_length=1)]


class Cell(Strict):
    """A model of the grid: the experiment's recipe with keys such as `feedback.prefix` changed.

    run  "s3/fullband": the same model, measured in the same way, is a cell of another experiment; its runs are these
    """

    name: str = Field(pattern=NAME)
    run: str | None = Field(default=None, pattern=r"^[a-z0-9][a-z0-9-]*/[a-z0-9][a-z0-9-]*$")
    about: str = ""
    set: dict[str, Any] = Field(default_factory=dict)
    equal: EqualTo | None = None


class PositionsMeasure(Strict):
    """Correct answers of a built-in task at these positions, counted from 1, of held-out sequences that end at the last of them.

    controls   the model that was trained without one is evaluated again, with the last of `feedback_passes`, under each of these
    """

    kind: Literal["positions"] = "positions"
    positions: list[Annotated[int, Field(ge=1)]] = Field(min_length=1)
    rows: int = Field(default=1024, gt=0)
    feedback_passes: list[FeedbackPasses] = Field(default=[0, 1, 4, 16, "exact"], min_length=1)
    controls: list[Control] = Field(default_factory=list)


class SettlingMeasure(Strict):
    """Loss of held-out text by feedback passes, and the verdict of `diagnose` on `passes` passes over it."""

    kind: Literal["settling"] = "settling"
    rows: int = Field(default=16, gt=0)
    length: int | None = Field(default=None, gt=3)
    passes: int = Field(default=32, ge=3)
    feedback_passes: list[Annotated[int, Field(ge=0)] | Literal["exact"]] = Field(default=[0, 1, 2, 4, 8, 16, "exact"], min_length=1)

    @model_validator(mode="after")
    def _deep_enough(self) -> SettlingMeasure:
        deepest = max((passes for passes in self.feedback_passes if isinstance(passes, int)), default=0)
        if deepest >= self.passes:
            raise ValueError(f"feedback_passes: {deepest} of them are {deepest + 1} passes, and passes is {self.passes}")
        return self


class ProbeMeasure(Strict):
    """Accuracy of linear probes at the input of the stack (Fig. 7), for each way of prefilling."""

    kind: Literal["probe"] = "probe"
    tasks: list[Task] = Field(default=list(TASKS))
    prefills: list[Prefill] = Field(default=["standard", "1", "2", "4", "full"], min_length=1)
    groups: int | None = Field(default=None, ge=4)


Measure = Annotated[Union[PositionsMeasure, SettlingMeasure, ProbeMeasure], Field(discriminator="kind")]


class Comparison(Strict):
    """`cell`, evaluated as `reading` says ("standard", "fused-1", "exact", …), against the cell `to` as `to_reading` says, seed by seed."""

    cell: str
    reading: str
    to: str
    to_reading: str


class Experiment(Strict):
    name: str = Field(pattern=NAME)
    title: str
    question: str
    recipe: dict[str, Any] = Field(description="a recipe's file, beside this one, or its keys; name, seed and output are the experiment's")
    seeds: list[Annotated[int, Field(ge=0, lt=2**63)]] = Field(default=[0, 1, 2], min_length=1)
    cells: list[Cell] = Field(min_length=1)
    measure: Measure
    comparisons: list[Comparison] = Field(default_factory=list)
    notes: list[str] = Field(default_factory=list, description="what a reader of the results must know")

    @model_validator(mode="after")
    def _names_fit(self) -> Experiment:
        by_name = {cell.name: cell for cell in self.cells}
        for what, values in (("cells", [cell.name for cell in self.cells]), ("seeds", self.seeds)):
            twice = next((value for n, value in enumerate(values) if value in values[:n]), None)
            if twice is not None:
                raise ValueError(f"{what}: must not repeat, got {twice!r} twice")
        named = [cell.equal.cell for cell in self.cells if cell.equal] + [c for x in self.comparisons for c in (x.cell, x.to)]
        if unknown := [name for name in named if name not in by_name]:
            raise ValueError(f"no cell is called '{unknown[0]}' (there are {', '.join(by_name)})")
        if chained := next((cell.name for cell in self.cells if cell.equal and by_name[cell.equal.cell].equal), None):
            raise ValueError(f"cells: '{chained}' is made equal to a cell that is itself made equal to another")
        if own := set(OWN) & {*self.recipe, *(key for cell in self.cells for key in cell.set)}:
            raise ValueError(f"recipe: the experiment sets '{min(own)}' itself")
        return self


def load_experiment(path: Path) -> Experiment:
    """Raises ValueError, in one line that names the file and the key, for anything wrong with it."""
    raw = read_mapping(path, "an experiment")
    if isinstance(raw.get("recipe"), str):
        recipe = read_mapping(path.parent / raw["recipe"], "a recipe")
        raw["recipe"] = {key: value for key, value in recipe.items() if key not in (*OWN, "description")}
    return parse(Experiment, raw, str(path))


def shipped_experiments() -> Path:
    return shipped_recipes() / "experiments"


def list_experiments(folder: Path | None = None) -> list[Path]:
    """The yaml files of `folder`, by default of those that come with the package. Raises ValueError if there is no such folder."""
    folder = folder or shipped_experiments()
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder of experiments; name a yaml file")
    return sorted(folder.glob("*.yaml"))


def find_experiment(name: str, folder: Path | None = None) -> Path:
    """The file of an experiment, named or given as a path. Raises ValueError naming the nearest one if there is none."""
    folder = folder or shipped_experiments()
    if name.endswith((".yaml", ".yml")):
        name = os.path.expanduser(name)
        if not Path(name).is_file():
            raise ValueError(f"{name}: no such file")
        return Path(name)
    known = {path.stem: path for path in list_experiments(folder)}
    if name not in known:
        nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
        hint = f"; did you mean '{nearest[0]}'?" if nearest else ""
        raise ValueError(f"no experiment '{name}' in {folder}{hint}")
    return known[name]
