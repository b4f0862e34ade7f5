"""Text of a script, a model or a snapshot, made safe to show: whoever named a module may be hostile, and a name may be a megabyte long."""

from __future__ import annotations

import html
import json
import re
from typing import Any

_UNIT = re.compile(r"(\d) ([KMGT]i?B|B|ms|µs|s|%)(?!\w)")
MOST_CHARACTERS = 240
"""Of one name in a report; the middle of a longer one is left out."""


def shown(text: str, most: int = MOST_CHARACTERS) -> str:
    """`text` on one line: what cannot be printed (control characters, direction marks) is U+FFFD, and a long text loses its middle."""
    if len(text) > most:
        half = (most - 3) // 2
        text = f"{text[:half]} … {text[-half:]}"
    return "".join(c if c.isprintable() else "\ufffd" for c in text)


def esc(text: object, most: int = MOST_CHARACTERS) -> str:
    """`text` for HTML, in an element or in a quoted attribute."""
    return html.escape(shown(str(text), most), quote=True)


def together(text: str) -> str:
    """`text` with a no-break space between each number and its unit."""
    return _UNIT.sub("\\1\u00a0\\2", text)


def json_in_html(value: Any) -> str:
    """`value` as JSON that can stand inside a `<script>` element, whatever its strings hold."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
