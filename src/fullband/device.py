"""Devices and number types by name. torch is imported when it is needed: the command line's help takes the names from here."""

from __future__ import annotations

from textwrap import shorten
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "bfloat16", "float16", "float64")


def resolve_device(name: str, setting: str = "train.device") -> torch.device:
    """`auto` is CUDA where there is one, else the CPU (MPS on request: untested). Raises ValueError that names the `setting`."""
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        if device.type == "meta":
            raise RuntimeError("it has shapes but no values")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"{setting}: '{name}' is not available here ({shorten(str(error), 120)})") from None
    return device


def resolve_dtype(name: str, setting: str = "--dtype") -> torch.dtype:
    """Raises ValueError that names the `setting`."""
    import torch

    if name not in DTYPES:
        raise ValueError(f"{setting}: must be one of {', '.join(DTYPES)}, got '{name}'")
    precision: torch.dtype = getattr(torch, name)
    return precision


def autocast(device: torch.device, dtype: str) -> Any:
    """bfloat16 compute over float32 parameters, or nothing."""
    import torch

    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == "bfloat16")
