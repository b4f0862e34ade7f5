"""Advice on the run as a whole, which nothing, or nothing but a setting, enforces."""
