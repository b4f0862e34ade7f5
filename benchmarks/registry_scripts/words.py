"""A tokenizer of invented words, for libraries that ask for one."""

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def invented(count: int = 300) -> PreTrainedTokenizerFast:
    """`w0` to `w299` and four special words."""
    names = ["<pad>", "<unk>", "<s>", "</s>", *[f"w{i}" for i in range(count)]]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def sentence(seed: int, length: int, count: int = 300) -> str:
    return " ".join(f"w{(seed * 7919 + i * 104729) % count}" for i in range(length))
