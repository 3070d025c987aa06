"""Numbers as people write them, for the commands."""

from fullband.amounts import duration, mixture, percent, short, size

__all__ = ["duration", "mixture", "percent", "short", "size"]
