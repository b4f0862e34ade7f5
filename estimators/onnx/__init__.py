"""ONNX files read without their weights, interpreted on fake tensors, and trained there."""
