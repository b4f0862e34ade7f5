"""`auto` for graphs: starts, exact-delta search over reruns and swaps, rounds, and last resorts."""
