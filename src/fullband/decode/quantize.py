"""Smaller weights for decoding: int8, a scale for every output, through torchao (extra `quantize`).

Only weights are quantised, activations stay as they are. Decoding reads every weight once a token, so a quarter of the bytes can be up to
four times the speed; but only kernels that read int8 collect it. On the CPU torchao converts a matrix to the activations' type at every
use, which costs more than it saves, compiled or not: there int8 is for memory (`python -m benchmarks.decode` measures both).
"""

from __future__ import annotations

import warnings
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

SCHEMES = ("int8",)
Model = TypeVar("Model", bound=nn.Module)


def quantize(model: Model, scheme: str = "int8") -> Model:
    """The same model, its matrices replaced in place. For decoding only: it can be neither trained nor saved.

    Embedding and head stay in their type: rows are looked up in the one, and the other's logits are the most sensitive outputs.
    Raises ValueError for another scheme and if torchao is not installed.
    """
    if scheme not in SCHEMES:
        raise ValueError(f"unknown quantisation '{scheme}' (known: {', '.join(SCHEMES)})")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchao warns about kernels for GPUs that are not there
        try:
            from torchao.quantization import Int8WeightOnlyConfig, quantize_
        except ImportError:
            raise ValueError("int8 weights need torchao: pip install 'fullband[quantize]'") from None
        output_embeddings: Any = getattr(model, "get_output_embeddings", None)  # of a Hugging Face trunk: a Linear
        head = output_embeddings() if output_embeddings else None
        model.eval().requires_grad_(False)
        quantize_(model, Int8WeightOnlyConfig(), lambda module, name: isinstance(module, nn.Linear) and module is not head)
    return model


def weight_bytes(model: nn.Module) -> int:
    """Bytes that the weights take, each counted once; of quantised ones, their integers and scales."""
    return sum(_bytes(parameter.data) for parameter in model.parameters())


def _bytes(tensor: Tensor) -> int:
    if type(tensor) is Tensor or not hasattr(tensor, "__tensor_flatten__"):
        return tensor.numel() * tensor.element_size()
    names, _ = tensor.__tensor_flatten__()
    return sum(_bytes(part) for name in names if isinstance(part := getattr(tensor, name), torch.Tensor))
