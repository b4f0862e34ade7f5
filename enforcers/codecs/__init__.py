"""Codecs: exact, smaller forms of saved tensors; one file a codec."""
