"""transformers where the terminal is ours: progress bars only in a terminal, no reports and warnings beside the one line that counts."""

from __future__ import annotations

import logging
import os
import sys

from fullband.cli.errors import TRACEBACK


def quiet_transformers() -> None:
    """Call before transformers is imported. FULLBAND_TRACEBACK=1 lets everything through. Raises ValueError if transformers is missing."""
    from fullband.data.optional import optional

    for name in ("torchao", "torch.utils._pytree", "huggingface_hub"):  # torchao, where it is installed, is imported by transformers
        logging.getLogger(name).setLevel(logging.ERROR)
    transformers_logging = optional("transformers.utils.logging", "a Hugging Face model", "hf")
    if os.environ.get(TRACEBACK):
        return
    transformers_logging.set_verbosity_error()
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
