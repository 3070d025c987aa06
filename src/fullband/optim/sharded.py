"""Parameters that are cut over processes (torch's DTensor, by rows): what a process holds, the whole, and whole-matrix updates.

Nothing here imports torch.distributed before it meets such a parameter: one process alone never does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

# Momenta [N, fan_out, fan_in] and second moments [N, fan_out, 1] of whole matrices -> (directions like the momenta, the scale of each
# row [N, fan_out, 1], new second moments [N, fan_out, 1]).
WholeUpdate: TypeAlias = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "to_local")


def local(tensor: Tensor) -> Tensor:
    """What this process holds of `tensor`, as a view: all of it, if it isn't cut."""
    there: Any = tensor
    return there.to_local() if is_sharded(tensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of `tensor`. If it is cut, every process must call this."""
    there: Any = tensor
    return there.full_tensor() if is_sharded(tensor) else tensor


def put(own: Tensor, value: Tensor) -> None:
    """Copy the whole `value` into `own`, of which a process takes its part. Nothing is sent."""
    if is_sharded(own):
        from torch.distributed.tensor import distribute_tensor

        cut: Any = own
        value = value.to(own.device, own.dtype)
        value = distribute_tensor(value, cut.device_mesh, cut.placements, src_data_rank=None)
    local(own).copy_(local(value))


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The norm of all gradients, over all processes: a scalar on their device."""
    return whole(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))


def processes_of(parameter: Tensor) -> int:
    """Over how many processes a parameter's rows are cut."""
    cut: Any = parameter
    return int(cut.device_mesh.size(-1)) if is_sharded(parameter) else 1


def by_owner(update: WholeUpdate, momentum: Tensor, second_moment: Tensor, like: Tensor, first: int) -> tuple[Tensor, Tensor, Tensor]:
    """`update` of whole matrices that are cut over processes: each matrix is computed by one of them, its owner.

    momentum, second_moment   this process's rows [N, rows, fan_in] and [N, rows, 1] of N matrices of one shape
    like                      one of the parameters
    first                     the owner of the first matrix; the others are dealt out from there, one a process, so that work is even

    Two exchanges: rows of momentum and second moment to the owners, rows of the results back. A matrix's numbers are made by the same
    operations whatever the number of processes. Groups that replicate one another each compute the same.
    """
    import torch.distributed as dist

    cut: Any = like
    group = cut.device_mesh.get_group(cut.device_mesh.ndim - 1)
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    fan_out, fan_in = cut.shape
    chunk = -(-fan_out // world)
    rows = [min(max(fan_out - r * chunk, 0), chunk) for r in range(world)]
    count = len(momentum)
    owned = [[n for n in range(count) if (first + n) % world == owner] for owner in range(world)]
    mine = len(owned[rank])

    def exchange(parts: list[Tensor], shapes: list[tuple[int, int, int]]) -> list[Tensor]:
        """Part r goes to process r; what process r sends has the r-th shape."""
        sizes = [a * b * c for a, b, c in shapes]
        got = momentum.new_empty(sum(sizes))
        sent = torch.cat([part.reshape(-1) for part in parts])
        dist.all_to_all_single(got, sent, sizes, [part.numel() for part in parts], group=group)
        return [flat.view(shape) for flat, shape in zip(got.split(sizes), shapes, strict=True)]

    packed = torch.cat([momentum, second_moment], dim=-1)  # [N, rows, fan_in + 1]
    gathered = torch.cat(exchange([packed[o] for o in owned], [(mine, r, fan_in + 1) for r in rows]), dim=1)
    if mine:
        results = torch.cat(update(gathered[..., :fan_in].contiguous(), gathered[..., fan_in:].contiguous()), dim=-1)
    else:
        results = gathered.new_empty(0, fan_out, fan_in + 2)
    back = exchange(list(results.split(rows, dim=1)), [(len(o), rows[rank], fan_in + 2) for o in owned])
    mixed = packed.new_empty(count, rows[rank], fan_in + 2)
    for owner, part in zip(owned, back, strict=True):
        mixed[owner] = part
    return mixed[..., :fan_in], mixed[..., fan_in : fan_in + 1], mixed[..., fan_in + 1 :]
