"""
Make the demo's tokenizer: a small byte-level BPE, written as Hugging Face models ship theirs.

The corpus is English in ASCII. So an accented letter or an emoji is several tokens, and short texts are enough to test
characters that are split over tokens.

Run ``python -m triton_openai.demo.make_tokenizer FOLDER``; the result depends on nothing but this file and ``corpus/``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer

BOS = "<|startoftext|>"
EOS = "<|im_end|>"
PAD = "<|endoftext|>"
START = "<|im_start|>"
VOCABULARY = 3072
MAX_LENGTH = 2048

# ChatML. The template writes the BOS, so tokenizing its result must not add another one: the preprocessing of the
# demo's TensorRT-LLM models has add_special_tokens "false".
CHAT_TEMPLATE = (
    "{{- bos_token }}"
    "{%- for message in messages %}"
    "{%- if message['content'] is string %}{%- set text = message['content'] %}"
    "{%- else %}{%- set text = message['content'] | selectattr('type', 'equalto', 'text') | map(attribute='text') | join('') %}"  # noqa: E501
    "{%- endif %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + text | trim + '<|im_end|>' + '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

_CORPUS = Path(__file__).parent / "corpus"


def corpus() -> list[str]:
    """Return the texts for training the tokenizer."""
    prose, syntax, words = ((_CORPUS / f"{name}.txt").read_text() for name in ("prose", "syntax", "words"))
    lines = [*prose.strip().split("\n\n"), *syntax.splitlines()]
    # Each word also as it stands inside a sentence (with a space before it) and at the start of one.
    return [*lines, " ".join(words.split()), " ".join(word.capitalize() for word in words.split())]


def make_tokenizer() -> Tokenizer:
    """Train and return the tokenizer; the result is always the same."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=VOCABULARY,
        min_frequency=1,
        special_tokens=[BOS, EOS, PAD, START],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (BOS, EOS, PAD, START)])
    tokenizer.post_processor = TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write *tokenizer* into *folder*: ``tokenizer.json`` and its two companion files."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD}
    plain = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    config = {
        "add_bos_token": True,
        "add_eos_token": False,
        "added_tokens_decoder": {
            str(tokenizer.token_to_id(token)): {"content": token, "special": True, **plain}
            for token in (BOS, EOS, PAD, START)
        },
        "additional_special_tokens": [START],
        **named,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_LENGTH,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    special = {key: {"content": token, **plain} for key, token in named.items()}
    special_map = {**special, "additional_special_tokens": [START]}
    for name, value in (("tokenizer_config", config), ("special_tokens_map", special_map)):
        (folder / f"{name}.json").write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    save(make_tokenizer(), Path(sys.argv[1]))
