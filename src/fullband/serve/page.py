"""The playground as one document. It needs nothing of a server, so that others' servers can show it too."""

from __future__ import annotations

from importlib.resources import files


def playground() -> str:
    """HTML with its script in it. It asks `GET fullband/about` what answers here, then `v1/completions` or `v1/chat/completions`, all
    relative to its own address; views of states ask `fullband/passes` and `fullband/carried`."""
    folder = files("fullband.serve")
    page, script = ((folder / name).read_text(encoding="utf-8") for name in ("playground.html", "playground.js"))
    return page.replace("<script></script>", f"<script>\n{script}</script>")
