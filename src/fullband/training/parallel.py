"""One run on many processes: started by torchrun or SLURM, parameters cut over them (FSDP2), every rank drawing the same step.

`Parallel` is one process and does nothing; `Sharded` is one rank of many. The loop knows no difference: what a rank adds to a step goes
through `sum`, what the run decides through `agree` and `all`, what is written through `from_main`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fullband.config import ParallelConfig, Recipe
from fullband.device import resolve_device
from fullband.model import WEIGHTS, FullBandModel, read_matching
from fullband.optim.sharded import put, whole
from fullband.training.watch import Watch

LAUNCH = "torchrun --nproc-per-node {0} -m fullband train RECIPE"


class Parallel:
    """One process: a run that isn't cut."""

    rank, world = 0, 1

    @property
    def main(self) -> bool:
        """Whether this process writes: logs, progress, checkpoints."""
        return self.rank == 0

    def shard(self, model: nn.Module) -> None:
        """Cut a model's parameters over the processes, in place: its modules and names stay."""

    def gathered(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, a forward pass that finds its weights whole. It returns what gradients flow from as a tensor, or in a tuple."""
        return function

    def observe(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """`function(*arguments)` without gradients: every rank computes the same, and finds the same."""
        return function(*arguments)

    def sum(self, values: list[float]) -> list[float]:
        """Each value's sum over the ranks."""
        return values

    def all(self, holds: bool) -> bool:
        """Whether it holds on every rank."""
        return holds

    def agree(self, signal: int | None) -> int | None:
        """The signal that a rank was asked to stop by: every rank stops at the same step."""
        return signal

    def from_main(self, function: Callable[[], Any]) -> Any:
        """What rank 0's call of `function` returns, as JSON, or the ValueError that it raises: on every rank."""
        return function()

    def weights(self, model: nn.Module) -> dict[str, Tensor] | None:
        """The whole tensors of a model on rank 0, None elsewhere and where the model has them itself."""
        return None

    def whole(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Whole tensors on rank 0, nothing elsewhere."""
        return tensors

    def load_weights(self, model: FullBandModel, folder: Path) -> None:
        model.load_weights(folder / WEIGHTS)

    def all_failed(self) -> bool:
        """Whether every rank has failed at this point: only then can they do anything together, such as saving."""
        return True

    def mark(self) -> None:
        """The run goes on."""


ALONE = Parallel()


class Sharded(Parallel):
    """One rank of a run that is cut over `shard` x `replicate` processes; `running` makes it."""

    def __init__(self, config: ParallelConfig, recipe: Recipe, device: torch.device, watch: Watch) -> None:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        self.dist, self.config, self.device, self.watch = dist, config, device, watch
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.bfloat16 = recipe.train.dtype == "bfloat16"
        self.prefix = recipe.feedback.prefix
        cut = (config.replicate, config.shard) if config.replicate > 1 else (config.shard,)
        self.mesh = init_device_mesh(device.type, cut, mesh_dim_names=("replicate", "shard")[-len(cut) :])
        self.root: Any = None

    def shard(self, model: nn.Module) -> None:
        """`fully_shard` of every layer, and of all the rest as one unit (embedding, head, norms, connection: used in every pass), which
        stays gathered through a step. In bfloat16 the layers' weights are gathered as bfloat16 from float32 master weights.

        Raises ValueError where ranks would run their layers a different number of times."""
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

        kind = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
        policy: dict[str, Any] = {"mp_policy": kind} if self.bfloat16 else {}
        trunk: Any = model.trunk
        if not trunk.can_crop_cache and self.prefix not in ("off", "uniform", "shared"):
            raise ValueError(f"feedback.prefix: must be off, uniform or shared for recurrent layers on many processes, got '{self.prefix}'")
        for layer in trunk.layers:
            fully_shard(layer, mesh=self.mesh, reshard_after_forward=self.config.reshard, **policy)
        self.root = _Root(model)
        fully_shard(self.root, mesh=self.mesh, reshard_after_forward=False)
        for module in self.root.modules():
            if isinstance(module, FSDPModule):  # losses are divided by the whole step's targets: gradients are sums, not means
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    def gathered(self, function: Callable[..., Any]) -> Callable[..., Any]:
        self.mark()
        return partial(self.root, function)

    def observe(self, function: Callable[..., Any], *arguments: Any) -> Any:
        with torch.no_grad():
            found = self.gathered(function)(*arguments)
        self.root.reshard()  # no backward will do it
        return found

    def sum(self, values: list[float]) -> list[float]:
        return self._reduced(values, self.dist.ReduceOp.SUM)

    def all(self, holds: bool) -> bool:
        return self._reduced([float(holds)], self.dist.ReduceOp.MIN)[0] == 1

    def agree(self, signal: int | None) -> int | None:
        self.mark()
        return int(self._reduced([float(signal or 0)], self.dist.ReduceOp.MAX)[0]) or None

    def _reduced(self, values: list[float], operation: Any) -> list[float]:
        together = torch.tensor(values, dtype=torch.float64, device=self.device)
        self.dist.all_reduce(together, operation)
        reduced: list[float] = together.tolist()
        return reduced

    def from_main(self, function: Callable[[], Any]) -> Any:
        self.mark()
        told: Any = None
        if self.main:
            try:
                told = {"value": function()}
            except ValueError as failed:
                told = {"failed": str(failed)}
        told = self._told(told)
        if "failed" in told:
            raise ValueError(told["failed"])
        return told["value"]

    def _told(self, value: Any) -> Any:
        """Rank 0's value on every rank, as JSON: nothing that could run."""
        content = json.dumps(value).encode() if self.main else b""
        size = torch.tensor([len(content)], device=self.device)
        self.dist.broadcast(size, 0)
        text = torch.tensor(list(content), dtype=torch.uint8, device=self.device) if self.main else torch.empty(0)
        text = text if self.main else torch.empty(int(size), dtype=torch.uint8, device=self.device)
        self.dist.broadcast(text, 0)
        return json.loads(bytes(text.tolist()))

    def weights(self, model: nn.Module) -> dict[str, Tensor]:
        """Tied tensors stay one: they are written once."""
        owners = dict(model.named_parameters(remove_duplicate=False))
        once: dict[int, Tensor] = {}
        found: dict[str, Tensor] = {}
        for name, tensor in model.state_dict().items():
            key = id(owners.get(name, tensor))
            if key not in once:
                once[key] = self._gathered(tensor)
            found[name] = once[key]
        return found

    def whole(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {name: self._gathered(tensor) for name, tensor in tensors.items()}

    def _gathered(self, tensor: Tensor) -> Tensor:
        self.mark()
        complete = whole(tensor.detach())
        return complete.cpu() if self.main else torch.empty(0)

    def load_weights(self, model: FullBandModel, folder: Path) -> None:
        own = model.state_dict()
        tensors = read_matching(folder / WEIGHTS, own)
        with torch.no_grad():
            for name, tensor in own.items():
                put(tensor, tensors[name])

    def all_failed(self) -> bool:
        return self.watch.all_failed()

    def mark(self) -> None:
        self.watch.mark()


class _Root(nn.Module):
    """What is not in a layer, as a unit of FSDP: gathered whenever a function is called through it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)


@contextmanager
def running(recipe: Recipe) -> Iterator[Parallel]:
    """The processes that a recipe runs on: this one alone, or all that torchrun or SLURM's `srun` started, whose environment says so.

    Raises ValueError where their number is not what the recipe says, or doesn't divide its batches. A ValueError that all ranks raise is
    rank 0's to say: the others exit with 2.
    """
    world, rank = (int(os.environ.get(name) or default) for name, default in (("WORLD_SIZE", 1), ("RANK", 0)))
    try:
        check_processes(recipe, world)
    except ValueError:
        if rank:
            raise SystemExit(2) from None
        raise
    if world == 1:
        yield ALONE
        return
    import torch.distributed as dist

    config = recipe.parallel or ParallelConfig(shard=world)
    if resolve_device(recipe.train.device).type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK") or 0))
    device = resolve_device(recipe.train.device)
    # The watch speaks first: it knows which rank is missing.
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(seconds=2 * config.timeout + 60))
    try:
        with Watch(dist.get_rank(), world, config.timeout) as watch:
            dist.barrier()
            try:
                yield Sharded(config, recipe, device, watch)
            except ValueError:
                if watch.all_failed() and rank:
                    raise SystemExit(2) from None
                raise
            dist.barrier()
    finally:
        dist.destroy_process_group()


def check_processes(recipe: Recipe, world: int) -> None:
    """Raises ValueError naming the numbers if a run can't be cut over `world` processes."""
    config, train = recipe.parallel, recipe.train
    if config and config.shard * config.replicate != world:
        needed = config.shard * config.replicate
        raise ValueError(
            f"parallel: shard {config.shard} x replicate {config.replicate} needs {needed} processes, got {world}: "
            f"{LAUNCH.format(needed)}, or --set parallel=null for as many as there are"
        )
    if world == 1:
        return
    for key, rows in (("batch_rows", train.batch_rows), ("microbatch_rows", train.microbatch_rows)):
        if rows and rows % world:
            raise ValueError(f"train.{key}: must be a multiple of the number of processes ({world}), got {rows}")
    if recipe.feedback.control == "shuffled":
        raise ValueError(f"feedback.control: 'shuffled' takes states from the whole batch and runs on one process, got {world}")


def held_by_main(parallel: Parallel, held: ExitStack, context: AbstractContextManager[Any]) -> None:
    """Enter a context on rank 0 alone, for all."""

    def enter() -> None:
        held.enter_context(context)

    parallel.from_main(enter)
