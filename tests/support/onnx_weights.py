"""Weights of a model file without their values: only shapes matter to an estimate."""

from __future__ import annotations

from onnx import TensorProto


def weight(name: str, *dims: int) -> TensorProto:
    """A floating-point weight whose values lie in a file that does not exist."""
    made = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=dims, data_location=TensorProto.EXTERNAL)
    made.external_data.add(key="location", value="left-out")
    return made
