"""`fullband` and `python -m fullband`: the command line."""

from __future__ import annotations

import sys


def main() -> None:
    """The entry point: what it imports takes a second or two, and a Ctrl-C then is no traceback either."""
    try:
        from fullband.cli.main import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
