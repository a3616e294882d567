"""Write tokenizer.json: a small byte-level BPE, trained on sft_train.jsonl.

    python data/make_tokenizer.py         # seconds; the same bytes every time

It stands in for the model's own tokenizer where that cannot be downloaded. Words are split at white
space only, so that a frequent piece of a formula becomes one token; any text survives encoding and
decoding.
"""

import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 4096
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
DATA = Path(__file__).with_name("sft_train.jsonl")
PATH = Path(__file__).with_name("tokenizer.json")


def train(examples: list[dict]) -> Tokenizer:
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
    texts = (message["content"] for example in examples for message in example["messages"])
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


if __name__ == "__main__":
    with DATA.open(encoding="utf-8") as file:
        train([json.loads(line) for line in file]).save(str(PATH))
