"""The quickstart: one command that shows what latent feedback does and a standard transformer can't."""

from fullband.quickstart.demonstration import quickstart

__all__ = ["quickstart"]
