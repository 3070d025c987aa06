"""A model with the parameter names and kinds of the real one, without its computation."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width // 2, bias=False)
        self.value = nn.Linear(width, width // 2, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, heads, bias=False)
        self.query_norm = Norm(width // heads)
        self.key_norm = Norm(width // heads)


class Glu(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 4 * width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads)
        self.attention_norm_in = Norm(width)
        self.glu = Glu(width)
        self.glu_norm_in = Norm(width)


class Trunk(nn.Module):
    def __init__(self, width: int, heads: int, layers: int, vocab: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.final_norm = Norm(width)


class Fusion(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.state = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, width, bias=False)


class Model(nn.Module):
    """`loss()` is a smooth function of every parameter, so that gradients change as training goes on."""

    def __init__(self, width: int = 8, heads: int = 2, layers: int = 2, vocab: int = 11) -> None:
        super().__init__()
        self.trunk = Trunk(width, heads, layers, vocab)
        self.connection = nn.ModuleDict({"mergers": nn.ModuleList([Fusion(width)])})

    def loss(self, step: int) -> Tensor:
        total = torch.zeros(())
        for i, p in enumerate(self.parameters()):
            wave = torch.arange(p.numel(), dtype=p.dtype).view(p.shape)
            total = total + (p * torch.cos(wave * (i + 1 + 0.37 * step))).sum() + p.square().sum()
        return total


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    # Matrices this small gain nothing from threads, and threads that wait for a busy core made the folder ten times slower.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def make_model() -> Callable[..., Model]:
    def make(seed: int = 0, **shape: int) -> Model:
        torch.manual_seed(seed)
        return Model(**shape)

    return make
