"""The codecs that hold all values of a storage, for any reader. Their size depends on the data: a profile finds it, with `planned` a margin."""

from __future__ import annotations

import math

from memopt.codecs.meta import ITEM_BYTES, TensorMeta, bitmap_bytes
from memopt.codecs.row import Codec, Params, Passes, per_cell
from memopt.value_facts import ValueFacts

TWO_VALUED = Codec(
    name="two_valued",
    words="dropout noise has two values, so one bit an element is held",
    effect="to 1 bit",
    of_values=True,
    held_bytes=lambda meta, params: bitmap_bytes(meta.cells) + 2 * meta.itemsize,
    encode_bytes=per_cell(cpu=0, gpu=5),
    decode_bytes=per_cell(cpu=0, gpu=2),
    passes={"cpu": Passes(encode=3.0, decode=1.6)},
)

# --- narrow_int

NARROWER = {"uint8": (0, 2**8 - 1), "int16": (-(2**15), 2**15 - 1), "int32": (-(2**31), 2**31 - 1)}
"""The types that integers are held in, the narrowest first, and what they can hold."""


def narrowest(low: int, high: int) -> str | None:
    """The first type that holds all of `low` to `high`."""
    return next((name for name, (least, most) in NARROWER.items() if least <= low and high <= most), None)


def _planned_type(facts: ValueFacts, meta: TensorMeta) -> Params | None:
    """Margin: twice the range that was seen. An index is bounded by a size, of which a step that is seen uses more than half as a rule."""
    if facts.low is None or facts.high is None:
        return None
    dtype = narrowest(2 * facts.low, 2 * facts.high)
    return None if dtype is None or ITEM_BYTES[dtype] >= meta.itemsize else {"narrow_dtype": dtype}


NARROW_INT = Codec(
    name="narrow_int",
    words="its integers fit a narrower type",
    effect="to small integers",
    of_values=True,
    held_bytes=lambda meta, params: (
        meta.cells * ITEM_BYTES.get(str(params.get("narrow_dtype")), meta.itemsize)
    ),
    passes={"cpu": Passes(encode=1.7, decode=1.0)},
    planned=_planned_type,
)

# --- exact_cast: it fits or it does not, so that there is no margin to leave; the profile looks for more than zeros

EXACT_CAST = Codec(
    name="exact_cast",
    words="its values came from a narrower type, and go back to it exactly",
    effect="to half the bytes",
    of_values=True,
    held_bytes=lambda meta, params: meta.plain_bytes // 2,
    encode_bytes=lambda meta, params: per_cell(cpu=1, gpu=1)(meta, params) * 3 * meta.itemsize // 2,
    decode_bytes=per_cell(cpu=0, gpu=8),
    passes={"cpu": Passes(encode=5.5, decode=1.3)},
    planned=lambda facts, meta: {} if facts.exact_as else None,
)

# --- zero_bitmap

WORTH_IT = 0.9
"""Encode only when the result is below this share of the plain bytes."""


def _sparse_bytes(meta: TensorMeta, params: Params) -> int:
    nonzero = params.get("nonzero_cells")
    if not isinstance(nonzero, int):
        return meta.plain_bytes  # no promise is made
    return bitmap_bytes(meta.cells) + min(nonzero, meta.cells) * meta.itemsize


def _planned_nonzero(facts: ValueFacts, meta: TensorMeta) -> Params | None:
    """Margin: a tenth of what was not zero, and a fiftieth of all. Of 21 layers with ReLU (a language model, a convolutional net), none
    passed it in the next 20 steps, and two did in the next 300 (docs/evidence.md)."""
    share = min(1.0, facts.nonzero_share * 1.1 + 0.02)
    params = {"nonzero_cells": math.ceil(meta.cells * share)}
    return params if _sparse_bytes(meta, params) < WORTH_IT * meta.plain_bytes else None


ZERO_BITMAP = Codec(
    name="zero_bitmap",
    words="most of it is zero, so the other values and a bit an element are held",
    effect="without zeros",
    of_values=True,
    held_bytes=_sparse_bytes,
    encode_bytes=per_cell(cpu=0, gpu=12),
    decode_bytes=per_cell(cpu=0, gpu=14),
    passes={"cpu": Passes(encode=6.5, decode=6.0, least_encoded_item=4, least_decoded_item=4)},
    planned=_planned_nonzero,
)
