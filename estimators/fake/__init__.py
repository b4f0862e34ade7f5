"""A script run on fake tensors: what it would allocate, found without memory and without computing."""
