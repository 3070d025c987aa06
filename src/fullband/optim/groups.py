"""Which optimizer takes which parameter, proven complete.

NorMuon: all matrices of the stack and the fusion's W_U and W_G. Adam: embedding and head, norms, biases, head gates, and what else is no
map between hidden states (convolutions, the state matrices of recurrent layers, stacked experts and their router). With
`optim.kind: adam`, Adam takes all of them, in the same groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from fullband.config import OptimConfig

OptimizerName = Literal["normuon", "adam"]

# A linear map that is none between hidden states, by the end of its name: one output per head.
HEAD_GATE = "attention.gate.weight"
UNTIED_HEAD = "lm_head.weight"
MATRICES = ("stack matrices", "fusion matrices")  # the groups that NorMuon takes, and the only ones with weight decay


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that are treated alike: (name in the model, parameter), in the model's order."""

    name: str
    optimizer: OptimizerName
    parameters: list[tuple[str, nn.Parameter]]


# In the order in which they are printed.
GROUPS: dict[str, OptimizerName] = {
    "stack matrices": "normuon",
    "fusion matrices": "normuon",
    "embedding": "adam",
    "head gates": "adam",
    "norms and vectors": "adam",
    "other tensors": "adam",
}


def parameter_groups(model: nn.Module, kind: OptimizerName = "normuon") -> list[ParameterGroup]:
    """Every trainable parameter of `model` in exactly one group; empty groups are left out. With the `kind` adam, Adam takes them all.

    A parameter shared by several modules counts once, under its first name, and as an embedding if any of them is one. Frozen parameters
    (requires_grad False) are in no group. Raises ValueError if nothing is trainable.
    """
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    embeddings |= {id(head.weight) for head in _heads(model)}
    linear = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    found: dict[str, list[tuple[str, nn.Parameter]]] = {name: [] for name in GROUPS}
    for name, parameter in _trainable(model):
        if id(parameter) in embeddings or name.endswith(UNTIED_HEAD):
            group = "embedding"
        elif parameter.ndim < 2:
            group = "norms and vectors"
        elif id(parameter) not in linear:
            group = "other tensors"
        elif name.endswith(HEAD_GATE):
            group = "head gates"
        else:
            group = "fusion matrices" if is_fusion(name) else "stack matrices"
        found[group].append((name, parameter))
    groups = [
        ParameterGroup(name, "adam" if kind == "adam" else GROUPS[name], parameters) for name, parameters in found.items() if parameters
    ]
    if not groups:
        raise ValueError("the model has no trainable parameter")
    check_groups(model, groups)
    return groups


def _heads(model: nn.Module) -> Iterator[nn.Module]:
    """The heads of the transformers models inside: each family has its own name for them."""
    for module in model.modules():
        find = getattr(module, "get_output_embeddings", None)
        head = find() if callable(find) else None
        if head is not None:
            yield head


def is_fusion(name: str) -> bool:
    """Whether a parameter belongs to the fusion (Eq. 4), by its name: what `fusion_warmup` trains."""
    return "connection" in name.split(".")


def check_groups(model: nn.Module, groups: Sequence[ParameterGroup]) -> None:
    """Raises ValueError naming the parameter if a trainable one is in no group or in two, or one in a group is not the model's."""
    owner: dict[int, str] = {}
    names: dict[int, str] = {}
    for group in groups:
        for name, parameter in group.parameters:
            if id(parameter) in owner:
                raise ValueError(f"{name}: in the groups '{owner[id(parameter)]}' and '{group.name}'; a parameter has one optimizer")
            owner[id(parameter)] = group.name
            names[id(parameter)] = name
    for name, parameter in _trainable(model):
        if owner.pop(id(parameter), None) is None:
            raise ValueError(f"{name}: trainable, but in no parameter group")
    for stranger, group_name in owner.items():
        raise ValueError(f"{names[stranger]}: in the group '{group_name}', but no trainable parameter of the model")


def _trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """(name, parameter), shared ones once. torch.compile's wrapper adds a prefix to the names, which checkpoints must not depend on."""
    return [(name.replace("_orig_mod.", ""), p) for name, p in model.named_parameters() if p.requires_grad]


def describe_groups(groups: Sequence[ParameterGroup], config: OptimConfig | None = None) -> str:
    """A table: group, optimizer, peak learning rate, weight decay, number of tensors and of parameters, with the sums below."""
    config = config or OptimConfig()
    settings = {"normuon": config.matrix_lr, "adam": config.adam_lr}
    rows = [("group", "optimizer", "lr", "wd", "tensors", "parameters")]
    for group in groups:
        lr, weight_decay = settings[group.optimizer], config.matrix_weight_decay if group.name in MATRICES else 0.0
        count = sum(p.numel() for _, p in group.parameters)
        rows.append((group.name, group.optimizer, f"{lr:g}", f"{weight_decay:g}", str(len(group.parameters)), f"{count:,}"))
    tensors = sum(len(group.parameters) for group in groups)
    count = sum(p.numel() for group in groups for _, p in group.parameters)
    rows.append(("total", "", "", "", str(tensors), f"{count:,}"))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    # words to the left, numbers to the right
    lines = [
        "  ".join(cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))) for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)
