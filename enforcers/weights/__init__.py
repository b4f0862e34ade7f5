"""Frozen weights that leave the device between forward and backward."""
