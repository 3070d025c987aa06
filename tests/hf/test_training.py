"""`forward(labels=…)` in training: Eq. 12 under the config's schedule, whoever the trainer is."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from fullband.decode import generate
from fullband.decode.answers import answer_logprobs
from fullband.hf import FullBandForCausalLM, attach
from fullband.hf.packing import describe_rows, shifted_targets
from fullband.hf.training import pass_schedule, token_objective
from reference.seam import embed, fused_pass, run_trunk

SHAPE = dict(
    vocab_size=61, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8
)
ALWAYS_TWO = [{"fraction": 1.0, "passes": {2: 1.0}}]


def make(schedule=ALWAYS_TWO, fusion="gated", **settings):
    torch.manual_seed(0)
    source = LlamaForCausalLM(LlamaConfig(**SHAPE, max_position_embeddings=64))
    training = {name: settings.pop(name) for name in ("training_steps", "training_seed") if name in settings}
    return attach(source, fusion=fusion, feedback={"schedule": schedule, **settings}, **training).double().train()


def tokens(rows=3, length=14, seed=1):
    return torch.randint(3, 61, (rows, length), generator=torch.Generator().manual_seed(seed))


def assert_same_gradients(one, other):
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, atol=1e-6, rtol=1e-6)


def test_the_loss_and_every_gradient_are_those_of_whole_passes_written_out():
    model, ids = make(jitter=0, training_seed=5), tokens()
    twin = copy.deepcopy(model)
    labels = ids.clone()
    labels[0, :6] = -100
    output = model(input_ids=ids, labels=labels)
    output.loss.backward()

    prefix = pass_schedule(twin).prefixes(0, 0, 2, ids.shape[1], torch.arange(3))[0]
    embeddings = embed(twin.trunk, ids)
    first, _ = run_trunk(twin.trunk, embeddings)
    second, _ = fused_pass(twin, embeddings, first, plain_BT=torch.arange(ids.shape[1])[None] <= prefix)

    def mean(states):
        return F.cross_entropy(twin.trunk.head(states)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    expected = mean(first) + mean(second)  # lambda / (K - 1) = 1
    expected.backward()
    torch.testing.assert_close(output.loss, expected, atol=1e-6, rtol=0)
    assert_same_gradients(model, twin)
    torch.testing.assert_close(output.logits, twin.trunk.head(first).detach())
    assert not output.logits.requires_grad


@pytest.mark.parametrize("passes", [1, 2, 3])
def test_the_objective_position_by_position_sums_to_the_loss_with_the_same_gradients(passes):
    ids = tokens()
    labels = ids.clone()
    labels[1, :7] = -100
    counted = int((labels[:, 1:] != -100).sum())
    whole, apart = make([{"fraction": 1.0, "passes": {passes: 1.0}}]), make([{"fraction": 1.0, "passes": {passes: 1.0}}])
    loss = whole(input_ids=ids, labels=labels, num_items_in_batch=counted).loss
    objective, states = token_objective(apart, ids, None, None, labels)
    torch.testing.assert_close(objective.sum() / counted, loss, atol=1e-6, rtol=0)
    torch.testing.assert_close(states, run_trunk(apart.trunk, embed(apart.trunk, ids))[0])
    assert not objective[1, :6].any() and not objective[:, -1].any()
    loss.backward()
    (objective.sum() / counted).backward()
    assert_same_gradients(whole, apart)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_trainers_own_head_over_the_model_keeps_the_passes(wrapped):
    """TRL replaces `forward`; its loss is the sum of minus its log-probabilities. Accelerate may wrap it once more."""
    trl = pytest.importorskip("trl.trainer.utils")
    ids = tokens()
    expected = make()(input_ids=ids, labels=ids, num_items_in_batch=1).loss
    model = make()
    plain = copy.deepcopy(model).eval()(input_ids=ids).logits
    trl.add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
    if wrapped:
        model.forward = functools.wraps(model.forward)(functools.partial(model.forward))
    output = model(input_ids=ids, labels=ids, fused_lm_head=True)
    torch.testing.assert_close(-output.log_probs.sum(), expected, atol=1e-6, rtol=0)
    assert torch.equal(output.is_top1.bool(), plain[:, :-1].argmax(dim=-1) == ids[:, 1:])
    output.log_probs.sum().backward()
    assert all(parameter.grad is not None for parameter in model.connection.parameters())
    scored = model.eval()(input_ids=ids, labels=ids, fused_lm_head=True).log_probs
    torch.testing.assert_close(scored, plain[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0].to(scored.dtype))


def test_the_split_into_microbatches_does_not_matter_when_the_trainer_counts_the_tokens():
    ids = tokens(rows=4)
    labels = ids.clone()
    labels[0, :9] = -100
    counted = (labels[:, 1:] != -100).sum()
    whole, split = make(jitter=0, prefix="off"), make(jitter=0, prefix="off")
    whole(input_ids=ids, labels=labels, num_items_in_batch=counted).loss.backward()
    for part in (slice(0, 1), slice(1, 4)):
        split(input_ids=ids[part], labels=labels[part], num_items_in_batch=counted).loss.backward()
    assert_same_gradients(whole, split)


def test_padding_on_either_side_changes_nothing():
    ids = tokens(rows=1, length=10)
    losses = []
    for left, right in ((0, 0), (3, 0), (0, 3), (2, 1)):
        model = make(jitter=0, prefix="off")
        padded = F.pad(ids, (left, right), value=0)
        mask = F.pad(torch.ones_like(ids), (left, right))
        losses.append(model(input_ids=padded, attention_mask=mask, labels=padded.masked_fill(mask == 0, -100)).loss)
    torch.testing.assert_close(torch.stack(losses), losses[0].expand(4), atol=1e-6, rtol=0)


def test_a_padding_free_batch_equals_its_documents_one_by_one():
    parts = [tokens(1, 5, 1), tokens(1, 7, 2), tokens(1, 4, 3)]
    counted = sum(part.shape[1] - 1 for part in parts)
    packed, alone = make(jitter=0, prefix="off"), make(jitter=0, prefix="off")
    ids = torch.cat(parts, dim=1)
    positions = torch.cat([torch.arange(part.shape[1]) for part in parts])[None]
    together = packed(input_ids=ids, position_ids=positions, labels=ids, num_items_in_batch=counted).loss
    apart = sum(alone(input_ids=part, labels=part, num_items_in_batch=counted).loss for part in parts)
    torch.testing.assert_close(together, apart, atol=1e-6, rtol=0)
    together.backward()
    apart.backward()
    assert_same_gradients(packed, alone)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_steps_are_counted_by_the_optimizers_own_steps(optimizer):
    model = make()
    stepping = optimizer(model.parameters(), lr=1e-3)
    seen = []
    for _ in range(3):
        for _ in range(2):  # gradient accumulation
            model(input_ids=tokens(), labels=tokens()).loss.backward()
            seen.append((int(model.progress.step), model.progress.accumulation))
        model.eval()(input_ids=tokens(), labels=tokens())  # evaluation is no step
        model.train()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        stepping.step()
        stepping.zero_grad()
    assert seen == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert int(model.state_dict()["progress.step"]) == 3  # the last one too, before anything is read again


def test_a_resumed_run_draws_what_an_uninterrupted_one_does(tmp_path):
    phases = [{"fraction": 0.5, "passes": {1: 0.5, 2: 0.5}}, {"fraction": 0.5, "passes": {2: 0.4, 3: 0.6}}]

    def train(model, steps):
        stepping = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for step in steps:
            loss = model(input_ids=tokens(seed=step), labels=tokens(seed=step)).loss
            loss.backward()
            stepping.step()
            stepping.zero_grad()
            losses.append(float(loss.detach()))
        return losses

    expected = train(make(phases, training_steps=8), range(8))
    first = make(phases, training_steps=8)
    train(first, range(4))
    first.save_pretrained(tmp_path)
    resumed = FullBandForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).train()
    assert train(resumed, range(4, 8)) == expected[4:]


def test_a_step_of_one_pass_still_touches_the_fusion():
    """DistributedDataParallel's gradients are silently wrong if a parameter takes part in some steps only."""
    model = make([{"fraction": 1.0, "passes": {1: 1.0}}])
    model(input_ids=tokens(), labels=tokens()).loss.backward()
    for parameter in model.connection.parameters():
        assert parameter.grad is not None and not parameter.grad.any()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fusion_warmup": 3}, "config.feedback.fusion_warmup: needs `fullband train`"),
        ({"adaptive": {}}, "config.feedback.adaptive: needs `fullband train`"),
        ({"schedule": "paper-200b"}, "config.training_steps: the schedule has several phases"),
        ({"connection": {"window": 2}}, "config.feedback.connection: the model has its connection already"),
        ({"jitterr": 0.1}, "config.feedback: jitterr: unknown key; did you mean 'jitter'"),
    ],
)
def test_settings_that_forward_cannot_follow_are_refused_by_name(settings, message):
    model = make()
    model.config.feedback = settings
    with pytest.raises(ValueError, match=message):
        model(input_ids=tokens(), labels=tokens())


def test_without_settings_every_step_feeds_back_once():
    model = make()
    model.config.feedback = None
    schedule = pass_schedule(model)
    assert [schedule.passes(step) for step in range(5)] == [2] * 5 and schedule.config.jitter == 0.02


def test_forward_without_labels_scores_an_answer_as_it_was_generated():
    model = make().eval()
    prompt = tokens(1, 6)[0].tolist()
    answer = generate(model, [prompt], "soft", max_new_tokens=7)[0].tokens
    model.config.score_as_generated, model.config.feedback_passes = True, "exact"
    ids = torch.tensor([[0, 0, *prompt, *answer, 0]])  # padded on both sides, as trainers of policies do
    mask = torch.tensor([[0, 0, *[1] * 13, 0]])

    def kept():
        return model(input_ids=ids, attention_mask=mask, logits_to_keep=len(answer) + 2).logits[:, :-2]

    logits = kept()
    found = logits[0].log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]
    (expected,) = answer_logprobs(model, [prompt], [answer])["exact"]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    model.config.score_as_generated, model.config.feedback_passes = False, 0
    assert (kept() - logits).abs().max() > 1e-4


@pytest.mark.parametrize(
    ("mask", "positions", "expected_positions", "expected_documents"),
    [
        (None, None, None, None),
        ([[1, 1, 1, 1]], None, None, None),
        ([[0, 0, 1, 1]], None, [[0, 0, 0, 1]], [[-1, -1, 0, 0]]),
        ([[1, 1, 0, 0]], None, [[0, 1, 1, 1]], [[0, 0, -1, -1]]),
        (None, [[0, 1, 2, 3]], [[0, 1, 2, 3]], None),
        (None, [[0, 1, 0, 1]], [[0, 1, 0, 1]], [[0, 0, 1, 1]]),
        ([[1, 1, 1, 0]], [[0, 1, 0, 0]], [[0, 1, 0, 0]], [[0, 0, 1, -1]]),
    ],
)
def test_rows_are_described_as_fullband_counts_them(mask, positions, expected_positions, expected_documents):
    def tensor(value):
        return None if value is None else torch.tensor(value)

    found = describe_rows(torch.zeros(1, 4, dtype=torch.long), tensor(mask), tensor(positions))
    for value, expected in zip((found.positions_BT, found.documents_BT), (expected_positions, expected_documents), strict=True):
        assert (value is None) == (expected is None)
        assert value is None or value.tolist() == expected


def test_nothing_is_wanted_across_documents():
    labels = torch.tensor([[5, 6, 7, 8]])
    assert shifted_targets(labels, torch.tensor([[0, 0, 1, -1]])).tolist() == [[6, -100, -100, -100]]
    assert shifted_targets(labels, None).tolist() == [[6, 7, 8, -100]]


def test_a_mask_of_another_shape_is_refused():
    with pytest.raises(ValueError, match="give a 2-D mask"):
        describe_rows(torch.zeros(1, 4, dtype=torch.long), torch.ones(1, 1, 4, 4))


def test_a_copied_model_counts_for_itself():
    model = make()
    model(input_ids=tokens(), labels=tokens()).loss.backward()
    twin = copy.deepcopy(model)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model(input_ids=tokens(), labels=tokens())
    twin(input_ids=tokens(), labels=tokens())
    assert (int(model.progress.step), model.progress.accumulation) == (1, 0)
    assert (int(twin.progress.step), twin.progress.accumulation) == (0, 1)
