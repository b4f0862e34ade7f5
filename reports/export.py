"""Inputs -> the bytes of a file, in the format that was asked for."""

from __future__ import annotations

from collections.abc import Sequence

from memopt.reports.inputs import Inputs


def exported(inputs: Inputs, names: Sequence[str], form: str, *, with_source: bool = True) -> bytes:
    """`inputs` in the format `form`; the same bytes for the same input."""
    from memopt.reports.page import page

    return page(inputs, names, with_source=with_source).encode()
