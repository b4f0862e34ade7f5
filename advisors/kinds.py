"""The kinds of actions, as a person names them, and which of them a plan may take."""

from __future__ import annotations

from memopt.errors import UsageError

DEFAULT_ALLOW = frozenset({"recompute", "swap-host", "swap-disk", "compress", "optimizer", "in-place"})
"""Exact, and bit for bit the same run."""
NAMES = ("recompute", "swap-host", "swap-disk", "compress", "lossy", "optimizer", "in-place", "model-change")
BEYOND_EXACT = {
    "lossy": "--allow lossy changes nothing: memopt has no lossy action, every one of its codecs is exact",
    "model-change": "--allow model-change changes no plan: only --strategy ctdr speaks of it, as advice",
}
"""Kinds that may be allowed, and why no plan has an action of them."""


def allowed(allow: tuple[str, ...], deny: tuple[str, ...]) -> frozenset[str]:
    """What is allowed when a person typed `allow` and `deny`: naming an exact kind in `allow` excludes the others.

    `lossy` and `model-change` come on top of the exact ones. No plan uses them (see `BEYOND_EXACT`). Raises `UsageError` for a name in both.
    """
    given, denied = kinds_named(allow), kinds_named(deny)
    if both := sorted(_typed(allow) & _typed(deny)):
        raise UsageError(
            f"{', '.join(both)} is both allowed and denied",
            why="--allow names what a plan may do alone, --deny what it must not",
            try_=f"--allow {both[0]}, or --deny {both[0]}",
        )
    return (((given & DEFAULT_ALLOW) or DEFAULT_ALLOW) | given) - denied


def kinds_named(texts: tuple[str, ...]) -> frozenset[str]:
    """The kinds that were typed. Raises `UsageError` for anything else."""
    names = _names(texts)
    for name in names:
        if name not in NAMES:
            raise UsageError(f"'{name}' is not a kind of action", try_=", ".join(NAMES))
    return frozenset(names)


def _typed(texts: tuple[str, ...]) -> set[str]:
    """Names, which commas may part."""
    return {name.strip() for text in texts for name in text.split(",") if name.strip()}


def _names(texts: tuple[str, ...]) -> list[str]:
    """As typed; `swap` is both tiers."""
    return [
        each
        for name in sorted(_typed(texts))
        for each in (("swap-host", "swap-disk") if name == "swap" else (name,))
    ]
