"""PyTorch's memory snapshots, read without `pickle`, as columns, allocator events or a Trace."""
