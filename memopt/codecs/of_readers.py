"""The codecs that serve one backward formula each: what it reads of the tensor is less than its values."""

from __future__ import annotations

import math

from memopt.codecs.meta import CHUNK_CELLS, TensorMeta, bitmap_bytes, chunk_cells
from memopt.codecs.row import Codec, Params, Passes

_PROVEN_ON = ("2.10.", "2.11.", "2.12.", "2.13.", "2.14.")
"""Releases of torch with which every row of `estimators.simulator.slot_needs.SLOT_NEEDS` gave plain's bits (`tests/enforcers/codecs/test_codecs.py`)."""


def is_proven_on(torch_version: str) -> bool:
    """Is it known what backward reads in that release? A formula may change: that of `clamp` has another answer at its bounds from 2.14 on."""
    return torch_version.startswith(_PROVEN_ON)


# --- nothing


def is_empty_stand_in(meta: TensorMeta, params: Params) -> bool:
    """Whether a value that is never read comes back over a storage of 0 bytes; only where no kernel would copy it first."""
    return meta.is_on_cpu and params.get("stand_in", "empty") == "empty" and meta.is_kernel_ready


def _stood_in_bytes(meta: TensorMeta, params: Params) -> int:
    return 0 if is_empty_stand_in(meta, params) else meta.rebuilt_bytes


NOTHING = Codec(
    name="nothing",
    words="its values are never read",
    effect="not held",
    held_bytes=lambda meta, params: 0,
    decode_bytes=lambda meta, params: meta.rebuilt_bytes - _stood_in_bytes(meta, params),
    decoded_bytes=_stood_in_bytes,
    passes={"cpu": Passes(encode=0.0, decode=0.0), "cuda": Passes(encode=0.0, decode=0.0)},
)

# --- predicate


def _asked_bytes(meta: TensorMeta, params: Params) -> int:
    """The answers of one chunk and of the one before; most questions are put by a kernel, to a gradient of ones. On a GPU bits are
    packed in torch's memory."""
    chunk, test = chunk_cells(meta), str(params.get("test"))
    held, answer = {"relu": (1, 1), "clamp": (2, 1), "mask": (0, 0)}.get(
        test, (2 * meta.itemsize, meta.itemsize)
    )
    packing = 0 if meta.is_on_cpu else 3
    return min(meta.cells, chunk) * (held + (answer if meta.cells > chunk else 0) + packing)


PREDICATE = Codec(
    name="predicate",
    words="backward asks one yes-or-no question of each element, so one bit is held",
    effect="to 1 bit",
    held_bytes=lambda meta, params: bitmap_bytes(meta.cells),
    encode_bytes=_asked_bytes,
    decode_bytes=lambda meta, params: (
        0 if meta.is_on_cpu else min(meta.cells, chunk_cells(meta)) * (3 + meta.itemsize)
    ),
    passes={
        # measured on a CPU; on a GPU what the kernels read and write. Asking a 16 bit float takes as long as asking one of 32
        "cpu": Passes(encode=3.0, decode=1.6, least_encoded_item=4),
        "cuda": Passes(
            encode=3.1,
            decode=1.6,
            encode_launches=8,
            decode_launches=8,
            least_encoded_item=4,
            least_decoded_item=4,
            quick={"relu": 2.0, "mask": 1.1},  # questions that need no kernel of the reader's
        ),
    },
)

# --- pool_index


def _tap_bytes(meta: TensorMeta, params: Params) -> int:
    kernel = params.get("kernel_size")
    taps = math.prod(kernel) if isinstance(kernel, list | tuple) else 256
    return -(-meta.numel // 2) if taps <= 16 else meta.numel


def _origins_bytes(meta: TensorMeta, params: Params) -> int:
    """One int64 for each place of an output plane."""
    kernel = params.get("kernel_size")
    return 8 * math.prod(meta.size[-len(kernel) :] if isinstance(kernel, list | tuple) else meta.size[1:])


def _planes_at_once(meta: TensorMeta) -> int:
    """Indices handled at a time: whole planes, or whole samples where memory is not in that order."""
    in_order = len(meta.size) > 3 and meta.is_dense_in(range(len(meta.size)))
    unit = math.prod(meta.size[2:] if in_order else meta.size[1:])
    return min(meta.numel, max(1, CHUNK_CELLS // max(1, unit)) * unit)


def _encoding_taps(meta: TensorMeta, params: Params) -> int:
    held = _tap_bytes(meta, params)
    piece = 18 * _planes_at_once(meta) + _origins_bytes(meta, params)
    return max(meta.numel if held < meta.numel else 0, meta.numel - held + piece)


def _decoding_taps(meta: TensorMeta, params: Params) -> int:
    widened = meta.numel if _tap_bytes(meta, params) < meta.numel else 0
    return max(2 * widened, widened + 20 * _planes_at_once(meta) + _origins_bytes(meta, params))


POOL_INDEX = Codec(
    name="pool_index",
    words="an index inside its pooling window is all that backward needs",
    effect="to small indices",
    held_bytes=_tap_bytes,
    encode_bytes=_encoding_taps,
    decode_bytes=_decoding_taps,
    piece_cells=_planes_at_once,
    passes={
        "cpu": Passes(encode=12.0, decode=12.0),
        "cuda": Passes(encode=3.5, decode=3.0, encode_launches=14, decode_launches=12),
    },
)
