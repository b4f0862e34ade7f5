"""How long an iteration, its ops and its copies take, plain and watched."""
