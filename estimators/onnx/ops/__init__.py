"""ONNX operators on fake tensors: one table, filled by decorator."""
