"""Everything that is not a plain strided tensor, in one training step."""

import warnings

import torch

warnings.filterwarnings("ignore")


class Tagged(torch.Tensor):
    """A subclass by __torch_function__ alone."""


class Wrapper(torch.Tensor):
    """A subclass by __torch_dispatch__, holding another tensor."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, requires_grad=inner.requires_grad
        )

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def unwrap(x):
            return x.inner if isinstance(x, Wrapper) else x

        out = func(
            *torch.utils._pytree.tree_map(unwrap, args), **torch.utils._pytree.tree_map(unwrap, kwargs or {})
        )
        return torch.utils._pytree.tree_map(lambda x: Wrapper(x) if isinstance(x, torch.Tensor) else x, out)


torch.manual_seed(0)
table = torch.nn.Embedding(100, 16, sparse=True)
model = torch.nn.Linear(16, 16)
sparse_optimizer = torch.optim.SparseAdam(table.parameters())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(4):
    x = model(table(torch.randint(0, 100, (32,))))
    loss = x.square().mean()
    loss = (
        loss
        + torch.fft.fft(x).abs().mean()
        + torch.view_as_real(torch.polar(x.abs(), x).conj().resolve_conj()).mean()
    )
    loss = loss + torch.sparse.mm(torch.eye(32).to_sparse(), x).mean() + (x[:0] * 2).sum()
    loss = loss + (x.as_subclass(Tagged) * 3).as_subclass(torch.Tensor).mean()
    loss = loss + torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)]).values().sum()
    quantized = torch.quantize_per_tensor(x.detach(), 0.1, 0, torch.qint8)
    loss = loss + quantized.dequantize().mean() + Wrapper(x.detach()).mul(2).inner.mean()
    torch.empty(10**9, device="meta").add(1)
    loss = (
        loss
        + x.to_mkldnn().to_dense().mean()
        + torch.tensor([]).sum()
        + torch.eye(4).to_sparse_csr().to_dense().sum()
    )
    loss.backward()
    optimizer.step()
    sparse_optimizer.step()
    optimizer.zero_grad()
    sparse_optimizer.zero_grad()
    print(step, loss.item())
