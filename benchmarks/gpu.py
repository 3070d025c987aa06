"""One command for whoever has a GPU: `make gpu-check`, under five minutes on one device.

First every path that the tests on a CPU can't reach, each against the same computation on the CPU in float64 (float32 without TF32 on the
device): flex attention and its gradients, training steps with their updates, bfloat16, compiled blocks, decoding in fixed buffers,
compiled, with CUDA graphs, a converted model over two devices. Then what the device gives: tokens a second in training and the share
of its peak that the model's FLOPs are, all passes counted (MFU), peak memory, Soft against Standard, and tokens a second in decoding
against transformers, and vLLM where it is installed.

    python -m benchmarks.gpu --json gpu.json
    python -m benchmarks.gpu --device cpu --preset 10m --only checks       what can be checked without a GPU

Exit code 1 if a check failed.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks import decode, in_vllm, train
from benchmarks.peak_memory import peak_bytes
from benchmarks.report import options, prepare, show
from fullband.config import OptimConfig, TrunkConfig
from fullband.costs import PAPER, pass_flops
from fullband.decode import generate
from fullband.device import autocast
from fullband.feedback.loss import multipass_loss
from fullband.feedback.multipass import multipass
from fullband.model import FullBandModel
from fullband.optim.optimizer import Optimizer
from fullband.planning import GPUS
from fullband.presets import trunk_preset
from fullband.trunk.attention import attend, dense_plan, make_plan

SHAPE = TrunkConfig(vocab_size=512, width=128, layers=4, heads=4, kv_heads=2, glu_width=256, context=512, window=64, full_every=2)


@dataclass(frozen=True)
class Check:
    """`error` against the CPU is at most `bound`; a check that does not apply has a reason and no error."""

    name: str
    error: float | None
    bound: float
    note: str = ""

    @property
    def good(self) -> bool:
        return not self.note.startswith("failed") if self.error is None else self.error <= self.bound


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = options(__doc__ or "", rounds=3)
    parser.add_argument("--device", default="cuda", help="(default %(default)s)")
    parser.add_argument("--preset", default="100m", help="shape of the trunk for the numbers (default %(default)s)")
    parser.add_argument("--only", choices=["checks", "numbers"], help="half of it")
    parser.add_argument("--peak", type=float, help="the device's FLOP/s in bfloat16, where it is not known")
    chosen = parser.parse_args(arguments)
    if chosen.device != "cpu" and not torch.cuda.is_available():
        raise SystemExit("no GPU is here; --device cpu --only checks tries the script itself")
    result: dict[str, Any] = prepare(chosen)
    checks = [] if chosen.only == "numbers" else list(run_checks(torch.device(chosen.device)))
    result["checks"] = [asdict(check) | {"good": check.good} for check in checks]
    rows = [[c.name, "-" if c.error is None else f"{c.error:.1e}", f"{c.bound:.0e}", "yes" if c.good else "NO", c.note] for c in checks]
    if checks:
        show("Against the CPU", ("what", "error", "bound", "good", ""), rows, result, None)
    if chosen.only != "checks":
        result["numbers"] = measure(chosen)
        show(
            "What the device gives", ("what", "measured"), [[name, text] for name, text in result["numbers"]["table"]], result, chosen.json
        )
    elif chosen.json:
        show("Against the CPU", (), [], result, chosen.json)
    if not all(check.good for check in checks):
        sys.exit(1)
    return result


def run_checks(device: torch.device) -> Iterator[Check]:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    two = torch.cuda.device_count() > 1
    for name, bound, check, reason in (
        ("attention, windows and documents, forward", 1e-5, attention_forward, ""),
        ("the same, gradients", 1e-4, attention_gradients, ""),
        ("losses of 4 training steps of 1 to 3 passes, NorMuon and fused Adam", 1e-4, training_losses, ""),
        ("losses with compiled blocks", 1e-4, compiled_losses, ""),
        ("losses in bfloat16", 5e-2, bfloat16_losses, ""),
        ("share of tokens that differ: Standard, Soft, Fused, exact", 0.0, decoding, ""),
        ("the same in fixed buffers", 0.0, decoding_in_buffers, ""),
        ("the same compiled, with CUDA graphs", 0.0, decoding_compiled, "" if device.type == "cuda" else "CUDA graphs need a GPU"),
        ("a converted model over two devices, 2 feedback passes", 1e-4, over_two_devices, "" if two else "needs two devices"),
    ):
        yield Check(name, None, bound, reason) if reason else tried(name, bound, check, device)


def tried(name: str, bound: float, check: Callable[[torch.device], float], device: torch.device) -> Check:
    begun = time.perf_counter()
    try:
        error: float | None = check(device)
        note = f"{time.perf_counter() - begun:.1f} s"
    except Exception as problem:  # one path that fails should not keep the others from being looked at
        error, note = None, f"failed: {type(problem).__name__}: {str(problem).splitlines()[0][:100]}"
    return Check(name, error, bound, note)


def attention_forward(device: torch.device) -> float:
    return max(attention(device, window)[0] for window in (None, 100))


def attention_gradients(device: torch.device) -> float:
    return max(attention(device, window)[1] for window in (None, 100))


def attention(device: torch.device, window: int | None) -> tuple[float, float]:
    """Errors of outputs and gradients, relative to the largest. Queries are fewer than keys, as in a pass that begins behind a prefix."""
    torch.manual_seed(0)
    queries, keys = 384, 512
    parts = [torch.randn(2, heads, length, 32, dtype=torch.float64) for heads, length in ((4, queries), (2, keys), (2, keys))]
    documents = (torch.arange(keys)[None] > torch.tensor([[200], [333]])).long()
    found = []
    for place, dtype, plan in (("cpu", torch.float64, dense_plan), (device, torch.float32, make_plan)):
        here = [part.to(place, dtype, copy=True).requires_grad_() for part in parts]
        out = attend(*here, plan(queries, keys, window, documents.to(place), torch.device(place)))
        out.square().sum().backward()
        found.append([out.detach(), *(part.grad for part in here)])
    errors = [float((one - other.cpu()).abs().max() / one.abs().max()) for one, other in zip(*found, strict=True)]
    return errors[0], max(errors[1:])


def tokens_of(rows: int, length: int) -> Tensor:
    return torch.randint(SHAPE.vocab_size, (rows, length), generator=torch.Generator().manual_seed(1))


def model_of(dtype: torch.dtype, device: Any) -> FullBandModel:
    torch.manual_seed(0)
    return FullBandModel(SHAPE).to(device, dtype)


def step_losses(device: Any, dtype: torch.dtype, compute: str = "float32", compiled: bool = False) -> Tensor:
    """Objectives of steps with 1, 2, 3 and 2 passes, updated in between; polar factors in the parameters' precision."""
    model = model_of(dtype, device)
    if compiled:
        for block in model.trunk.blocks:
            block.compile(dynamic=False)
    optimizer = Optimizer(model, OptimConfig(warmup_steps=1), 8)
    for group in optimizer.optimizers["normuon"].param_groups:
        group["polar_dtype"] = dtype
    tokens_BT = tokens_of(4, 256).to(device)
    losses = []
    for number, prefixes in enumerate(([], [64], [64, 128], [64])):
        optimizer.zero_grad()
        with autocast(torch.device(device), compute):
            outputs = multipass(model, tokens_BT, list(prefixes))
            loss = multipass_loss(outputs, model.trunk.head_weight, tokens_BT.roll(-1, 1), tokens_BT.numel()).objective
        loss.backward()
        optimizer.step(number)
        losses.append(loss.detach().double().cpu())
    return torch.stack(losses)


def training_losses(device: torch.device) -> float:
    return float((step_losses("cpu", torch.float64) - step_losses(device, torch.float32)).abs().max())


def compiled_losses(device: torch.device) -> float:
    return float((step_losses("cpu", torch.float64) - step_losses(device, torch.float32, compiled=True)).abs().max())


def bfloat16_losses(device: torch.device) -> float:
    return float((step_losses("cpu", torch.float64) - step_losses(device, torch.float32, "bfloat16")).abs().max())


def steady(device: Any, dtype: torch.dtype) -> FullBandModel:
    """Near-isometric weights, in which rounding does not grow from token to token: greedy tokens can be compared."""
    model = model_of(torch.float64, "cpu").eval()
    torch.manual_seed(2)
    torch.nn.init.normal_(model.trunk.embedding.weight)
    torch.nn.init.orthogonal_(model.connection.mergers[0].state.weight)
    torch.nn.init.normal_(model.connection.mergers[0].gate.weight, std=0.05)
    return model.to(device, dtype)


def differing(device: torch.device, **settings: Any) -> float:
    prompts = [row[: 5 + 9 * number].tolist() for number, row in enumerate(tokens_of(4, 40))]
    here, there = steady("cpu", torch.float64), steady(device, torch.float32)
    wrong = total = 0
    for mode, passes in (("standard", None), ("soft", None), ("fused", 1), ("fused", "exact")):
        right = generate(here, prompts, mode, passes, max_new_tokens=24)
        found = generate(there, prompts, mode, passes, max_new_tokens=24, **settings)
        pairs = [pair for one, other in zip(right, found, strict=True) for pair in zip(one.tokens, other.tokens, strict=True)]
        wrong, total = wrong + sum(one != other for one, other in pairs), total + len(pairs)
    return wrong / total


def decoding(device: torch.device) -> float:
    return differing(device)


def decoding_in_buffers(device: torch.device) -> float:
    return differing(device, static=True)


def decoding_compiled(device: torch.device) -> float:
    return differing(device, compile=True)


@torch.no_grad()
def over_two_devices(device: torch.device) -> float:
    from transformers import LlamaConfig, LlamaForCausalLM

    from fullband.hf import attach

    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 512}
    whole = attach(LlamaForCausalLM(LlamaConfig(**shape)).eval(), fusion="gated")
    split = copy.deepcopy(whole)
    from accelerate import dispatch_model, infer_auto_device_map

    memory = {0: "300KB", 1: "1GB"}
    split = dispatch_model(split, infer_auto_device_map(split, memory, no_split_module_classes=["LlamaDecoderLayer"]))
    tokens = tokens_of(2, 40)
    one, other = whole(tokens, feedback_passes=2).logits, split(tokens.to(0), feedback_passes=2).logits.cpu()
    return float((one - other).abs().max() / one.abs().max())


def measure(chosen: argparse.Namespace) -> dict[str, Any]:
    torch.backends.cuda.matmul.allow_tf32 = True
    device, shape = torch.device(chosen.device), trunk_preset(chosen.preset)
    rows: list[tuple[str, str]] = []
    numbers: dict[str, Any] = {"training": training_speed(chosen, device, shape)}
    for name, one in numbers["training"].items():
        share = "MFU unknown (--peak)" if one["mfu"] is None else f"MFU {100 * one['mfu']:.0f}%"
        rows.append((f"training, {name}", f"{one['tokens_per_second']:,.0f} tokens/s, {share}, peak {one['peak_bytes'] / 2**30:.1f} GiB"))
    with on(device):
        asked = argparse.Namespace(**vars(chosen) | {"batch": [1, 16], "prompt": 32, "new": 32, "long_prompt": 256, "compile": True})
        numbers["decoding"] = decode.measure(asked, chosen.preset)
    found = numbers["decoding"]
    rows.append(("decoding, Soft / Standard a token", f"{found['soft_over_standard']['ratio']:.3f}x"))
    rows.append(("first token after 256, Fused / Standard", f"{found['first_token']['ratio']:.2f}x"))
    for batch, ways in found["batches"].items():
        speeds = {way: one["tokens_per_second"] for way, one in ways.items() if isinstance(one, dict) and "tokens_per_second" in one}
        rows.append((f"decoding, batch {batch}, tokens/s", ", ".join(f"{way} {speed:,.0f}" for way, speed in speeds.items())))
    numbers["vllm"] = speed_in_vllm(chosen)
    rows.append(("in vLLM", numbers["vllm"]["text"]))
    return numbers | {"table": rows}


@contextmanager
def on(device: torch.device) -> Iterator[None]:
    """What is made inside is made there."""
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device("cpu")


def training_speed(chosen: argparse.Namespace, device: torch.device, shape: TrunkConfig) -> dict[str, Any]:
    """One pass, and two passes from p = T/2 on, in bfloat16 over float32 parameters, updates included. FLOPs of all passes, those of
    positions that prefix reuse leaves out not counted."""
    length = min(1024, shape.context)
    model = FullBandModel(shape).to(device)
    optimizer = Optimizer(model, OptimConfig(), 10**6)
    tokens_BT = torch.randint(shape.vocab_size, (8 if device.type == "cuda" else 1, length), device=device)
    plain, fused = (pass_flops(shape, PAPER, length, fused).training for fused in (False, True))
    card = torch.cuda.get_device_name().lower().replace(" ", "") if device.type == "cuda" else ""
    peak = chosen.peak or next((gpu.flops for name, gpu in GPUS.items() if name in card), None)
    found = {}
    for name, prefixes, flops in (("1 pass", [], plain), ("2 passes, p = T/2", [length // 2], plain + fused / 2)):

        def step(prefixes: list[int] = prefixes) -> None:
            with autocast(device, "bfloat16"):
                train.decoder_microbatch(model, tokens_BT, prefixes)
            optimizer.step(1)
            optimizer.zero_grad()

        seconds = []
        for _ in range(3 + chosen.rounds):
            begun = time.perf_counter()
            step()
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begun)
        rate = tokens_BT.numel() / min(seconds[3:])
        found[name] = {
            "tokens_per_second": rate,
            "mfu": None if peak is None else rate * flops / peak,
            "peak_bytes": peak_bytes(step, str(device)),
            "rows": tokens_BT.shape[0],
            "length": length,
        }
    return found


def speed_in_vllm(chosen: argparse.Namespace) -> dict[str, Any]:
    try:
        result = in_vllm.main(["--rounds", str(chosen.rounds), "--preset", chosen.preset, "--compile"])
    except ImportError:
        return {"text": "not installed here"}
    except Exception as problem:
        return {"text": f"failed: {type(problem).__name__}: {str(problem).splitlines()[0][:120]}"}
    rates = result["tokens_per_second"]
    return result | {"text": f"{rates['soft_1']:,.0f} tokens/s for one request, {rates['soft_16']:,.0f} for sixteen"}


if __name__ == "__main__":
    main()
