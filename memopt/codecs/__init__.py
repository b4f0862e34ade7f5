"""Codecs, without torch: a row each, of what it holds, needs and costs, and when it may be planned for."""
