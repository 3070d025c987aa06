"""Does a model fit the adapter? Decided by numbers, at attach time, and refused in one sentence."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fullband.layout import Layout
from fullband.trunk.huggingface.cache import HuggingFaceCache
from fullband.trunk.huggingface.layers import RecurrentPast
from fullband.trunk.huggingface.trunk import Adaptation, HuggingFaceTrunk

LENGTH = 12  # tokens a row is compared on
PADDING = 3  # slots of padding before it


@torch.no_grad()
def check_model(lm: PreTrainedModel) -> Adaptation:
    """How `lm` serves as a trunk.

    Compares, on a few tokens, the source's own logits with head(last hidden state) from embeddings: whole, in pieces, and padded.
    Raises ValueError in one sentence that names the model type and what does not fit.
    """
    try:
        _check_parts(lm)
        with evaluating(lm):
            return _compare(lm)
    except ValueError as error:
        kind = getattr(lm.config, "model_type", type(lm).__name__)
        raise ValueError(f"'{kind}' cannot be a trunk: {error}") from None


def _check_parts(lm: PreTrainedModel) -> None:
    if getattr(lm.config, "is_encoder_decoder", False):
        raise ValueError("it is an encoder-decoder, latent feedback needs a decoder-only causal LM")
    if hasattr(lm, "peft_config") or getattr(lm, "_hf_peft_config_loaded", False):
        raise ValueError(
            "it carries PEFT adapters; merge them first (merge_and_unload), or attach to the base model and add LoRA afterwards"
        )
    HuggingFaceCache.empty(lm.config)
    head = lm.get_output_embeddings()
    if head is None or not hasattr(head, "weight") or lm.base_model is lm:
        raise ValueError("it is no stack with a language-model head (load it with AutoModelForCausalLM)")
    if head.weight.device.type == "meta":
        raise ValueError("its weights are not loaded (they are on the meta device)")
    if getattr(head, "bias", None) is not None:
        raise ValueError("its head has a bias, so its logits are not head(last hidden state) alone")
    if getattr(lm.config.get_text_config(decoder=True), "final_logit_softcapping", None):
        raise ValueError("it caps its logits, so they are not head(last hidden state)")
    embedding = lm.get_input_embeddings()
    if not hasattr(embedding, "num_embeddings") or not hasattr(embedding, "embedding_dim"):
        raise ValueError(f"its embedding is no table of tokens (a {type(embedding).__name__})")
    accepted = inspect.signature(lm.base_model.forward).parameters
    for name in ("inputs_embeds", "position_ids", "attention_mask"):
        if name not in accepted:
            raise ValueError(f"its base model takes no {name}")


def _compare(lm: PreTrainedModel) -> Adaptation:
    embedding: Any = lm.get_input_embeddings()
    tokens = (torch.arange(2 * LENGTH, device=lm.device) * 7919 % embedding.num_embeddings).view(2, LENGTH)
    with _read_as("tokens"):
        expected = lm(input_ids=tokens, use_cache=False).logits
    hidden = lm.base_model(input_ids=tokens, use_cache=False).last_hidden_state
    for embedding_multiplier in dict.fromkeys((1.0, float(getattr(lm.config, "embedding_multiplier", None) or 1.0))):
        trunk = HuggingFaceTrunk(lm, Adaptation(embedding_multiplier))
        with _read_as("its embeddings without its tokens"):
            states = trunk.above(trunk.below(tokens).x_BTD).top_BTD
        if _near(states, hidden):
            break
    else:
        raise ValueError("its embeddings give other states than its tokens: each token has side inputs besides its embedding")
    if states.shape[-1] != trunk.width:
        raise ValueError(f"its embeddings are {trunk.width} wide and its states {states.shape[-1]}: the fusion takes both at one width")
    trunk.adaptation = _with_head(trunk, states, expected)
    if not torch.equal(found := trunk.head(states), expected) and torch.equal(lm(input_ids=tokens, use_cache=False).logits, expected):
        apart = float((found.double() - expected.double()).abs().max())
        raise ValueError(f"without feedback it would not be itself, bit for bit: logits differ by up to {apart:.1e}")
    with _read_as("inputs that are no token's embedding"):
        moved = trunk.above(trunk.below(tokens).x_BTD * (1 + 2**-7)).top_BTD
    if not (moved - hidden).abs().max() <= 0.5 * hidden.abs().max():
        raise ValueError("a small change of its inputs changes its states altogether")
    with _read_as("a text in pieces"):
        pieces, padded = _in_pieces(trunk, tokens, padding=0), _in_pieces(trunk, tokens, padding=PADDING)
    with _read_as("a text into a cache"):
        whole = trunk.above(trunk.below(tokens).x_BTD, keep="window").cache
    if not _near(pieces[0], hidden) or not _remember_alike(pieces[1], whole):
        raise ValueError("a text in pieces gives other states than the whole")
    if not _near(padded[0][:1], hidden[:1]):
        raise ValueError("a text gives other states after padding")
    return trunk.adaptation


@torch.no_grad()
def check_cut(trunk: HuggingFaceTrunk) -> None:
    """Whether the stack can be cut where the trunk is connected: what lies above the entry, run on what lies below gives, is the whole
    stack, at once and in pieces through the two caches. Raises ValueError in one sentence that names the model type."""
    if not trunk.entry and not trunk.sources:
        return
    tokens = (torch.arange(2 * LENGTH, device=trunk.device) * 7919 % trunk.vocab_size).view(2, LENGTH)
    with evaluating(trunk):
        try:
            with _read_as("a part of its layers"):
                expected = trunk.lm.base_model(input_ids=tokens, use_cache=False).last_hidden_state
                lower, upper, parts = None, None, []
                for here in (slice(0, 5), slice(5, 6), slice(6, LENGTH)):
                    x_BTD, _, lower = trunk.below(tokens[:, here], cache=lower, keep="window")
                    part, carried, upper = trunk.above(x_BTD, cache=upper, keep="window")
                    parts.append(part)
                whole = trunk.above(trunk.below(tokens).x_BTD).top_BTD
            if not (_near(whole, expected) and _near(torch.cat(parts, dim=1), expected)):
                raise ValueError(f"its layers below depth {trunk.entry} cannot be left out of a pass: use entry 0")
            above = sum(depth >= trunk.entry for depth in trunk.sources)
            if len(carried) != above or len(trunk.below(tokens).carried) != len(trunk.sources) - above:
                raise ValueError("the residual stream at the source depths cannot be seen: use the source 'top'")
        except ValueError as error:
            kind = getattr(trunk.lm.config, "model_type", type(trunk.lm).__name__)
            raise ValueError(f"'{kind}' cannot be connected so: {error}") from None


def _remember_alike(pieces: HuggingFaceCache, whole: HuggingFaceCache) -> bool:
    """Whether recurrent layers have the same states. What a layer forgets between pieces shows there whatever its part in the stack's
    output, and so in low precision too."""
    recurrent = [(a, b) for a, b in zip(pieces.layers, whole.layers, strict=True) if isinstance(a, RecurrentPast)]
    return all(_near(found, expected) for a, b in recurrent for found, expected in zip(a.tensors, b.tensors, strict=True))


def _in_pieces(trunk: HuggingFaceTrunk, tokens_BT: Tensor, padding: int) -> tuple[Tensor, Any]:
    """(states [B, T, D], the cache), with a piece of one slot among the padding and one among the tokens. Only the first row is padded; the
    others have tokens there."""
    tokens = torch.cat([tokens_BT[:, :padding], tokens_BT], dim=1)
    positions = torch.arange(tokens.shape[1], device=tokens.device).repeat(len(tokens), 1)
    documents = torch.zeros_like(positions)
    if padding:
        positions[0] = (positions[0] - padding).clamp(min=0)
        documents[0, :padding] = -1
    cuts = sorted({0, max(0, padding - 1), padding, padding + LENGTH // 3, padding + LENGTH // 3 + 1, padding + LENGTH})
    cache, parts = None, []
    for start, stop in pairwise(cuts):
        here = slice(start, stop)
        layout = Layout(positions[:, here], documents[:, here] if padding else None)
        part, _, cache = trunk.above(trunk.below(tokens[:, here]).x_BTD, layout, cache, keep="window")
        parts.append(part)
    return torch.cat(parts, dim=1)[:, padding:], cache


@contextmanager
def _read_as(what: str) -> Iterator[None]:
    """Errors that transformers raises in here say that the model cannot be run so."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        reason = str(error).split("\n")[0].split(". ")[0] or type(error).__name__
        raise ValueError(f"it cannot run {what} ({shorten(reason, 100, placeholder=' …')})") from None


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode; after the block every module is in the mode it was in."""
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in training.items():
            module.training = mode


def _with_head(trunk: HuggingFaceTrunk, states: Tensor, expected: Tensor) -> Adaptation:
    """The trunk's adaptation with the factor between head(states) and the source's logits, as the source computes it: of the numbers in its
    config that fit, and of their places, what gives its logits to the bit, else what comes nearest. Raises ValueError if nothing fits."""
    with _read_as("its states with its head"):
        plain = trunk.head(states)
    if plain.shape != expected.shape:
        raise ValueError("its logits are not head(last hidden state)")
    measured = float((plain.double() * expected.double()).sum() / plain.double().square().sum())
    tried = [trunk.adaptation]
    for value in _numbers(trunk.lm.config):
        if abs(value - measured) <= 2e-3 * abs(value):
            tried.append(replace(trunk.adaptation, logit_multiplier=value))
        if abs(1 / value - measured) <= 2e-3 * abs(measured):
            tried += [replace(trunk.adaptation, logit_divisor=value), replace(trunk.adaptation, state_divisor=value)]
    errors = {}
    for adaptation in (*tried, replace(trunk.adaptation, logit_multiplier=measured)):
        found = HuggingFaceTrunk(trunk.lm, adaptation).head(states)
        if torch.equal(found, expected):
            return adaptation
        if _near(found, expected):
            errors[adaptation] = float((found.double() - expected.double()).abs().max())
    if not errors:
        raise ValueError("its logits are not head(last hidden state)")
    return min(errors, key=lambda adaptation: errors[adaptation])


def _numbers(config: Any) -> list[float]:
    """The config's numbers, those it computes of others included, each once; first those that are called after logits or the head."""
    text = config.get_text_config(decoder=True)
    computed = [name for name, member in inspect.getmembers_static(type(text)) if isinstance(member, property)]
    named = vars(config) | vars(text) | {name: getattr(text, name, None) for name in computed}
    names = sorted(named, key=lambda name: not ("logit" in name or "head_multiplier" in name))
    values = [named[name] for name in names]
    return list(dict.fromkeys(float(value) for value in values if type(value) in (int, float) and value and math.isfinite(value)))


def _near(found: Tensor, expected: Tensor) -> bool:
    if found.shape != expected.shape:
        return False
    tolerance = 1e-4 if expected.dtype in (torch.float32, torch.float64) else 5e-2
    return bool((found - expected).abs().max() <= tolerance * expected.abs().max().clamp(min=1e-3))
