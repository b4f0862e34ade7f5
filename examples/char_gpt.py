"""A character GPT that learns to write Python from the standard library's own sources.

python examples/char_gpt.py --steps 200
"""

import argparse
import sysconfig
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.ln1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.ln2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def attend(self, x):
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(B, T, C))

    def forward(self, x):
        x = x + self.attend(self.ln1(x))
        return x + F.dropout(self.mlp(self.ln2(x)), self.dropout, self.training)


class CharGPT(nn.Module):
    def __init__(self, vocab, context, layers=4, width=128, heads=4, dropout=0.1):
        super().__init__()
        self.token = nn.Embedding(vocab, width)
        self.position = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.Sequential(*[Block(width, heads, dropout) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens, targets=None):
        x = self.token(tokens) + self.position[: tokens.shape[1]]
        logits = self.head(self.norm(self.blocks(x)))
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@torch.no_grad()
def write(model, chars, context, length):
    model.eval()
    tokens = torch.tensor([[chars.index("\n")]], device=model.position.device)
    for _ in range(length):
        probs = model(tokens[:, -context:])[:, -1].softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(probs, 1)], dim=1)
    model.train()
    return "".join(chars[t] for t in tokens[0].tolist())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--sample", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-d]*.py"))
    text = "".join(path.read_text(encoding="utf-8", errors="ignore") for path in sources)
    chars = sorted(set(text))
    lookup = {c: i for i, c in enumerate(chars)}
    data = torch.tensor([lookup[c] for c in text[:500_000]], device=device)
    print(f"{len(sources)} files, {len(data)} characters, {len(chars)} different")

    model = CharGPT(len(chars), args.context).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(args.steps):
        starts = torch.randint(len(data) - args.context - 1, (args.batch,)).tolist()
        x = torch.stack([data[s : s + args.context] for s in starts])
        y = torch.stack([data[s + 1 : s + args.context + 1] for s in starts])
        loss = model(x, y)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        print(f"step {step} loss {loss.item():.6f}", flush=True)
    if args.sample:
        print(write(model, chars, args.context, args.sample))


if __name__ == "__main__":
    main()
