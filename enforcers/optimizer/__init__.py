"""The optimizer's step, moved: inside backward, in pieces, its state in a tier between steps."""
