"""
Make the demo's tokenizer: a small byte-level BPE, written as Hugging Face models ship theirs.

The corpus is English in ASCII. So an accented letter or an emoji is several tokens, and short texts are enough to test
characters that are split over tokens.

Run ``python -m triton_openai.demo.make_tokenizer FOLDER``; the result depends on nothing but this file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

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

_PROSE = """
A server takes a request, does some work, and sends back an answer. When the answer is long, it is better to send it in
small pieces while the work goes on, because the person who asked can begin to read at once. This is called streaming.
Every piece travels on its own, and the reader puts them together again. If the reader goes away, the server should stop
working, since nobody will ever see the rest of the answer.

I am a stand-in for a language model, running inside a real Triton server. I do not understand what you write, and I do
not think about it. You wrote these words, and I repeat them to show that they have arrived. I say so in plain words,
because a program that pretends to know things which it does not know is of no use to anyone. Please do not take what I
say for the answer of a language model. This text was made up by a small program. There is no model behind it.

The weather in the north was cold this morning, and a light rain fell over the harbour. Two boats came in before noon,
carrying fish, salt and a box of oranges. A woman in a green coat stood on the stones and counted the people who went
ashore. She had been waiting for her brother since spring. He was a carpenter, and he had promised to build a house with
a wide window, from which one could look over the water. When he came at last, they both laughed, and went home together
under the trees. The children of the town ran after them and asked for stories about the sea.

To make bread you need flour, water, salt and time. Mix the flour with the water and let it rest for an hour. Add the
salt, fold the dough a few times, and leave it in a cool place over night. The next day, heat the oven until it is very
hot, and bake the bread for forty minutes. It should sound hollow when you knock on it. Let it cool down before you cut
it, even if that is difficult.

In mathematics, a number is prime if it is greater than one and cannot be divided by any other number except one and
itself. The first primes are two, three, five, seven, eleven and thirteen. There is no largest prime. Suppose there were
a last one; multiply all of them and add one, and none of them divides the result. So there must be another. The proof
is more than two thousand years old, and it is still one of the best that we have.

A program is a list of instructions for a machine. It reads some input, changes some state, and writes some output. Good
programs are easy to read, because people read them far more often than they write them. Give each thing one name, keep
each function short, and say why you did something when the reason is not clear from the code. Test what you have made,
and fix what is broken before you build on top of it. A function returns a value. A class holds data and the functions
that work on it. A list holds items in order; a dictionary finds a value by its key; a string is a sequence of
characters.

The capital of France is Paris. The capital of Germany is Berlin. The capital of Italy is Rome. The capital of Spain is
Madrid. Water boils at one hundred degrees and freezes at zero. The sun rises in the east and sets in the west. The moon
goes around the earth in about one month, and the earth goes around the sun in one year. Light is faster than sound.
Hello, how are you today? I am fine, thank you, and what about you? Could you please tell me what the time is? It is
half past nine. What would you like to drink? A cup of tea, please. Where do you live, and how long have you been there?
Tell me a short story about a dog, a cat and a bird. Write a poem about the autumn. Explain what a computer does. You
are a helpful assistant. Answer the question of the user. Say this is a test. One, two, three, four, five, six, seven,
eight.
"""

_WORDS = """
able about above accept across act action active actually address after again against age agree air allow almost alone
along already also always among amount animal another any anything appear apply area argue arm around arrive article
artist ask assistant assume attack attention author available avoid away baby back bad ball bank bar base beat beautiful
because become bed before begin behavior behind believe benefit best better between beyond big bill black blood blue
board body book born both box boy break bring brother budget build building business but buy call camera campaign can
cancer candidate car card care career carry case catch cause cell center central century certain chair challenge chance
change character charge check child choice choose church citizen city civil claim class clear close coach cold
collection college color come commercial common community company compare computer concern condition conference
consider consumer contain continue control cost could country couple course court cover create crime culture cup current
customer cut dark data daughter day dead deal death debate decade decide decision deep defense degree democrat describe
design despite detail determine develop difference different difficult dinner direction discover discuss disease door
down draw dream drive drop drug during each early east easy eat economy edge education effect effort eight either
election else employee end energy enjoy enough enter entire environment especially establish even evening event ever
every everyone evidence exactly example executive exist expect experience expert explain eye face fact factor fail fall
family far fast father fear federal feel few field fight figure fill film final finally find fine finger finish fire
firm first fish five floor fly focus follow food foot force foreign forget form former forward four free friend from
front full fund future game garden gas general generation get girl give glass goal good government great green ground
group grow growth guess gun guy hair half hand hang happen happy hard have head health hear heart heat heavy help here
herself high himself history hit hold home hope hospital hot hotel hour house how however huge human hundred husband
idea identify image imagine impact important improve include increase indeed indicate individual industry information
inside instead institution interest interview into investment involve issue item itself job join just keep key kid kill
kind kitchen know knowledge land language large last late later laugh law lawyer lay lead leader learn least leave left
leg legal less let letter level lie life light like likely line list listen little live local long look lose loss lot
love low machine magazine main maintain major majority make man manage manager many market marriage material matter
maybe mean measure media medical meet meeting member memory mention message method middle might military million mind
minute miss mission model modern moment money month more morning most mother mouth move movement movie much music must
name nation national natural nature near nearly necessary need network never new news newspaper next nice night none
nor north note nothing notice now number occur off offer office officer official often oil old once only onto open
operation opportunity option order organization other others outside over own owner page pain painting paper parent part
particular partner party pass past patient pattern pay peace people perform perhaps period person phone physical pick
picture piece place plan plant play player point police policy political poor popular population position positive
possible power practice prepare present president pressure pretty prevent price private probably problem process produce
product production professional professor program project property protect prove provide public pull purpose push put
quality question quickly quite race radio raise range rate rather reach read ready real reality realize really reason
receive recent recognize record red reduce reflect region relate relationship remain remember remove report represent
require research resource respond response rest result return reveal rich right rise risk road rock role room rule run
safe same save say scene school science scientist score sea season seat second section security see seek seem sell send
senior sense series serious serve service set seven several shake share she shoot short shot should shoulder show side
sign significant similar simple simply since sing single sister sit site situation six size skill skin small smile
social society soldier some somebody someone something sometimes son song soon sort sound source south southern space
speak special specific speech spend sport spring staff stage stand standard star start state statement station stay step
still stock stop store story strategy street strong structure student study stuff style subject success such suddenly
suffer suggest summer support sure surface system table take talk task tax teach teacher team technology television tell
ten tend term test than thank that the their them themselves then theory there these they thing think third this those
though thought thousand threat three through throughout throw thus time today together tonight too top total tough
toward town trade traditional training travel treat treatment tree trial trip trouble true truth try turn type under
understand unit until upon use usually value various very victim view violence visit voice vote wait walk wall want war
watch water way weapon wear week weight well west western what whatever when where whether which while white whole whom
whose why wide wife will win wind window wish with within without woman wonder word work worker world worry would write
writer wrong yard yeah year yes yet you young your yourself
"""

_SYNTAX = """
{"name": "get_weather", "arguments": {"city": "Paris", "unit": "celsius"}} [1, 2, 3] (a + b) * c == d != e <= f
def main(): return 0 import json print("hello") for i in range(10): if x is None: raise ValueError <think> </think>
<tool_call> </tool_call> {"type": "object", "properties": {"value": {"type": "string"}}, "required": ["value"]}
system user assistant tool system\nuser\nassistant\ntool\n <<steer { "text": "", "delay_ms": 0, "tokens": [] }>>
1 2 3 4 5 6 7 8 9 10 11 12 20 30 40 50 60 70 80 90 100 1000 2024 2025 http:// https:// .com .org ... -- ## ** ```
"""


def corpus() -> list[str]:
    """Return the texts for training the tokenizer."""
    words = _WORDS.split()
    lines = [*_PROSE.strip().split("\n\n"), *_SYNTAX.splitlines()]
    # Each word also as it stands inside a sentence (with a space before it) and at the start of one.
    lines += [" ".join(words), " ".join(word.capitalize() for word in words)]
    return lines


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
    added = {
        str(tokenizer.token_to_id(token)): {
            "content": token, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False,
            "special": True,
        }
        for token in (BOS, EOS, PAD, START)
    }  # fmt: skip
    _write(
        folder / "tokenizer_config.json",
        {
            "add_bos_token": True,
            "add_eos_token": False,
            "added_tokens_decoder": added,
            "additional_special_tokens": [START],
            **named,
            "chat_template": CHAT_TEMPLATE,
            "clean_up_tokenization_spaces": False,
            "model_max_length": MAX_LENGTH,
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )
    special = {key: {"content": token, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
               for key, token in named.items()}  # fmt: skip
    _write(folder / "special_tokens_map.json", {**special, "additional_special_tokens": [START]})


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    save(make_tokenizer(), Path(sys.argv[1]))
