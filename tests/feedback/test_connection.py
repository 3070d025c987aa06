"""Any connection carries: where a state is taken, how many are carried and where they enter changes no law."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fullband import costs
from fullband.config import Recipe
from fullband.decode import prefill, prefill_after, prefill_prefix, rebuild_cache, resolve_mode, step
from fullband.decode.speculate import LookAhead, Speculation, SpeculationReport
from fullband.decode.static import StaticStepper
from fullband.feedback.by_passes import iterate_passes, top_states
from fullband.feedback.loss import multipass_loss
from fullband.feedback.multipass import Jitter, multipass, multipass_reference
from fullband.feedback.passes import below, plain_pass
from fullband.feedback.state import DecodeState
from fullband.feedback_config import ConnectionConfig
from fullband.layout import Layout
from fullband.model import FullBandModel

T, LAYERS = 12, 4
CONNECTIONS: dict[str, dict[str, Any]] = {
    "gated at depth 1": dict(entry=1),
    "residual at the middle": dict(fusion="residual", entry="middle"),
    "recirculation": dict(fusion="recirculation", source=3, entry=1),
    "a window": dict(carried_window=3),
    "a window at depth 2": dict(carried_window=2, entry=2),
    "two entries": dict(entry=[0, 2]),
    "two entries above the input": dict(fusion="add", entry=[1, 3]),
    "a source below the entry": dict(source=1, entry=2),
    "sources on both sides": dict(source=[0, 1, 3, 4], entry=2),
    "the merged stream itself": dict(source=1, entry=1),
}
each = pytest.mark.parametrize("connection", CONNECTIONS.values(), ids=CONNECTIONS)


@pytest.fixture
def made(isometric_model: Callable[..., FullBandModel]) -> Callable[..., FullBandModel]:
    return lambda connection, **shape: isometric_model(**({"layers": LAYERS, "full_every": 2} | connection | shape))


def same(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


@torch.no_grad()
def recurrence(model: FullBandModel, tokens: Tensor, plain: int = 1) -> Tensor:
    """Top states of one sequence, position by position, each time over the whole sequence through the whole stack: no cache, no cut. The
    first `plain` positions are without feedback."""
    connection, trunk = model.connection, model.trunk
    entry, sources = trunk.entry, trunk.sources
    trunk.connect(0, sources)
    embedded = trunk.below(tokens).x_BTD
    states: list[Tensor] = []  # that are carried on, of the positions so far
    try:
        for t in range(tokens.shape[1]):

            def merged(place: int, x: Tensor, t: int = t) -> Tensor:
                out = x.clone()
                for position in range(plain, t + 1):
                    known = states[max(0, position - connection.window) : position]
                    shares = connection.ages[: len(known)].softmax(0) if connection.window > 1 else torch.ones(1)
                    carried = sum(share * state for share, state in zip(shares, reversed(known), strict=True))
                    here = slice(position, position + 1)
                    out[:, here] = connection.merge(x[:, here], carried[:, None], trunk, place)
                return out

            merges = {depth: (lambda x, place=place: merged(place, x)) for place, depth in enumerate(connection.entries)}
            x = embedded[:, : t + 1]
            x = merges.pop(0)(x) if 0 in merges else x
            output = trunk.above(x, merges=merges)
            states.append(connection.take(output, ())[:, -1])
    finally:
        trunk.connect(entry, sources)
    return output.top_BTD


@torch.no_grad()
@each
def test_exact_is_the_recurrence_over_the_whole_stack(made: Any, connection: dict[str, Any]) -> None:
    model, tokens = made(connection), torch.randint(23, (2, 8))
    found = top_states(model, tokens, "exact")
    same(found, recurrence(model, tokens))
    assert (found - top_states(model, tokens))[:, 1:].norm(dim=-1).min() > 1e-4


@torch.no_grad()
@each
def test_law_1_without_feedback_it_is_the_trunk(made: Any, connection: dict[str, Any]) -> None:
    model, tokens = made(connection), torch.randint(23, (2, T))
    plain = made({}).trunk
    plain.load_state_dict(model.trunk.state_dict())
    assert torch.equal(top_states(model, tokens), plain.above(plain.below(tokens).x_BTD).top_BTD)


@torch.no_grad()
@each
def test_law_2_passes_become_the_recurrence(made: Any, packed_rows: Any, connection: dict[str, Any]) -> None:
    model, rows = made(connection), packed_rows([[5, 7], [12]])
    layout = Layout(rows.positions, rows.documents)
    exact = top_states(model, rows.tokens, "exact", layout)
    inputs, _ = below(model, rows.tokens, layout)
    for n, states in zip(range(1, T + 1), iterate_passes(model, inputs), strict=False):
        same(states[rows.positions < n], exact[rows.positions < n])
    same(states, exact)
    alone = top_states(model, rows.tokens[:1, 5:], "exact")  # law 5: a packed document is as if alone
    same(exact[:1, 5:], alone)


@each
def test_law_3_prefix_reuse_is_the_naive_passes(made: Any, packed_rows: Any, connection: dict[str, Any]) -> None:
    model, rows = made(connection), packed_rows([[9, 3], [12], [4, 8]])
    found = []
    for compute, options in ((multipass, {}), (multipass, {"pieces": True}), (multipass_reference, {})):
        model.zero_grad()
        jitter = Jitter(0.1, seed=3, step=11, rows=torch.arange(3))
        outputs = compute(model, rows.tokens, [2, 7], Layout(rows.positions, rows.documents), jitter, **options)
        multipass_loss(outputs, model.trunk.head_weight, rows.targets, 20.0, 0.7, 0.1).objective.backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert found[2].keys() >= {name for name, p in model.named_parameters() if "connection" in name}
    for fast in found[:2]:
        assert fast.keys() == found[2].keys()
        for name, gradient in found[2].items():
            torch.testing.assert_close(fast[name], gradient, rtol=0, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


def test_what_lies_below_the_entry_runs_once_forward_and_backward(made: Any) -> None:
    model, tokens = made(dict(entry=2)), torch.randint(23, (2, T))
    forward, backward = [0] * LAYERS, [0] * LAYERS
    for depth, block in enumerate(model.trunk.blocks):
        block.register_forward_hook(lambda *_, depth=depth: forward.__setitem__(depth, forward[depth] + 1))
        block.glu.register_full_backward_hook(lambda *_, depth=depth: backward.__setitem__(depth, backward[depth] + 1))
    outputs = multipass(model, tokens, [2, 7])
    sum(output.states.sum() for output in outputs).backward()
    assert forward == backward == [1, 1, 3, 3]
    assert top_states(model, tokens, 4) is not None and forward == [2, 2, 8, 8]


@torch.no_grad()
@pytest.mark.parametrize("mode", ["soft", "fused-2", "fused-exact"])
@each
def test_law_4_decoding_is_computing_anew(made: Any, connection: dict[str, Any], mode: str) -> None:
    """Ragged prompts in chunks, then steps, in growing and in fixed buffers, alone and joined into a running batch."""
    model, tokens = made(connection), torch.randint(23, (2, T))
    name, _, passes = mode.partition("-")
    chosen = resolve_mode(name, "exact" if passes == "exact" else int(passes) if passes else None)
    prompts = [tokens[0, :7].tolist(), tokens[1, :4].tolist()]
    whole = [prefill(model, [prompt], chosen.feedback_passes) for prompt in prompts]
    state = prefill(model, prompts, chosen.feedback_passes, chunk=3)
    joined = DecodeState.join([prefill(model, [prompt], chosen.feedback_passes, keep="window") for prompt in prompts])
    shared = prefill_after(model, prefill_prefix(model, prompts[0][:3], chosen.feedback_passes), [prompts[0][3:], [9]])
    same(shared.top_BD[:1], whole[0].top_BD)
    stepper = StaticStepper(model, state, T, chosen)
    for i in range(4):
        new = torch.tensor([tokens[0, 7 + i], tokens[1, 4 + i]])
        whole = [step(model, one, new[row : row + 1], chosen) for row, one in enumerate(whole)]
        alone = torch.cat([one.top_BD for one in whole])
        state, joined = step(model, state, new, chosen), step(model, joined, new, chosen)
        for found in (state.top_BD, joined.top_BD, stepper(new)):
            same(found, alone)
    if mode == "fused-exact":
        same(alone[:1], top_states(model, tokens[:1, :11], "exact")[:, -1])
    if mode == "soft":
        same(alone[:1], recurrence(model, tokens[:1, :11], plain=7)[:, -1])
    rebuilt = rebuild_cache(model, prompts[0], tokens[0, 7:11].tolist(), chosen.name, None if name == "soft" else chosen.feedback_passes)
    same(rebuilt.state.top_BD, whole[0].top_BD)


@torch.no_grad()
@each
def test_drafts_change_nothing(made: Any, connection: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The head is made to expect what is drafted, so that drafts are kept as far as states confirm them."""
    model, text = made(connection), [3, 4, 5, 3, 4, 5, 3]
    mode, plain, report = resolve_mode("soft"), prefill(model, [text]), SpeculationReport()
    drafted, ahead = plain, LookAhead(model, mode, Speculation(draft_length=3, tolerance=0.0), text, report)
    monkeypatch.setattr(model.trunk, "head", lambda top: torch.nn.functional.one_hot(torch.tensor([*ahead._block[1:], 0]), 23))
    for token in (4, 5, 3, 9, 4, 5):
        plain, drafted = step(model, plain, torch.tensor([token]), mode), ahead.feed(drafted, token)
        same(drafted.top_BD, plain.top_BD)
    assert report.checks and report.kept


@torch.no_grad()
def test_a_step_back_touches_the_upper_cache_alone(made: Any) -> None:
    """The two caches have lengths of their own: a pass that is run again needs nothing of the lower one."""
    model, tokens = made(dict(entry=2)), torch.randint(23, (1, T))
    inputs, lower = below(model, tokens, keep="all")
    output = plain_pass(model, inputs, keep="all")
    assert len(lower.layers) == 2 and len(output.cache.layers) == 2 and lower.length == output.cache.length == T
    again = plain_pass(model, inputs[5:], output.cache.rollback(5), keep="all")
    same(again.top_BTD, output.top_BTD[:, 5:])
    assert lower.length == T


@torch.no_grad()
@pytest.mark.parametrize("entry", [0, 2])
def test_embeddings_enter_as_tokens_do(made: Any, entry: int) -> None:
    model, tokens = made(dict(entry=entry)), torch.randint(23, (2, T))
    assert torch.equal(top_states(model, model.trunk.embeddings(tokens), 2), top_states(model, tokens, 2))
    expected = torch.softmax(torch.randn(2, T, 23, dtype=torch.float64), -1) @ model.trunk.head_weight  # no token's
    assert top_states(model, expected, 1).isfinite().all()


@pytest.mark.parametrize("entry", [0, 1, 2])
def test_merged_inputs_have_the_scale_of_plain_ones(made: Any, entry: int) -> None:
    model = made(dict(entry=entry))
    x = below(model, torch.randint(23, (2, 6)))[0].x_BTD
    merged = model.connection.merge(x, 50 * torch.randn_like(x), model.trunk)
    torch.testing.assert_close(merged.square().mean(-1), x.square().mean(-1), rtol=0.2 if entry == 0 else 1e-9, atol=0)


@each
def test_it_is_saved_and_counted(made: Any, connection: dict[str, Any], tmp_path: Path) -> None:
    model, tokens = made(connection), torch.randint(23, (1, 5))
    model.save(tmp_path)
    loaded = FullBandModel.load(tmp_path, dtype=torch.float64)
    assert loaded.config == model.config and torch.equal(top_states(loaded, tokens, 2), top_states(model, tokens, 2))
    counted = costs.count_parameters(model.config.trunk, model.config.connection)
    assert counted.total == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("source", ["top", "mix"])
def test_a_model_saved_before_connections_loads(made: Any, source: str, tmp_path: Path) -> None:
    model, tokens = made(dict(source=source)), torch.randint(23, (1, 5))
    model.save(tmp_path)
    (tmp_path / "manifest.json").unlink()
    config = json.loads((tmp_path / "config.json").read_text())
    trunk = config["trunk"] | {"fed_back": source}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "fullband", "trunk": trunk, "fusion": "gated"}))
    older = {
        name.replace("connection.mergers.0.", "fusion.").replace("connection.mix", "trunk.fed_back.mix"): tensor
        for name, tensor in load_file(tmp_path / "model.safetensors").items()
    }
    assert any(name.startswith("fusion.") for name in older)
    save_file(older, tmp_path / "model.safetensors")
    loaded = FullBandModel.load(tmp_path, dtype=torch.float64)
    assert torch.equal(top_states(loaded, tokens, 2), top_states(model, tokens, 2))


def test_a_recipe_written_before_connections_loads() -> None:
    raw = {"name": "x", "model": {"preset": "tiny", "fusion": "add", "trunk": {"fed_back": "mix"}}, "train": {"steps": 1, "batch_rows": 1}}
    recipe = Recipe.model_validate(raw)
    assert recipe.connection == ConnectionConfig(fusion="add", source="mix")
    assert raw["model"] == {"preset": "tiny", "fusion": "add", "trunk": {"fed_back": "mix"}}, "what was given was changed"
    assert Recipe.model_validate(recipe.model_dump()).connection == recipe.connection


@pytest.mark.parametrize(
    ("connection", "message"),
    [
        (dict(entry=4), r"entry depth must be .*below the number of layers, 4, got 4"),
        (dict(entry=[0, 4]), r"entry depth must be below the number of layers, 4, got 4"),
        (dict(source=5), r"source depths must ascend within 0 … 4, got 5"),
        (dict(source=[3, 1]), r"depths must ascend, got \[3, 1\]"),
        (dict(entry=[2, 2]), r"depths must ascend, got \[2, 2\]"),
    ],
)
def test_depths_that_cannot_be_are_refused(made: Any, connection: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made(connection)
