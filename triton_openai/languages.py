"""
The languages of speech: their codes (ISO 639-1, and longer ones where that has none) and their English names.

Source: the table of Whisper's tokenizer (openai/whisper, ``tokenizer.py``), whose names the API's answers have too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_NAMES = (
    "en english,zh chinese,de german,es spanish,ru russian,ko korean,fr french,ja japanese,pt portuguese,tr turkish,"
    "pl polish,ca catalan,nl dutch,ar arabic,sv swedish,it italian,id indonesian,hi hindi,fi finnish,vi vietnamese,"
    "he hebrew,uk ukrainian,el greek,ms malay,cs czech,ro romanian,da danish,hu hungarian,ta tamil,no norwegian,"
    "th thai,ur urdu,hr croatian,bg bulgarian,lt lithuanian,la latin,mi maori,ml malayalam,cy welsh,sk slovak,"
    "te telugu,fa persian,lv latvian,bn bengali,sr serbian,az azerbaijani,sl slovenian,kn kannada,et estonian,"
    "mk macedonian,br breton,eu basque,is icelandic,hy armenian,ne nepali,mn mongolian,bs bosnian,kk kazakh,"
    "sq albanian,sw swahili,gl galician,mr marathi,pa punjabi,si sinhala,km khmer,sn shona,yo yoruba,so somali,"
    "af afrikaans,oc occitan,ka georgian,be belarusian,tg tajik,sd sindhi,gu gujarati,am amharic,yi yiddish,lo lao,"
    "uz uzbek,fo faroese,ht haitian creole,ps pashto,tk turkmen,nn nynorsk,mt maltese,sa sanskrit,lb luxembourgish,"
    "my myanmar,bo tibetan,tl tagalog,mg malagasy,as assamese,tt tatar,haw hawaiian,ln lingala,ha hausa,ba bashkir,"
    "jw javanese,su sundanese,yue cantonese"
)
#: English names in lower case, by code.
LANGUAGES: Mapping[str, str] = {code: name for code, _, name in (entry.partition(" ") for entry in _NAMES.split(","))}
_CODES: Mapping[str, str] = {
    **{name: code for code, name in LANGUAGES.items()},
    **{"mandarin": "zh", "burmese": "my", "castilian": "es", "flemish": "nl", "valencian": "ca", "moldavian": "ro"},
    **{"panjabi": "pa", "sinhalese": "si", "pushto": "ps", "haitian": "ht", "letzeburgesch": "lb", "moldovan": "ro"},
    **{"jv": "jw", "iw": "he", "nb": "no"},
}
#: Thai, Lao, Burmese, Khmer, Chinese, Japanese and their punctuation, which put no blanks between sentences or words.
UNSPACED = r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3000-\u30ff\u3400-\u9fff\uf900-\ufaff\uff00-\uff60"
_UNSPACED = re.compile(f"[{UNSPACED}]")


def blank_between(before: str, after: str) -> str:
    """Return what stands between two pieces of a text: a blank, unless one is empty or its script has none there."""
    if before and after and not _UNSPACED.search(before[-1] + after[0]):
        return " "
    return ""


def code_of(language: str) -> str:
    """Return the code of *language*, which is a code or an English name, with or without a region (``en-US``)."""
    plain = language.strip().lower()
    code = _CODES.get(plain, plain)
    if code not in LANGUAGES and (base := plain.partition("-")[0].partition("_")[0]) in LANGUAGES:
        return base
    return code
