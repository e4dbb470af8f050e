"""HTML and Markdown by construction: text is escaped unless it was made here."""

from __future__ import annotations

import re
from html import escape


class Html(str):
    """Markup that is already right; every other str is text and gets escaped."""

    __slots__ = ()


_VOID = frozenset({"img", "input", "meta", "wbr"})


def join(*children: object) -> Html:
    """Children side by side: Html as it is, None as nothing, anything else as text."""
    return Html("".join(c if isinstance(c, Html) else escape(str(c)) for c in children if c is not None))


def tag(name: str, /, *children: object, **attributes: object) -> Html:
    """`tag("a", "text", href="x", class_="y")`; an attribute of True is bare, of None or False is left out.

    A trailing underscore is dropped, other underscores become hyphens.
    """
    text = ""
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        bare = key.rstrip("_").replace("_", "-")
        text += f" {bare}" if value is True else f' {bare}="{escape(str(value))}"'
    return Html(f"<{name}{text}>" if name in _VOID else f"<{name}{text}>{join(*children)}</{name}>")


def breakable(name: str) -> Html:
    """A dotted, underscored name that may break into lines behind its signs."""
    parts = re.split(r"(?<=[._])", name)
    return join(*(x for part in parts for x in (part, tag("wbr"))))


def md(text: object) -> str:
    """Text as text: nothing in it opens markup, a table column or a new line."""
    safe = str(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    safe = re.sub(r"[\\`*\[\]|~#!]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\\g<0>", safe)
    return " ".join(safe.split())


def md_code(text: str) -> str:
    """Inline code with a fence longer than any in the text."""
    text = " ".join(text.split())
    fence = "`"
    while fence in text:
        fence += "`"
    return f"{fence} {text} {fence}" if "`" in text else f"`{text}`"
