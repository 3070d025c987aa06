"""Convert and detach, folder to folder: what is kept bit for bit, what comes with it, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, T5Config, T5ForConditionalGeneration

import fullband
from fullband.config import TrunkConfig
from fullband.data.tokenizer import Tokenizer
from fullband.data.tokenizers import ByteTokenizer, TaskTokenizer, load_tokenizer
from fullband.decode import generate
from fullband.hf import FullBandForCausalLM
from fullband.hf import convert as conversion
from fullband.loading import load_model
from fullband.model import FullBandModel
from hf.sources import VOCABULARY, plain_model, tiny_llama, widen_tokenizer, write_source
from reference.seam import read
from trunk.huggingface.families import build

T5 = T5Config(vocab_size=9, d_model=8, d_ff=8, num_layers=1, num_heads=1)
TOKENS = torch.arange(60).view(2, 30) * 37 % 256


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("hf") / "tiny")


@pytest.fixture(scope="module")
def converted(source: Path) -> Path:
    output = source.parent / "converted"
    conversion.convert(source, output)
    return output


def plain_logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return plain_model(folder)(TOKENS).logits


@torch.no_grad()
def standard_logits(model: Any) -> torch.Tensor:
    return model.trunk.head(read(model, TOKENS))


@pytest.mark.parametrize("fusion", ["residual", "gated", "concat", "add"])
def test_standard_is_the_source_bit_for_bit_from_the_folder_alone(source: Path, tmp_path: Path, fusion: str) -> None:
    made = conversion.convert(source, tmp_path / "out", fusion)
    assert (made.kind, made.fusion, made.trained, made.has_tokenizer, made.dtype) == ("llama", fusion, False, True, "float32")
    model = load_model(tmp_path / "out")
    assert torch.equal(standard_logits(model), plain_logits(source))
    assert made.parameters == sum(p.numel() for p in model.parameters())
    assert made.fusion_parameters == sum(p.numel() for p in model.connection.parameters()) == 2 * 32 * 32 // (2 if fusion == "add" else 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_another_dtype_is_the_source_in_that_dtype(source: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    assert conversion.convert(source, tmp_path / "out", dtype=dtype).dtype == str(dtype).removeprefix("torch.")
    with torch.no_grad():
        expected = plain_model(source, dtype=dtype)(TOKENS).logits
    model = load_model(tmp_path / "out")
    assert next(model.parameters()).dtype == dtype
    assert torch.equal(standard_logits(model), expected)


def test_an_untrained_residual_fusion_changes_nothing_and_a_gated_one_does(source: Path, converted: Path, tmp_path: Path) -> None:
    conversion.convert(source, tmp_path / "gated", "gated")
    prompts = [[1, 2, 3, 4], [9, 8, 7]]
    texts = {}
    for folder in (converted, tmp_path / "gated"):
        model = load_model(folder)
        texts[folder.name] = [
            [made.tokens for made in generate(model, prompts, mode, max_new_tokens=12, stop_ids=())]
            for mode in ("standard", "soft", "fused")
        ]
    standard, soft, fused = texts["converted"]
    assert standard == soft == fused
    assert texts["gated"][0] == standard
    assert texts["gated"][1] != standard


def test_detach_gives_the_source_back(source: Path, converted: Path, tmp_path: Path) -> None:
    conversion.detach_folder(converted, tmp_path / "again")
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "again" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "LICENSE"):
        assert (tmp_path / "again" / name).read_bytes() == (source / name).read_bytes(), name
    settings = [json.loads((folder / "generation_config.json").read_text()) for folder in (source, tmp_path / "again")]
    # transformers may write a private flag of its own beside what was set
    assert settings[0] == {k: v for k, v in settings[1].items() if not k.startswith("_")}


def test_the_tokenizer_comes_along(source: Path, converted: Path) -> None:
    ours, theirs = load_tokenizer(converted), AutoTokenizer.from_pretrained(converted)
    text = "<|im_start|>user\nnaïve → 🙂<|im_end|>\n"
    assert ours.encode(text) == theirs(text).input_ids == load_tokenizer(source).encode(text)
    assert ours.stops == {256, 257}  # the generation config's, not only the tokenizer's eos
    assert theirs.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False).startswith("<|im_start|>user\nhi")


def test_the_card_says_what_it_is(source: Path, tmp_path: Path) -> None:
    for fusion, honest in (("residual", "make exactly what standard makes"), ("gated", "**worse** text than")):
        conversion.convert(source, tmp_path / fusion, fusion)
        opened, front, body = (tmp_path / fusion / "README.md").read_text().split("---\n", 2)
        fields = yaml.safe_load(front)
        assert opened == "" and fields["license"] == "apache-2.0" and fields["language"] == "en"
        assert fields["library_name"] == "transformers" and "base_model" not in fields  # no hub id: nothing to link
        assert honest in " ".join(body.split()) and f"`{fusion}`" in body and "`tiny` (`llama`)" in body
        assert str(tmp_path) not in body and str(source.parent) not in (tmp_path / fusion / "config.json").read_text()


def test_a_source_without_a_card_names_no_licence(tmp_path: Path) -> None:
    write_source(tmp_path / "src")
    (tmp_path / "src" / "README.md").unlink()
    conversion.convert(tmp_path / "src", tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "license" not in card.split("---\n")[1] and "names none in its card" in card


def test_calibration_on_text_measures_that_text(source: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("eee", encoding="utf-8")
    made = conversion.convert(source, tmp_path / "out", "gated", calibrate=[str(tmp_path / "text.txt")])
    weight = tiny_llama().get_input_embeddings().weight.detach()
    (token,) = set(load_tokenizer(source).encode("eee"))
    assert made.embedding_scale == pytest.approx(float(weight[token].square().mean().sqrt()), rel=1e-5)
    assert float(load_model(tmp_path / "out").trunk.embedding_scale) == pytest.approx(made.embedding_scale, rel=1e-6)
    whole = conversion.convert(source, tmp_path / "whole", "gated").embedding_scale
    assert whole == pytest.approx(float(weight.square().mean().sqrt()), rel=1e-5)
    assert whole != pytest.approx(made.embedding_scale, rel=1e-3)


def test_attach_uses_the_weights_it_is_given_and_detach_returns_them() -> None:
    lm = tiny_llama()
    model = fullband.attach(lm, fusion="residual", latent_feedback_mode="standard")
    assert isinstance(model, FullBandForCausalLM) and model.config.latent_feedback_mode == "standard"
    assert model.trunk.lm is lm and fullband.detach(model) is lm
    assert model.generation_config.eos_token_id == [257, 256]


def native(fusion: str = "gated") -> FullBandModel:
    torch.manual_seed(1)
    shape = TrunkConfig(vocab_size=257, width=16, layers=2, heads=2, kv_heads=1, glu_width=24, context=48, window=6, full_every=2)
    return FullBandModel(shape, fusion)  # type: ignore[arg-type]


@pytest.mark.parametrize("fusion", ["gated", "residual"])
def test_a_native_model_there_and_back_is_itself(tmp_path: Path, fusion: str) -> None:
    model = native(fusion).eval()
    model.save(tmp_path / "native")
    ByteTokenizer().save(tmp_path / "native")
    made = conversion.convert(tmp_path / "native", tmp_path / "exported")
    assert (made.kind, made.fusion, made.trained, made.embedding_scale) == ("fullband", fusion, True, None)
    back = FullBandModel.load(tmp_path / "exported")
    back.save(tmp_path / "back")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "native" / name).read_bytes(), name
    assert load_tokenizer(tmp_path / "exported").name == "bytes"
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert isinstance(exported, FullBandForCausalLM)
    assert torch.equal(standard_logits(exported), standard_logits(model))
    assert isinstance(load_model(tmp_path / "exported"), FullBandModel)


@pytest.mark.parametrize(
    ("tokenizer", "text"),
    [
        (ByteTokenizer(), "def f(x):\n    return {'é': x ** 2, '→🙂': [1234]}\n\n\tcafé "),
        (TaskTokenizer("s3", ["a", "b0", "c"]), "a c b0 b0"),
    ],
)
def test_a_native_tokenizer_is_the_same_in_transformers(tmp_path: Path, tokenizer: Tokenizer, text: str) -> None:
    native().save(tmp_path / "native")
    tokenizer.save(tmp_path / "native")
    conversion.convert(tmp_path / "native", tmp_path / "out")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs(text).input_ids == tokenizer.encode(text)
    assert theirs.decode(tokenizer.encode(text)) == text
    assert theirs.eos_token_id == tokenizer.end_of_document
    if theirs.pad_token is not None:  # collators mask padding: an end that is padding would never be learned
        assert theirs.pad_token_id not in (theirs.eos_token_id, *tokenizer.encode(text))
        assert theirs.pad_token_id < native().trunk.vocab_size
        assert GenerationConfig.from_pretrained(tmp_path / "out").pad_token_id == theirs.pad_token_id
    assert load_tokenizer(tmp_path / "out").name == tokenizer.name


def edit_config(**fields: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return change


def drop_weight(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def truncate_weights(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 1000)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda folder: widen_tokenizer(folder, 265), "its tokenizer has 265 ids, the model's vocabulary only 264"),
        (drop_weight, "weight 'model.layers.1.mlp.up_proj.weight' is missing"),
        (truncate_weights, "its weights cannot be read"),
        (lambda folder: (folder / "model.safetensors").unlink(), "its weights cannot be read"),
        (edit_config(intermediate_size=50), "has another shape than the config says"),
        (edit_config(model_type="quantum"), "transformers cannot read its config"),
        (edit_config(model_type="fullband", trunk_config={}), "is a full-bandwidth model already"),
        (edit_config(model_type=None), "names no model_type"),
        (lambda folder: (folder / "config.json").write_text("{"), "not readable as JSON"),
        (lambda folder: (folder / "config.json").unlink(), "not a model folder (it has no config.json)"),
        (lambda folder: shutil.rmtree(folder), "no such model folder"),
        (lambda folder: T5ForConditionalGeneration(T5).save_pretrained(folder), "'t5' cannot be a trunk"),
    ],
)  # fmt: skip
def test_a_source_that_cannot_be_converted(source: Path, tmp_path: Path, change: Callable[[Path], None], expected: str) -> None:
    shutil.copytree(source, tmp_path / "src")
    change(tmp_path / "src")
    with pytest.raises(ValueError) as refused:
        conversion.convert(tmp_path / "src", tmp_path / "out")
    assert expected in str(refused.value) and "\n" not in str(refused.value) and str(tmp_path / "src") in str(refused.value)
    assert sorted(path.name for path in tmp_path.iterdir()) in (["src"], [])  # nothing, not even a part, was left


def test_an_existing_output_is_kept(source: Path, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "diary.txt").write_text("dear diary")
    with pytest.raises(ValueError, match="exists already"):
        conversion.convert(source, tmp_path / "notes")
    with pytest.raises(ValueError, match="is not a model folder, so it is not replaced"):
        conversion.convert(source, tmp_path / "notes", force=True)
    assert (tmp_path / "notes" / "diary.txt").read_text() == "dear diary"


def test_force_replaces_a_model_folder_whole(source: Path, tmp_path: Path) -> None:
    write_source(tmp_path / "out")
    (tmp_path / "out" / "stray.txt").write_text("of the old model")
    conversion.convert(source, tmp_path / "out", force=True)
    assert load_model(tmp_path / "out") and not (tmp_path / "out" / "stray.txt").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_failed_replacement_keeps_the_old_model(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_source(tmp_path / "out")
    monkeypatch.setattr(conversion.card, "write_card", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(ValueError, match=r"out: cannot be written \(No space left on device\)"):
        conversion.convert(source, tmp_path / "out", force=True)
    assert plain_logits(tmp_path / "out").shape[-1] == VOCABULARY
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.slow
def test_a_kill_leaves_no_half_of_a_folder(source: Path, tmp_path: Path, killed_while: Callable[..., Iterator[None]]) -> None:
    output = tmp_path / "out"

    def work(n: int) -> None:
        conversion.convert(source, output, force=True)

    torch.set_num_threads(1)
    for _ in killed_while(work):
        if output.exists():
            assert torch.equal(standard_logits(load_model(output)), plain_logits(source))
    conversion.convert(source, output, force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_detach_refuses_what_has_no_trunk_of_hugging_face(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is a plain 'llama' checkpoint"):
        conversion.detach_folder(source, tmp_path / "out")
    native().save(tmp_path / "native")
    with pytest.raises(ValueError, match=r"is an App\. A model"):
        conversion.detach_folder(tmp_path / "native", tmp_path / "out")


def test_a_native_model_keeps_the_fusion_it_has(tmp_path: Path) -> None:
    native().save(tmp_path / "native")
    with pytest.raises(ValueError, match="has a fusion already"):
        conversion.convert(tmp_path / "native", tmp_path / "out", "residual")


def test_a_hub_id_without_a_network_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # what the environment variable is read into, once
    with pytest.raises(ValueError) as refused:
        conversion.convert("nobody/nothing-of-this-name", tmp_path / "out")
    assert str(refused.value).startswith("nobody/nothing-of-this-name: no such folder, and the hub did not give it (")
    assert "\n" not in str(refused.value)


def test_the_source_is_never_replaced_by_what_is_made_of_it(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is the source itself"):
        conversion.convert(source, source, force=True)
    conversion.convert(source, tmp_path / "model")
    with pytest.raises(ValueError, match="is the source itself"):
        conversion.detach_folder(tmp_path / "model", tmp_path / "model", force=True)
    assert load_model(tmp_path / "model").connection is not None and plain_logits(source).shape[-1] == VOCABULARY


def test_attach_refuses_a_misspelt_setting_and_what_is_attached_already(source: Path) -> None:
    lm = AutoModelForCausalLM.from_pretrained(source)
    with pytest.raises(ValueError, match="unknown setting 'feedbackpasses'; did you mean 'feedback_passes'"):
        conversion.attach(lm, feedbackpasses=2)
    with pytest.raises(ValueError, match="has latent feedback already"):
        conversion.attach(conversion.attach(lm))


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        ("granite", dict(logits_scaling=6.0, embedding_multiplier=11.0, residual_multiplier=0.22)),
        ("opt", dict(ffn_dim=24, word_embed_proj_dim=8, do_layer_norm_before=False)),  # narrower outside than inside
    ],
)
def test_attach_and_convert_agree(family: str, shape: dict[str, Any], tmp_path: Path) -> None:
    """On families with factors and widths of their own: both give the source to the bit, and what is saved keeps them."""
    source = build(family, dtype=torch.float32, **shape)
    source.save_pretrained(tmp_path / "source")
    tokens = TOKENS % 29
    attached = conversion.attach(source, "gated")
    conversion.convert(tmp_path / "source", tmp_path / "out")
    converted = load_model(tmp_path / "out")
    with torch.no_grad():
        expected = plain_model(tmp_path / "source")(tokens).logits
        for model in (attached, converted):
            assert torch.equal(model.trunk.head(read(model, tokens)), expected)
            assert torch.equal(model(tokens).logits, expected)
            assert model.generate(tokens[:, :4], max_new_tokens=3, latent_feedback_mode="fused", eos_token_id=None).shape == (2, 7)
    assert attached.config.adaptation == converted.config.adaptation


def test_attach_runs_the_fusion(monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny_llama()

    def broken(self: Any, embedding: torch.Tensor, carried: torch.Tensor) -> torch.Tensor:
        return embedding + carried[..., :5]

    monkeypatch.setattr("fullband.feedback.mergers.Residual.combine", broken)
    with pytest.raises(ValueError, match="'llama' cannot be a trunk: a pass with feedback does not run \\(The size of tensor a"):
        conversion.attach(source)
    monkeypatch.setattr("fullband.feedback.mergers.Residual.combine", lambda self, embedding, carried: embedding / 0)
    with pytest.raises(ValueError, match="its states with feedback overflow in float32"):
        conversion.attach(source)
