"""An ONNX file without its weights: the wire format, the graph, made plain, and which weights are trained."""
