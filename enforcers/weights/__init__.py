"""Weights that leave the device: between forward and backward (`away.py`), or, frozen, whenever nothing uses them (`streamed.py`); and who reads them (`watched.py`)."""
