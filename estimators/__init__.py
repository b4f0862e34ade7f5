"""Trace, script or ONNX file -> Timeline and peak."""
