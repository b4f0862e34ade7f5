"""Graphs of exporters put together again, so that what is trained is what the script called."""
