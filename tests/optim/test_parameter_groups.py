"""Law 10: groups cover every parameter exactly once; the split is the design's."""

import pytest
import torch
from torch import nn

from fullband.config import OptimConfig
from fullband.model import FullBandModel
from fullband.optim import ParameterGroup, check_groups, describe_groups, is_fusion, parameter_groups
from fullband.presets import trunk_preset


def names(groups: list[ParameterGroup], optimizer: str) -> set[str]:
    return {name for group in groups for name, _ in group.parameters if group.optimizer == optimizer}


def test_the_split(make_model) -> None:
    groups = parameter_groups(make_model(layers=1))
    assert names(groups, "normuon") == {
        "trunk.blocks.0.attention.query.weight",
        "trunk.blocks.0.attention.key.weight",
        "trunk.blocks.0.attention.value.weight",
        "trunk.blocks.0.attention.output.weight",
        "trunk.blocks.0.glu.gate.weight",
        "trunk.blocks.0.glu.up.weight",
        "trunk.blocks.0.glu.down.weight",
        "connection.mergers.0.state.weight",
        "connection.mergers.0.gate.weight",
    }
    assert names(groups, "adam") == {
        "trunk.embedding.weight",
        "trunk.blocks.0.attention.gate.weight",
        "trunk.blocks.0.attention.query_norm.weight",
        "trunk.blocks.0.attention.key_norm.weight",
        "trunk.blocks.0.attention_norm_in.weight",
        "trunk.blocks.0.glu_norm_in.weight",
        "trunk.final_norm.weight",
    }
    assert {group.name for group in groups} == {"stack matrices", "fusion matrices", "embedding", "head gates", "norms and vectors"}


def test_every_parameter_exactly_once(make_model) -> None:
    model = make_model()
    covered = [p for group in parameter_groups(model) for _, p in group.parameters]
    assert len({id(p) for p in covered}) == len(covered)
    assert {id(p) for p in covered} == {id(p) for p in model.parameters()}


@pytest.mark.parametrize("fusion", ["gated", "concat", "add", "residual"])
def test_the_real_model_is_covered_too(fusion: str) -> None:
    model = FullBandModel(trunk_preset("tiny"), fusion)
    groups = {group.name: group.parameters for group in parameter_groups(model)}
    assert sum(len(parameters) for parameters in groups.values()) == len(list(model.parameters()))
    assert len(groups["stack matrices"]) == 2 * 7 and len(groups["head gates"]) == 2 and len(groups["embedding"]) == 1
    assert all(is_fusion(name) and p.ndim == 2 for name, p in groups["fusion matrices"])


def test_shared_parameters_count_once_and_as_embedding() -> None:
    class HeadFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 7, bias=True)
            self.embedding = nn.Embedding(7, 4)
            self.embedding.weight = self.head.weight

    groups = parameter_groups(HeadFirst())
    assert names(groups, "adam") == {"head.weight", "head.bias"} and names(groups, "normuon") == set()


def test_untied_head_convolutions_and_frozen_parameters() -> None:
    model = nn.ModuleDict(
        {"lm_head": nn.Linear(4, 9, bias=False), "mixer": nn.Conv1d(4, 4, 3), "frozen": nn.Linear(4, 4), "map": nn.Linear(4, 4)}
    )
    model["frozen"].requires_grad_(False)
    groups = parameter_groups(model)
    assert names(groups, "adam") == {"lm_head.weight", "mixer.weight", "mixer.bias", "map.bias"}
    assert names(groups, "normuon") == {"map.weight"}
    with pytest.raises(ValueError, match="no trainable parameter"):
        parameter_groups(model["frozen"])


def test_names_do_not_depend_on_compilation(make_model) -> None:
    model = make_model(layers=1)
    compiled = nn.ModuleDict({"_orig_mod": model})  # what torch.compile's wrapper looks like from outside
    assert parameter_groups(compiled) == parameter_groups(model)


def test_incomplete_or_double_groups_are_named(make_model) -> None:
    model = make_model()
    groups = parameter_groups(model)
    with pytest.raises(ValueError, match=r"connection\.mergers\.0\.state\.weight: trainable, but in no parameter group"):
        check_groups(model, [group for group in groups if group.name != "fusion matrices"])
    twice = ParameterGroup("again", "adam", [groups[0].parameters[0]])
    with pytest.raises(ValueError, match=r"attention\.query\.weight: in the groups 'stack matrices' and 'again'"):
        check_groups(model, [*groups, twice])
    with pytest.raises(ValueError, match="other: in the group 'strange', but no trainable parameter"):
        check_groups(model, [*groups, ParameterGroup("strange", "adam", [("other", nn.Parameter(torch.zeros(2)))])])


def test_fusion_is_known_by_its_name() -> None:
    assert is_fusion("connection.mergers.0.gate.weight") and is_fusion("model.connection.mergers.0.state.weight")
    assert not is_fusion("trunk.blocks.0.glu.gate.weight") and not is_fusion("trunk.confusion.weight")


def test_table(make_model) -> None:
    model = make_model()
    table = describe_groups(parameter_groups(model), OptimConfig(matrix_lr=0.02)).splitlines()
    assert table[0].split() == ["group", "optimizer", "lr", "wd", "tensors", "parameters"]
    assert table[1].split() == ["stack", "matrices", "normuon", "0.02", "0.01", "14", "1,920"]
    assert table[-1].split() == ["total", str(len(list(model.parameters()))), f"{sum(p.numel() for p in model.parameters()):,}"]
