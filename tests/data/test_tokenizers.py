import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers as hf
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxformer import data
from jaxformer.data.tokenizers import END_OF_TEXT

TEXTS = [
    "def f(x):\n    return x + 1\n\n\nclass A:\n    def g(self):\n        return self.x\n",
    "if x is None:\n    raise ValueError(x)\nfor i in range(1000):\n    print(i, 3.14159)\n",
] * 3
BYTES = data.ByteTokenizer()
BPE = data.train_bpe(TEXTS, vocab_size=300)


def plain_hugging_face(folder, *, names=("</s>",), **settings):
    """A whitespace tokenizer as another library would save it."""
    vocab = {"[UNK]": 0, "a": 1, "b": 2}
    backend = hf.Tokenizer(hf.models.WordLevel(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = hf.pre_tokenizers.Whitespace()
    backend.add_special_tokens(list(names))
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    if names:
        backend.post_processor = hf.processors.TemplateProcessing(
            single=f"$A {names[0]}", special_tokens=[(names[0], 3)]
        )
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    if settings:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.mark.parametrize("tokenizer", [BYTES, BPE], ids=["bytes", "bpe"])
@given(text=st.text())
@example(text="")
@example(text=END_OF_TEXT * 2)
@example(text="\r\n\t \x00\u2028\ufeff e\u0301 é 🙂👨‍👩‍👧   \n\n    if x:\n")
@settings(max_examples=20, deadline=None)
@pytest.mark.slow(but=["bpe"])
def test_every_text_comes_back(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert ids.dtype == np.int32
    assert all(0 <= i < tokenizer.vocab_size for i in ids)
    assert tokenizer.end_of_text not in ids


@pytest.mark.parametrize("tokenizer", [BYTES, BPE], ids=["bytes", "bpe"])
def test_a_batch_is_a_loop_of_singles(tokenizer):
    texts = ["a b", "", *TEXTS, "üöä"]
    batch = tokenizer.encode_batch(texts)
    assert all(np.array_equal(a, tokenizer.encode(b)) for a, b in zip(batch, texts, strict=True))
    assert all(ids.dtype == np.int32 for ids in batch)


@pytest.mark.parametrize("tokenizer", [BYTES, BPE], ids=["bytes", "bpe"])
def test_decoding_leaves_out_the_end_and_replaces_broken_bytes(tokenizer):
    end = [tokenizer.end_of_text]
    assert tokenizer.decode([*end, *tokenizer.encode("a b"), *end]) == "a b"
    assert tokenizer.decode(tokenizer.encode("é")[:1]) == "\ufffd"
    assert tokenizer.decode(np.array([], np.int32)) == ""
    for bad in (-1, tokenizer.vocab_size):
        message = f"Token ids must be between 0 and {tokenizer.vocab_size - 1}; got {bad}"
        with pytest.raises(ValueError, match=message):
            tokenizer.decode([0, bad])


@pytest.mark.parametrize("tokenizer", [BYTES, BPE], ids=["bytes", "bpe"])
def test_saved_and_read_back_is_the_same(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "deep" / "folder")
    for again in (
        data.load_tokenizer(tmp_path / "deep" / "folder"),
        data.tokenizer_from_json(tokenizer.to_json()),
    ):
        assert isinstance(again, data.Tokenizer) and type(again) is type(tokenizer)
        assert again.to_json() == tokenizer.to_json()
        assert (again.vocab_size, again.end_of_text) == (
            tokenizer.vocab_size,
            tokenizer.end_of_text,
        )
        text = "def f():\n    return 'é'" + END_OF_TEXT
        assert np.array_equal(again.encode(text), tokenizer.encode(text))


def test_bytes_are_bytes():
    assert BYTES.encode("aé").tolist() == [97, 0xC3, 0xA9]
    assert (BYTES.vocab_size, BYTES.end_of_text) == (257, 256)


def test_bpe_joins_the_most_frequent_pair_first():
    """By hand: ``ab`` (3 times), ``abc`` (2), and two more make `` abd`` (once) one piece."""
    tokenizer = data.train_bpe(["abc abd", "abc"], vocab_size=400)
    assert tokenizer.end_of_text == 0
    assert tokenizer.encode("ab").tolist() == [257]
    assert tokenizer.encode("abc").tolist() == [258]
    assert tokenizer.encode(" abd").tolist() == [260]
    assert tokenizer.vocab_size == 261


def test_a_line_end_and_its_indentation_are_one_piece():
    text = "x):\n        y\n" * 9
    tokenizer = data.train_bpe([text], vocab_size=300)
    assert "):\n        " in {tokenizer.decode([i]) for i in tokenizer.encode(text)}


def test_no_piece_has_more_than_three_digits_or_two_words():
    tokenizer = data.train_bpe(["12345678 foo bar\n"] * 50, vocab_size=400)
    pieces = {tokenizer.decode([i]) for i in range(1, tokenizer.vocab_size)}
    assert {"123", " foo", " bar"} <= pieces
    assert not {"1234", "foo bar", " foo bar"} & pieces


def test_build_tokenizer_makes_what_is_chosen():
    assert isinstance(data.build_tokenizer(data.ByteLevel(), TEXTS), data.ByteTokenizer)
    built = data.build_tokenizer(data.BPE(vocab_size=300), iter(TEXTS))
    assert built.to_json() == BPE.to_json()
    assert built.vocab_size == 300
    assert data.BPE().vocab_size == 2048


@pytest.mark.parametrize("make", [data.BPE, lambda **k: data.train_bpe(TEXTS, **k)])
def test_too_small_a_vocabulary_is_refused(make):
    with pytest.raises(ValueError, match="vocab_size must be at least 257.*got 256"):
        make(vocab_size=256)
    assert make(vocab_size=257).vocab_size == 257


@pytest.mark.slow
def test_training_is_the_same_in_every_process():
    """Also with other seeds of Python's hashing and another number of threads."""
    script = (
        "import hashlib, pathlib; from jaxformer import data\n"
        "found = [*data.documents(data.StandardLibrary())][:40]\n"
        "texts = [d.text for d in found]\n"
        "saved = data.train_bpe(texts, vocab_size=600).to_json()\n"
        "print(hashlib.sha256(saved.encode()).hexdigest())"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed, "RAYON_NUM_THREADS": threads},
            cwd=Path(data.__file__).parents[2],
            capture_output=True,
            check=True,
        ).stdout
        for seed, threads in [("1", "1"), ("2", "4")]
    }
    assert len(seen) == 1


def test_a_plain_hugging_face_tokenizer_is_read(tmp_path):
    """Its truncation, padding and added end are off: `pack` puts ends where they belong."""
    plain_hugging_face(tmp_path)
    tokenizer = data.load_tokenizer(tmp_path)
    assert tokenizer.encode("a b a b").tolist() == [1, 2, 1, 2]
    assert (tokenizer.end_of_text, tokenizer.vocab_size) == (3, 4)
    assert tokenizer.decode([1, 3, 2]) == "a b"
    assert 3 not in tokenizer.encode("a</s>")


@pytest.mark.parametrize("token", ["<stop>", {"content": "<stop>", "lstrip": False}])
def test_the_end_of_text_is_the_one_the_configuration_names(tmp_path, token):
    plain_hugging_face(tmp_path, names=("</s>", "<stop>"), eos_token=token)
    assert data.load_tokenizer(tmp_path).end_of_text == 4


def test_a_vocabulary_with_gaps_counts_to_its_largest_token():
    vocab = {"a": 0, "<eos>": 70_000}
    backend = hf.Tokenizer(hf.models.WordLevel(vocab, unk_token="a"))
    tokenizer = data.BPETokenizer(backend, end_of_text="<eos>")
    assert tokenizer.vocab_size == 70_001


def test_a_text_that_the_vocabulary_lacks_is_refused():
    backend = hf.Tokenizer(hf.models.WordLevel({"<eos>": 0, "a": 1}, unk_token="[UNK]"))
    tokenizer = data.BPETokenizer(backend, end_of_text="<eos>")
    for encode in (
        tokenizer.encode,
        tokenizer.encode_with_special_tokens,
        lambda text: tokenizer.encode_offsets([text], rendered=False),
        lambda text: data.tokenize_document(data.Document("x", text), tokenizer),
    ):
        assert encode("a") is not None
        with pytest.raises(ValueError, match=r"The text cannot be encoded: .*Missing \[UNK\]"):
            encode("b")


def test_what_is_saved_opens_with_the_library_alone(tmp_path):
    BPE.save(tmp_path)
    backend = hf.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert backend.encode(TEXTS[0]).ids == BPE.encode(TEXTS[0]).tolist()
    assert backend.token_to_id(END_OF_TEXT) == BPE.end_of_text
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert settings["eos_token"] == END_OF_TEXT


@pytest.mark.parametrize(
    "config, expected",
    [
        # as transformers 5.24 encodes "a<x> b" of such a folder
        ({}, ["<s>", "a", "<x>", "b"]),
        ({"add_bos_token": False, "add_eos_token": True}, ["<s>", "a", "<x>", "b"]),
        ({"split_special_tokens": True}, ["<s>", "a", "<", "x", ">", "b"]),
    ],
)
def test_a_prompt_has_the_special_tokens_that_its_folder_says(config, expected, tmp_path):
    names = ["a", "b", "<", "x", ">", "<s>", "</s>", "<x>"]
    backend = hf.Tokenizer(hf.models.WordLevel({n: i for i, n in enumerate(names)}))
    backend.pre_tokenizer = hf.pre_tokenizers.Whitespace()
    backend.add_special_tokens(names[5:])
    backend.post_processor = hf.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 5)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", **config}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = data.load_tokenizer(tmp_path)
    assert [names[i] for i in tokenizer.encode_with_special_tokens("a<x> b")] == expected
    plain = tokenizer.encode_with_special_tokens("a<x> b", add_special_tokens=False)
    assert [names[i] for i in plain] == expected[1:]
    # A document that spells a special token out does not become it.
    assert [names[i] for i in tokenizer.encode("a<x> b")] == ["a", "<", "x", ">", "b"]
    assert names[tokenizer.bos_token_id] == "<s>"


def test_a_prompt_that_begins_with_the_bos_token_gets_no_second_one():
    tokenizers = pytest.importorskip("tokenizers")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0}, merges=[]))
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    tokenizer = data.BPETokenizer(backend, end_of_text="</s>", split_special_tokens=False)
    for text in ("aa", "<s>aa"):
        assert tokenizer.encode_with_special_tokens(text).tolist() == [1, 0, 0, 2]
    assert tokenizer.encode_with_special_tokens("a<s>").tolist() == [1, 0, 1, 2]
    assert tokenizer.encode_with_special_tokens("").tolist() == [1, 2]


def spaced_tokenizer(words):
    """Words with their space before them, as SentencePiece has; decoding strips the first one."""
    tokenizers = pytest.importorskip("tokenizers")
    vocab = {"</s>": 0} | {f"\u2581{word}": i for i, word in enumerate(words, start=1)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="</s>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    backend.decoder = tokenizers.decoders.Metaspace()
    backend.add_special_tokens(["</s>"])
    return data.BPETokenizer(backend, end_of_text="</s>")


def test_a_continuation_has_the_space_before_its_first_word():
    tokenizer = spaced_tokenizer(["Hello", "world"])
    assert tokenizer.encode("Hello world").tolist() == [1, 2]
    assert tokenizer.decode([2]) == "world"
    continuations = [([1], [2, 1]), ([0, 1], [2, 0]), ([0], [2]), ([], [2]), ([1], [])]
    texts = [data.decode_continuation(tokenizer, *each) for each in continuations]
    assert texts == [" world Hello", " world", "world", "world", ""]


def test_a_continuation_has_the_character_that_its_prompt_began():
    ids = list("a\u5929b".encode())
    for place, text in ((1, "\u5929b"), (2, "\u5929b"), (4, "b")):
        assert data.decode_continuation(data.ByteTokenizer(), ids[:place], ids[place:]) == text


def test_a_switch_that_is_none_is_refused(tmp_path):
    plain_hugging_face(tmp_path, split_special_tokens="yes")
    message = r"tokenizer_config\.json: split_special_tokens is a string, not a boolean"
    with pytest.raises(ValueError, match=message):
        data.load_tokenizer(tmp_path)


def test_what_is_no_tokenizer_is_refused(tmp_path):
    path = tmp_path / "tokenizer.json"
    with pytest.raises(ValueError, match=r"tokenizer\.json does not exist"):
        data.load_tokenizer(tmp_path)
    path.write_text('{\n"a": }')
    with pytest.raises(ValueError, match=r"tokenizer\.json is not JSON: .* line 2"):
        data.load_tokenizer(tmp_path)
    path.write_text("[]")
    with pytest.raises(ValueError, match=r"tokenizer\.json is a list, not an object"):
        data.load_tokenizer(tmp_path)
    path.write_text('{"b": 1, "a": 2}')
    with pytest.raises(
        ValueError, match=r"tokenizer\.json is not a tokenizer; its 2 keys: 'a', 'b'\."
    ):
        data.load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match=r"The text is not a tokenizer; its 1 keys: 'type'\."):
        data.tokenizer_from_json('{"type": "BPETokenizer"}')
    path.write_text('{"model": {"type": "BPE"}, "added_tokens": [{"content": "</s>"}]}')
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer: "):
        data.load_tokenizer(tmp_path)
    plain_hugging_face(tmp_path, names=())
    with pytest.raises(ValueError, match="no end-of-text .* none of .*</s>.* is among the 0 added"):
        data.load_tokenizer(tmp_path)
    plain_hugging_face(tmp_path, names=(), eos_token="<stop>")
    with pytest.raises(
        ValueError, match="The end-of-text token '<stop>' is not among the 3 tokens"
    ):
        data.load_tokenizer(tmp_path)


@pytest.mark.parametrize("kind", ["cut", "flipped"])
def test_a_damaged_tokenizer_file_is_named(tmp_path, kind):
    BPE.save(tmp_path)
    path = tmp_path / "tokenizer.json"
    whole = path.read_bytes()
    for at in range(0, len(whole) - 1, len(whole) // 60):
        flipped = whole[:at] + bytes([whole[at] ^ 0x80]) + whole[at + 1 :]
        path.write_bytes(whole[:at] if kind == "cut" else flipped)
        with pytest.raises(ValueError, match=r"tokenizer\.json is (not JSON|no t)"):
            data.load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"model": {}, "added_tokens": [{}]}', "not a tokenizer: an added token has no content"),
        ('{"model": {}, "added_tokens": [3]}', "not a tokenizer: an added token has no content"),
        ('{"type": "CharacterTokenizer", "alphabet": "aa"}', "not a tokenizer: alphabet must have"),
    ],
)
def test_a_tokenizer_file_that_cannot_be_is_named(tmp_path, content, message):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=rf"tokenizer\.json (is )?{message}"):
        data.load_tokenizer(tmp_path)


def test_an_end_of_text_that_is_no_text_is_refused(tmp_path):
    plain_hugging_face(tmp_path, names=(), eos_token=5)
    with pytest.raises(
        ValueError, match=r"tokenizer_config\.json: eos_token must be a string, null"
    ):
        data.load_tokenizer(tmp_path)


def test_without_the_library_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    message = r"tokenizers, which is not installed: pip install 'jaxformer\[train\]'"
    with pytest.raises(ImportError, match=message):
        data.train_bpe(TEXTS, vocab_size=300)
    with pytest.raises(ImportError, match=message):
        data.tokenizer_from_json(BPE.to_json())
    assert data.build_tokenizer(data.ByteLevel(), TEXTS).vocab_size == 257


# Characters


def test_characters_are_those_of_the_texts_in_order(tmp_path):
    tokenizer = data.build_tokenizer(data.Characters(), ["二 b", "ab", ""])
    assert tokenizer.encode(" ab二").tolist() == [0, 1, 2, 3]
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (5, 4)
    assert tokenizer.decode([3, 4, 1, 4]) == "二a"
    tokenizer.save(tmp_path)
    again = data.load_tokenizer(tmp_path)
    assert isinstance(again, data.Tokenizer)
    assert again.to_json() == tokenizer.to_json()
    assert [ids.tolist() for ids in again.encode_batch(["b", "", "a二"])] == [[2], [], [1, 3]]


def test_characters_that_are_not_known_are_refused():
    tokenizer = data.CharacterTokenizer("ab")
    message = (
        r"Character 'c' \(U\+0063\) at 3, in line 2 .* not among the 3 .* \('\\nab'\); ByteLevel"
    )
    with pytest.raises(ValueError, match=message):
        data.CharacterTokenizer("\nab").encode("ab\nc")
    many = data.CharacterTokenizer("".join(map(chr, range(0x4E00, 0x9000))))
    with pytest.raises(ValueError, match=r"'\\u2192' \(U\+2192\)") as caught:
        many.encode("\u4e00" * 10_000 + "\u2192")
    assert len(str(caught.value)) < 250
    with pytest.raises(ValueError, match="Token ids must be between 0 and 2; got 3"):
        tokenizer.decode([0, 3])


@pytest.mark.parametrize(
    "alphabet, counts", [("", "0 characters, 0 of"), ("aba", "3 characters, 2 of")]
)
def test_an_alphabet_that_cannot_be_is_refused(alphabet, counts):
    with pytest.raises(ValueError, match=f"at least one character and no duplicates; got {counts}"):
        data.CharacterTokenizer(alphabet)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux alone has a full device")
def test_a_save_that_fails_names_its_file(tmp_path):
    (tmp_path / "tokenizer.json").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"tokenizer\.json could not be written: No space left"):
        BYTES.save(tmp_path)
