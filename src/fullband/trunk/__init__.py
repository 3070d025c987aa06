"""Trunks: everything between the stack's input and the top state. Feedback never looks inside one."""

from fullband.trunk.cache import Cache
from fullband.trunk.decoder import Decoder
from fullband.trunk.protocol import Keep, Trunk

__all__ = ["Cache", "Decoder", "Keep", "Trunk"]
