"""Word-level LSTM language model, the medium shape of Zaremba et al. (2014): 19,780,400 parameters."""

from __future__ import annotations

from torch import Tensor, nn


class LanguageModel(nn.Module):
    """Embedding, stacked LSTM, linear to the vocabulary; dropout between everything."""

    def __init__(self, vocab: int, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.lstm = nn.LSTM(width, width, layers, dropout=dropout if layers > 1 else 0.0, batch_first=True)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.drop(self.embedding(tokens)))
        return self.head(self.drop(hidden))


def build(vocab: int = 10000, width: int = 650, layers: int = 2, dropout: float = 0.5) -> nn.Module:
    return LanguageModel(vocab, width, layers, dropout)
