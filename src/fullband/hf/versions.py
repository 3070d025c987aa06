"""What differs between the versions of transformers that fullband works with. Nothing else looks at it."""

from __future__ import annotations

from dataclasses import fields

from transformers.modeling_outputs import CausalLMOutputWithPast

CACHE = "cache" if "cache" in {field.name for field in fields(CausalLMOutputWithPast)} else "past_key_values"
"""The cache's name as an argument and as a field of outputs; newer versions call it `cache`."""
