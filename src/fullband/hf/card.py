"""The model card of a converted model: what it is, how to use it, and what it does not bring by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from fullband.hf.config import FullBandConfig
from fullband.hf.source import CARD, Source

UNTRAINED = {
    "residual": "The fusion is **not trained**: its term starts at zero, so soft and fused make exactly what standard makes. "
    "Train it (`fullband train`, or `Trainer` on this folder) before expecting anything of it.",
    "other": "The fusion is **not trained**: its weights are random. Standard mode is untouched, but soft and fused make **worse** text "
    "than the source until it is trained (`fullband train`, or `Trainer` on this folder).",
}
NATIVE = "It was exported from a `fullband` checkpoint, weights unchanged."


def write_card(folder: Path, name: str, config: FullBandConfig, source: Source | None) -> None:
    """README.md of a converted model called `name`; `source` None for an exported App. A model."""
    (folder / CARD).write_text(front_matter(source) + body(name, config, source), encoding="utf-8")


def front_matter(source: Source | None) -> str:
    """The card's metadata. The licence is the source's own, word for word; a card without one leaves it out."""
    known = {} if source is None else read_front_matter(source.folder / CARD)
    fields: dict[str, Any] = {key: known[key] for key in ("license", "license_name", "license_link", "language") if key in known}
    fields |= {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["fullband", "latent-feedback"]}
    if source is not None and source.hub_id:
        fields["base_model"] = source.hub_id
    return f"---\n{yaml.safe_dump(fields, sort_keys=False)}---\n\n"


def read_front_matter(path: Path) -> dict[str, Any]:
    """Metadata at the top of a card; empty if there is no card, or none in it."""
    try:
        opened, block, _ = path.read_text(encoding="utf-8").split("---\n", 2)
        fields = yaml.safe_load(block)
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return fields if isinstance(fields, dict) and not opened.strip() else {}


def body(name: str, config: FullBandConfig, source: Source | None) -> str:
    licence = "" if source is None else "\n" + _licence(source) + "\n"
    return f"""# {name}

{_origin(source)}

**Latent feedback**: while it generates, the state at the top of the stack is fused with the next token's embedding and fed back to the
bottom ("Full-bandwidth transformer", arXiv 2608.08888). Fusion here: `{config.connected.fusion}`.

{_state_of_training(config, source)}

## Use

    pip install 'fullband[hf]'

```python
import fullband.hf  # registers the model with transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("DIR")
tokenizer = AutoTokenizer.from_pretrained("DIR")
inputs = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, latent_feedback_mode="soft", max_new_tokens=40)[0]))
```

or `fullband generate DIR "Once upon a time" --mode soft`, `fullband chat DIR --mode soft`.

| `latent_feedback_mode` | prompt | generation |
|---|---|---|
| `standard` | plain | plain: the {"source model" if source else "plain model"}, bit for bit |
| `soft` | plain | fused |
| `fused` | fused, `feedback_passes` times (1, 2, …, "exact", "converged") | fused |
{licence}"""


def _origin(source: Source | None) -> str:
    if source is None:
        return f"A full-bandwidth transformer (App. A decoder). {NATIVE}"
    name = f"[{source.hub_id}](https://huggingface.co/{source.hub_id})" if source.hub_id else f"`{source.folder.resolve().name}`"
    return (
        f"{name} (`{source.kind}`), converted with `fullband convert`: the source's weights are unchanged. In standard mode its logits are "
        "the source's, bit for bit: checked when it was converted. `fullband detach` gives the plain model back."
    )


def _state_of_training(config: FullBandConfig, source: Source | None) -> str:
    if source is None:
        return "Its fusion is as trained as the checkpoint was."
    return UNTRAINED.get(config.connected.fusion or "other", UNTRAINED["other"])


def _licence(source: Source) -> str:
    known = read_front_matter(source.folder / CARD).get("license")
    if known:
        return f"Licence: the source's, `{known}`."
    return "Licence: the source names none in its card. Its terms hold for this model too: look them up."
