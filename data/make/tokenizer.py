"""Write data/tokenizer.json: a small byte-level BPE, trained on data/sft_train.jsonl.

    python data/make/tokenizer.py         # seconds; the same bytes every time

It stands in for the model's own tokenizer where that cannot be downloaded. Words are split only at
white space, which turns a frequent piece of a formula into one token. Any text survives encoding
and decoding.
"""

import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 4096
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
DATA = Path(__file__).resolve().parents[1]


def train() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" ?\S+|\s+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    with (DATA / "sft_train.jsonl").open(encoding="utf-8") as chats:
        texts = [message["content"] for chat in chats for message in json.loads(chat)["messages"]]
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


if __name__ == "__main__":
    train().save(str(DATA / "tokenizer.json"))
