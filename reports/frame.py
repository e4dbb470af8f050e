"""What every page has: one file with style and script in it, which asks nothing of a network; and a table."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path

from reports.markup import Html, tag

_STATIC = Path(__file__).parent / "static"


def page(title: str, *body: object) -> str:
    """A whole page."""
    style, script = ((_STATIC / name).read_text(encoding="utf-8") for name in ("report.css", "report.js"))
    policy = f"default-src 'none'; img-src 'self' file:; style-src {_hash(style)}; script-src {_hash(script)}"
    return "<!doctype html>\n" + tag(
        "html",
        tag(
            "head",
            tag("meta", charset="utf-8"),
            tag("meta", http_equiv="Content-Security-Policy", content=policy),
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("title", title),
            tag("style", Html(style)),
        ),
        tag("body", tag("main", *body), tag("script", Html(script))),
        lang="en",
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def table(heads: Sequence[str], rows: Sequence[Html]) -> Html:
    """A table that scrolls by itself; `rows` are `tr`."""
    return tag("div", tag("table", tag("thead", tag("tr", *(tag("th", h, scope="col") for h in heads))),
                          tag("tbody", *rows), class_="speed"), class_="scroll", tabindex="0", role="region",
               aria_label="table")
