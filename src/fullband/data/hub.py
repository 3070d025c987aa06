"""Whether the Hugging Face hub can be reached. Without a network its libraries try for minutes what they could say at once."""

from __future__ import annotations

import os
import socket
import sys
from functools import cache
from threading import Thread
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

OFFLINE = "HF_HUB_OFFLINE"
PATIENCE = 3.0  # seconds for a connection: a name that is not resolved, or packets that nobody answers


@cache
def check_hub() -> str:
    """Why the hub cannot be reached, in words; empty if it can be. If it cannot, its libraries are told so, for the rest of the process:
    they then take what is in their cache, and refuse what is not without trying again. Asked once."""
    if os.environ.get(OFFLINE, "").upper() in ("1", "ON", "YES", "TRUE"):
        return f"{OFFLINE} is set"
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    if can_connect(endpoint):
        return ""
    os.environ[OFFLINE] = "1"  # for what is imported from now on; what is imported already has read it
    for module, name in (("huggingface_hub.constants", OFFLINE), ("datasets.config", OFFLINE), ("datasets.config", "HF_DATASETS_OFFLINE")):
        if module in sys.modules:
            setattr(sys.modules[module], name, True)
    return f"no connection to {urlsplit(endpoint).hostname}"


def can_connect(url: str) -> bool:
    """Whether there is a way to `url`, through the proxy if there is one, within PATIENCE."""
    place = urlsplit(url)
    proxy = None if proxy_bypass(place.hostname or "") else getproxies().get(place.scheme)
    if proxy:
        place = urlsplit(proxy if "//" in proxy else f"//{proxy}")
    address = (place.hostname or "", place.port or (80 if place.scheme == "http" else 443))
    found: list[bool] = []

    def connect() -> None:
        try:
            socket.create_connection(address, PATIENCE).close()
            found.append(True)
        except (OSError, UnicodeError):
            found.append(False)

    asking = Thread(target=connect, daemon=True)  # resolving a name has no time limit of its own
    asking.start()
    asking.join(PATIENCE)
    return bool(found) and found[0]
