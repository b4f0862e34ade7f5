"""Run a person's script as python would, and see its iterations, ops, storages and saved tensors."""
