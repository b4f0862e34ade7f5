"""Codecs on a GPU never wait for it: meta tensors, which stand for a GPU's here, have no value that could be waited for."""

from __future__ import annotations

import pytest
import torch

from memopt.enforcers.codecs import pool_index as codec_pool_index
from memopt.enforcers.codecs import predicate as codec_predicate

QUESTIONS = [
    {"test": "relu"},
    {"test": "mask"},
    {"test": "leaky_relu", "negative_slope": 0.1},
    {"test": "hardtanh", "min_val": -1.0, "max_val": 1.0},
]


@pytest.fixture(autouse=True)
def _fakes_are_plain(monkeypatch):
    for module in (codec_predicate, codec_pool_index):
        monkeypatch.setattr(module, "is_plain", lambda tensor: True)


@pytest.mark.parametrize("params", QUESTIONS, ids=lambda params: params["test"])
def test_a_yes_or_no_is_encoded_and_decoded_without_a_look_at_the_values(params, monkeypatch):
    dtype = torch.bool if params["test"] == "mask" else torch.bfloat16
    tensor = torch.empty(3, 1000, 7, device="meta", dtype=dtype)
    answers = codec_predicate.Answers(1.0, 0.0, torch.empty((), device="meta", dtype=dtype))
    monkeypatch.setattr(codec_predicate, "_yes_and_no", lambda *_: answers)
    encoded = codec_predicate.encode(tensor, params)
    assert encoded is not None
    assert encoded.payload[0].numel() == 3 * 1000 * 7 // 8
    decoded = codec_predicate.decode(encoded)
    assert (decoded.shape, decoded.dtype, decoded.device.type) == (tensor.shape, dtype, "meta")


def test_pool_indices_are_encoded_and_decoded_without_a_look_at_the_values():
    params = {"self.size": [2, 3, 16, 16], "kernel_size": [3, 3], "stride": [2, 2], "padding": [1, 1]}
    indices = torch.empty(2, 3, 8, 8, device="meta", dtype=torch.int64)
    encoded = codec_pool_index.encode(indices, params)
    assert encoded is not None
    assert encoded.payload[0].numel() == indices.numel() // 2
    assert codec_pool_index.decode(encoded).shape == indices.shape


@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("kernel", [(2, 2), (3, 5), (2, 3, 4)])
def test_the_last_step_is_the_largest(kernel, dilation):
    rank = len(kernel)
    window = codec_pool_index._Window(kernel, (1,) * rank, (0,) * rank, (dilation,) * rank, (11, 13, 17)[:rank])  # fmt: skip
    assert window.last_step == int(window.steps("cpu").max())
