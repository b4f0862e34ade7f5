"""Imports torch, computes, and never calls backward."""

import sys

if len(sys.argv) > 1:
    import torch

    print(torch.nn.Linear(3, 3)(torch.ones(3)).shape)
sys.exit(int(sys.argv[2]) if len(sys.argv) > 2 else 0)
