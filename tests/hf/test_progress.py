"""Steps are counted whoever trains, and a resumed run goes on where it was whoever saved it."""

import copy
import gc

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer

from fullband.hf import FullBandForCausalLM, attach
from hf.test_trainers import arguments, rows

SHAPE = dict(
    vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8
)
PHASES = [{"fraction": 0.5, "passes": {1: 1.0}}, {"fraction": 0.5, "passes": {2: 0.5, 3: 0.5}}]
IDS = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(0))


def make(steps=6, **feedback):
    torch.manual_seed(0)
    source = LlamaForCausalLM(LlamaConfig(**SHAPE, max_position_embeddings=64, eos_token_id=2, pad_token_id=0, bos_token_id=1))
    return attach(source, fusion="gated", feedback={"schedule": PHASES, **feedback}, training_steps=steps, training_seed=4).train()


def forward(model):
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return float(loss.detach())


def step(model, *optimizers):
    """One training step; which step of the schedule its forward took."""
    taken = int(model.progress.step)
    forward(model)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return taken


def test_an_optimizer_of_some_parameters_counts():
    """Not the first one: the embedding is often left out, or has an optimizer of its own."""
    model = make()
    optimizer = torch.optim.SGD(list(model.parameters())[3:5], lr=0.1)
    assert [step(model, optimizer) for _ in range(3)] == [0, 1, 2]


def test_two_optimizers_that_step_together_are_one_step():
    model = make()
    parameters = list(model.parameters())
    both = torch.optim.SGD(parameters[::2], lr=0.1), torch.optim.AdamW(parameters[1::2], lr=0.1)
    assert [step(model, *both) for _ in range(3)] == [0, 1, 2]
    assert [step(model, optimizer) for optimizer in both] == [3, 4]  # in turn, each after a forward of its own


def test_the_count_is_in_the_optimizers_state():
    """As after PEFT: the model's own tensors are as before training, the optimizer is loaded before the first forward."""
    model = make()
    optimizer = torch.optim.AdamW(model.connection.parameters(), lr=0.1)
    for _ in range(4):
        step(model, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    resumed = make()
    again = torch.optim.AdamW(resumed.connection.parameters(), lr=0.1)
    again.load_state_dict(saved)
    assert step(resumed, again) == 0 and int(resumed.progress.step) == 5  # it was at 4 when the forward began
    assert not any("fullband" in str(key) for key in again.param_groups[0])  # nothing of ours stands in a live optimizer
    again.load_state_dict(saved)  # back to the checkpoint, in the same process
    forward(resumed)
    assert int(resumed.progress.step) == 4


def test_an_optimizer_that_is_resumed_too_late_is_warned_about_and_followed():
    model = make()
    first = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        step(model, first)
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    saved = first.state_dict()
    saved["param_groups"][0]["fullband_step"] = 5
    other.load_state_dict(saved)
    with pytest.warns(UserWarning, match="resumed at step 5, and the step just done took the passes of step 2"):
        step(model, other)
    assert int(model.progress.step) == 6


def test_an_optimizer_of_copies_is_refused_unless_the_step_is_said():
    """Flat shards (DeepSpeed, FSDP's first version): the schedule would stay at its first step."""
    model = make()
    copies = torch.optim.SGD([p.detach().clone().requires_grad_() for p in model.parameters()], lr=0.1)
    for p in copies.param_groups[0]["params"]:
        p.grad = torch.zeros_like(p)
    step(model, copies)
    with pytest.raises(ValueError, match=r"would stay at step 0: call model.progress.at\(step\)"):
        forward(model)
    for at in (0, 3, 4):
        model.progress.at(at)
        assert step(model, copies) == at
        assert model.progress.accumulation == 0
    with pytest.raises(ValueError, match="at least 0, got -1"):
        model.progress.at(-1)


def test_a_stranger_beside_the_own_optimizer_is_not_refused():
    """A forward in training mode, then another model is trained, then this one."""
    model, other = make(), torch.nn.Linear(2, 2)
    forward(model)
    stranger = torch.optim.SGD(other.parameters(), lr=0.1)
    other(torch.ones(1, 2)).sum().backward()
    stranger.step()
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    assert [step(model, own), step(model, own, stranger), step(model, own)] == [0, 1, 2]


def test_a_run_beyond_its_schedule_is_warned_about():
    model = make(steps=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        step(model, optimizer)
    with pytest.warns(UserWarning, match=r"trained for 2 steps and config.training_steps is 2"):
        forward(model)  # a second run in the same process
    trained = copy.deepcopy(model)
    with pytest.warns(UserWarning, match=r"trained for 2 steps and config.training_steps is 2"):
        forward(trained)
    anew = copy.deepcopy(model)
    anew.progress.step.zero_()
    assert step(anew, torch.optim.SGD(anew.parameters(), lr=0.1)) == 0


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("whole", [True, False], ids=["model and optimizer", "optimizer"])
def test_going_back_after_a_step_that_was_broken_off_begins_that_step_anew(ahead, whole):
    """A notebook's interrupt between two accumulated forwards, then the checkpoint again: the prefixes are those of the first try."""
    model = make(schedule=[{"fraction": 1.0, "passes": {2: 1.0}}])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer)
    saved, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    expected = [forward(model), forward(model)]
    optimizer.zero_grad()
    for _ in range(ahead):
        step(model, optimizer)
        forward(model)
    if not whole:
        del saved["progress.step"]
    model.load_state_dict(saved, strict=False)
    optimizer.load_state_dict(state)
    assert [forward(model), forward(model)] == expected and expected[0] != expected[1]
    assert int(model.progress.step) == 1


def test_an_optimizer_of_two_models_keeps_the_step_of_each():
    def pair():
        models = make(), make()
        return *models, torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)

    first, second, both = pair()
    step(first, torch.optim.SGD(first.parameters(), lr=0.1))
    for _ in range(2):
        forward(first)
        step(second, both)
    saved = copy.deepcopy(both.state_dict())
    first, second, both = pair()
    both.load_state_dict(saved)
    forward(first)
    forward(second)
    assert (int(first.progress.step), int(second.progress.step)) == (3, 2)
    step(first, both)
    both.load_state_dict(saved)
    assert both.state_dict()["param_groups"] == saved["param_groups"]  # saved again before anything is trained from there


def test_lora_resumed_by_trainer_goes_on_where_it_was(tmp_path):
    peft = pytest.importorskip("peft")

    def losses(folder, resume=None, **more):
        torch.manual_seed(1)
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "state", "gate"], task_type="CAUSAL_LM")
        wrapped = peft.get_peft_model(make(), config)
        settings = dict(max_steps=6, gradient_accumulation_steps=1, **more)
        trainer = Trainer(model=wrapped, args=arguments(folder, **settings), train_dataset=rows())
        trainer.train(resume_from_checkpoint=resume)
        found = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return found, int(wrapped.get_base_model().progress.step)

    expected, steps = losses(tmp_path / "straight", save_strategy="steps", save_steps=3)
    assert steps == 6
    gc.collect()
    found, steps = losses(tmp_path / "resumed", resume=str(tmp_path / "straight" / "checkpoint-3"))
    assert steps == 6 and found[-3:] == expected[-3:]


def test_a_model_that_is_saved_keeps_its_step(tmp_path):
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        step(model, optimizer)
    model.save_pretrained(tmp_path)
    resumed = FullBandForCausalLM.from_pretrained(tmp_path).train()
    assert step(resumed, torch.optim.SGD(resumed.parameters(), lr=0.1)) == 3
