"""The codecs by name. A new one is a row here and a module `enforcers/codecs/NAME.py`."""

from __future__ import annotations

from memopt.codecs.of_readers import NOTHING, POOL_INDEX, PREDICATE
from memopt.codecs.of_values import EXACT_CAST, NARROW_INT, TWO_VALUED, ZERO_BITMAP
from memopt.codecs.row import Codec

CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (NOTHING, PREDICATE, POOL_INDEX, TWO_VALUED, NARROW_INT, EXACT_CAST, ZERO_BITMAP)
}


def is_of_values(name: str) -> bool:
    """Is there a codec of this name, and does it hold a whole storage, for any reader?"""
    codec = CODECS.get(name)
    return codec is not None and codec.of_values
