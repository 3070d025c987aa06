"""The plugin's one setting, in vLLM's `additional_config`, and the mode of a request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fullband.decode.modes import Mode, resolve_mode
from fullband.hf.config import FullBandConfig

if TYPE_CHECKING:
    from vllm.config import VllmConfig

FUSED = {
    "whole": "prompts are prefilled whole, so that Fused is exact with one set of keys and values; no chunked prefill",
    "two_kv": "Fused has a second set of keys and values for its first pass: exact in chunks and on cached prefixes, at twice the memory",
    "off": "Fused is refused; chunked prefill and prefix caching as vLLM has them",
}


def fused_setting(vllm_config: VllmConfig) -> str:
    """`additional_config={"fused": …}`: whole (default), two_kv or off; see FUSED. Raises ValueError."""
    given = vllm_config.additional_config
    chosen = given.get("fused", "whole") if isinstance(given, dict) else "whole"
    if not isinstance(chosen, str) or chosen not in FUSED:
        raise ValueError(f"additional_config: fused must be one of {', '.join(FUSED)}, got {chosen!r}")
    return chosen


def requested_mode(extra: dict[str, Any] | None, config: FullBandConfig) -> Mode:
    """The mode of a request: `extra_args` (over HTTP `vllm_xargs`), or the model's own. Raises ValueError."""
    extra = extra or {}
    name, passes = extra.get("mode"), extra.get("feedback_passes")
    if name is None:
        name = config.latent_feedback_mode if passes in (None, 0) else "fused"
    if name == "fused" and passes is None and config.latent_feedback_mode == "fused" and isinstance(config.feedback_passes, int):
        passes = config.feedback_passes or None
    if not isinstance(name, str):
        raise ValueError(f"mode: must be a string, got {name!r}")
    mode = resolve_mode(name, passes)
    if not isinstance(mode.feedback_passes, int):
        raise ValueError(f"feedback_passes: vLLM runs 1, 2, … passes over a prompt, not '{mode.feedback_passes}'; `fullband serve` does")
    return mode
