"""Optimizers and schedule of section 4: NorMuon for matrices, Adam for the rest, WSD, AdamC weight decay."""

from fullband.optim.groups import ParameterGroup, check_groups, describe_groups, is_fusion, parameter_groups
from fullband.optim.normuon import NorMuon, normuon_reference
from fullband.optim.optimizer import Optimizer
from fullband.optim.wsd import in_cooldown, warmup_length, warmup_words, wsd_factor

__all__ = [
    "NorMuon",
    "Optimizer",
    "ParameterGroup",
    "check_groups",
    "describe_groups",
    "in_cooldown",
    "is_fusion",
    "normuon_reference",
    "parameter_groups",
    "warmup_length",
    "warmup_words",
    "wsd_factor",
]
