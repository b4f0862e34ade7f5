"""A GPU that is not there: `torch.cuda`, its streams, graphs, autocast and choice of operators."""
