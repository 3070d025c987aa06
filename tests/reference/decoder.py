"""The App. A decoder once more, from the paper's text: one row, layer, position and head at a time. Nothing comes from the library."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / math.sqrt(float((x * x).mean()) + eps) * weight


def turn(x: Tensor, position: int, base: float) -> Tensor:
    """RoPE as complex numbers: pair i of a head turns by position · base^(-2i/d)."""
    half = len(x) // 2
    angles = torch.tensor([position * base ** (-2 * i / len(x)) for i in range(half)], dtype=x.dtype)
    turned = torch.complex(x[:half], x[half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag])


def embed(state: dict[str, Tensor], config: Any, tokens: Tensor) -> Tensor:
    rows = [[rms(state["embedding.weight"][t], state["input_norm.weight"], config.norm_eps) for t in row] for row in tokens.tolist()]
    return torch.stack([torch.stack(row) for row in rows])


def decoder_states(state: dict[str, Tensor], config: Any, inputs: Tensor, positions: Tensor | None, documents: Tensor | None) -> Tensor:
    """Top states [B, T, D] of stack inputs [B, T, D]; `state` is the trunk's state_dict."""
    rows = []
    for b in range(inputs.shape[0]):
        places = list(range(inputs.shape[1])) if positions is None else positions[b].tolist()
        owners = [0] * inputs.shape[1] if documents is None else documents[b].tolist()
        x = list(inputs[b])
        for number in range(1, config.layers + 1):
            weights = {name.removeprefix(f"blocks.{number - 1}."): w for name, w in state.items() if f"blocks.{number - 1}." in name}
            window = None if number % config.full_every == 0 else config.window
            x = layer(weights, config, x, places, owners, window)
        rows.append(torch.stack([rms(h, state["final_norm.weight"], config.norm_eps) for h in x]))
    return torch.stack(rows)


def layer(w: dict[str, Tensor], config: Any, x: list[Tensor], places: list[int], owners: list[int], window: int | None) -> list[Tensor]:
    eps, size = config.norm_eps, config.head_dim or config.width // config.heads
    scale = 1 / math.sqrt(2 * config.layers)
    normed = [rms(h, w["attention_norm_in.weight"], eps) for h in x]
    out = []
    for t, h in enumerate(x):
        heads = []
        for head in range(config.heads):
            group = head // (config.heads // config.kv_heads)
            mine, theirs = slice(head * size, (head + 1) * size), slice(group * size, (group + 1) * size)
            query = turn(
                rms(w["attention.query.weight"][mine] @ normed[t], w["attention.query_norm.weight"], eps), places[t], config.rope_base
            )
            seen = [s for s in range(t + 1) if owners[s] == owners[t] and (window is None or t - s < window)]
            scores, values = [], []
            for s in seen:
                key = rms(w["attention.key.weight"][theirs] @ normed[s], w["attention.key_norm.weight"], eps)
                scores.append(query @ turn(key, places[s], config.rope_base) / math.sqrt(size))
                values.append(w["attention.value.weight"][theirs] @ normed[s])
            shares = torch.softmax(torch.stack(scores), dim=0)
            gate = torch.sigmoid(w["attention.gate.weight"][head] @ normed[t])
            heads.append(gate * sum(share * value for share, value in zip(shares, values, strict=True)))
        h = h + scale * rms(w["attention.output.weight"] @ torch.cat(heads), w["attention_norm_out.weight"], eps)
        inner = rms(h, w["glu_norm_in.weight"], eps)
        gated = w["glu.gate.weight"] @ inner
        branch = w["glu.down.weight"] @ (gated * torch.sigmoid(gated) * (w["glu.up.weight"] @ inner))
        out.append(h + scale * rms(branch, w["glu_norm_out.weight"], eps))
    return out


def gated_input(model_state: dict[str, Tensor], eps: float, e: Tensor, h: Tensor) -> Tensor:
    """Eq. 4 and the input norm, for one position."""
    fused = (model_state["connection.mergers.0.state.weight"] @ h) * torch.sigmoid(model_state["connection.mergers.0.gate.weight"] @ e)
    return rms(fused, model_state["trunk.input_norm.weight"], eps)


def trunk_state(model_state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("trunk."): w for name, w in model_state.items() if name.startswith("trunk.")}


def passes(
    model: Any, tokens: Tensor, prefixes: list[int], positions: Tensor, documents: Tensor | None, noise: list[Tensor]
) -> list[Tensor]:
    """States of passes 1 … K by Listing 3, one input at a time: e where t ≤ p_k or a document starts, else e ⊗ (h_{t-1} + noise)."""
    state, config = model.state_dict(), model.config.trunk
    e = embed(trunk_state(state), config, tokens)
    states = [decoder_states(trunk_state(state), config, e, positions, documents)]
    for k, p in enumerate(prefixes, start=2):
        inputs = e.clone()
        for b in range(e.shape[0]):
            for t in range(p + 1, e.shape[1]):
                if positions[b, t] != 0:
                    inputs[b, t] = gated_input(state, config.norm_eps, e[b, t], states[-1][b, t - 1] + noise[k - 2][b, t])
        states.append(decoder_states(trunk_state(state), config, inputs, positions, documents))
    return states


def sequential(model: Any, tokens: Tensor) -> Tensor:
    """Eq. 3 for single-document rows: every position waits for the one before it, and everything before it is computed again."""
    state, config = model.state_dict(), model.config.trunk
    e = embed(trunk_state(state), config, tokens)
    inputs = e.clone()
    for t in range(1, e.shape[1]):
        h = decoder_states(trunk_state(state), config, inputs[:, :t], None, None)[:, -1]
        for b in range(e.shape[0]):
            inputs[b, t] = gated_input(state, config.norm_eps, e[b, t], h[b])
    return decoder_states(trunk_state(state), config, inputs, None, None)
