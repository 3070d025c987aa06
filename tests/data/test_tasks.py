from itertools import permutations

import numpy as np
import pytest
import torch

from fullband.config import DataConfig, TaskSource, parse
from fullband.data import build_loader, build_task
from fullband.data.tasks import GroupWord, Modular, group_table

GROUPS = {"S3": 6, "S4": 24, "S5": 120, "A4": 12, "A5": 60, "Z2": 2, "Z7": 7, "Z60": 60}


@pytest.mark.parametrize(("group", "order"), GROUPS.items())
def test_tables_are_groups(group: str, order: int) -> None:
    table = group_table(group)
    everything = np.arange(order)
    assert table.shape == (order, order)
    assert (table[0] == everything).all() and (table[:, 0] == everything).all()  # 0 is the identity
    assert (np.sort(table, axis=0) == everything[:, None]).all() and (np.sort(table, axis=1) == everything).all()  # inverses exist
    a, b, c = np.random.default_rng(0).integers(order, size=(3, 4000))
    assert (table[table[a, b], c] == table[a, table[b, c]]).all()
    assert (table == table.T).all() == group.startswith("Z")  # the others do not commute


def test_permutations_are_applied_from_left_to_right() -> None:
    elements = list(permutations(range(3)))
    swap_first, cycle = elements.index((1, 0, 2)), elements.index((1, 2, 0))  # x -> image of x
    # 0 -> 1 by the swap, then 1 -> 2 by the cycle; 1 -> 0 -> 1; 2 -> 2 -> 0
    assert elements[group_table("S3")[swap_first, cycle]] == (2, 1, 0)


@pytest.mark.parametrize("group", ["S3", "A5", "Z7"])
@pytest.mark.parametrize("length", [1, 2, 16, 33])
def test_running_products_by_slow_reference(group: str, length: int) -> None:
    task = GroupWord(group)
    batch = task.examples(seed=3, split="train", start=5, rows=4, length=length)
    for tokens, targets in zip(batch.tokens.tolist(), batch.targets.tolist(), strict=True):
        product = 0
        for token, target in zip(tokens, targets, strict=True):
            product = int(task.table_NN[product, token])
            assert target == product


@pytest.mark.parametrize("modulus", [2, 7, 10, 1000])
def test_running_arithmetic_by_slow_reference(modulus: int) -> None:
    task = Modular(modulus)
    batch = task.examples(seed=3, split="train", start=0, rows=3, length=50)
    for tokens, targets in zip(batch.tokens.tolist(), batch.targets.tolist(), strict=True):
        state = 0
        for token, target in zip(tokens, targets, strict=True):
            name = task.names[token]
            if name.startswith("*"):
                state *= int(name[1:])
            else:
                state += int(name)  # "-3" subtracts three
            state %= modulus
            assert target == state and task.names[target] == str(state)


@pytest.mark.parametrize("source", [TaskSource(), TaskSource(group="S5"), TaskSource(task="modular")])
def test_an_example_depends_only_on_seed_split_and_number(source: TaskSource) -> None:
    task = build_task(source)
    whole = task.examples(7, "train", 0, 12, 24)
    parts = [task.examples(7, "train", start, 3, 24).tokens for start in (0, 3, 6, 9)]
    assert torch.equal(torch.cat(parts), whole.tokens)
    assert torch.equal(task.examples(7, "train", 0, 12, 16).tokens, whole.tokens[:, :16])  # a longer row begins with the shorter
    assert torch.equal(task.examples(7, "train", 0, 12, 16).targets, whole.targets[:, :16])
    for other in (task.examples(8, "train", 0, 12, 24), task.examples(7, "validation", 0, 12, 24)):
        assert not (other.tokens == whole.tokens).all(dim=1).any()


def test_tokens_and_answers_are_uniform() -> None:
    task = GroupWord("S3")
    batch = task.examples(0, "train", 0, 600, 20)
    for values in (batch.tokens, batch.targets[:, -1]):
        share = torch.bincount(values.flatten(), minlength=6) / values.numel()
        assert (share - task.chance).abs().max() < 4 * (task.chance / values.numel()) ** 0.5
    modular = Modular(5).examples(0, "train", 0, 2000, 20)
    share = torch.bincount(modular.targets[:, -1], minlength=5) / 2000
    assert (share - 0.2).abs().max() < 0.04


def test_loader_counts_examples_and_resumes() -> None:
    config = DataConfig(source=TaskSource(), length=16)
    loader = build_loader(config, seed=1, batch_rows=8)
    assert (loader.vocab_size, loader.length, loader.tokenizer.encode("3 1 4")) == (6, 16, [3, 1, 4])
    first = loader.next_batch()
    state = loader.state_dict()
    second = loader.next_batch()
    resumed = build_loader(config, seed=1, batch_rows=8)
    resumed.load_state_dict(state)
    assert torch.equal(resumed.next_batch().tokens, second.tokens) and not torch.equal(first.tokens, second.tokens)
    ranks = [build_loader(config, 1, 8, rank, 4).next_batch().tokens for rank in range(4)]
    assert torch.equal(torch.cat(ranks), first.tokens)
    long = loader.validation_batches(rows=5, batch_rows=2, length=64)
    assert [batch.shape for batch in long] == [(2, 64), (2, 64), (1, 64)]
    assert torch.equal(torch.cat([batch.tokens for batch in long])[:, :16], loader.validation_batches(5, 5)[0].tokens)
    document = loader.validation_documents(3)[2]
    assert torch.equal(document.targets, loader.validation_batches(5, 5)[0].targets[2])


@pytest.mark.parametrize("group", ["S9", "Z1", "Z07", "Q8", "Z", ""])
def test_an_unknown_group_is_refused_in_one_line(group: str) -> None:
    with pytest.raises(ValueError, match=r"^recipe: .*group: must be one of S3, S4, S5, A4, A5 and Z2 to Z1000, got '.*'$"):
        parse(DataConfig, {"source": {"kind": "task", "group": group}}, "recipe")
