"""Documents to tokens: those of the whole text, and which of them count."""

import json

import pytest
import tokenizers as hf

from jaxformer import data

PIECES = ("▁Hello", "▁Paris", "▁is", "▁[INST]", "▁[/INST]")
LLAMA = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }} {{ eos_token }}{% endif %}{% endfor %}"
)
LINE = {"prompt": "Hello", "answer": "Paris is"}


def saved(backend, folder, **config):
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def llama(tmp_path):
    """A folder as of Llama 2: a space is put before every text, and <s> before a prompt."""
    specials = ["<unk>", "<s>", "</s>"]
    letters = sorted(set("".join(PIECES)))
    heads = [word[:i] for word in PIECES for i in range(2, len(word) + 1)]
    merges = [(head[:-1], head[-1]) for head in dict.fromkeys(heads)]
    vocab = {token: i for i, token in enumerate(dict.fromkeys([*specials, *letters, *heads]))}
    backend = hf.Tokenizer(hf.models.BPE(vocab=vocab, merges=merges, unk_token="<unk>"))
    backend.normalizer = hf.normalizers.Sequence(
        [hf.normalizers.Prepend("▁"), hf.normalizers.Replace(" ", "▁")]
    )
    backend.add_special_tokens(specials)
    backend.post_processor = hf.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": LLAMA}
    return saved(backend, tmp_path / "llama", **config)


def spelt(folder, line, tmp_path, **load):
    """The tokens of an instruction, and those of them that count."""
    (tmp_path / "x.jsonl").write_text(json.dumps(line) + "\n")
    corpus = data.Instructions(path=str(tmp_path / "x.jsonl"))
    (document,) = data.documents(corpus, **load)
    ids, counts = data.tokenize_document(document, data.load_tokenizer(folder))
    name = hf.Tokenizer.from_file(str(folder / "tokenizer.json")).id_to_token
    names = [name(i) for i in ids]
    return names, [name for name, count in zip(names, counts, strict=True) if count]


def test_an_answer_has_no_space_that_the_whole_text_has_not(llama, tmp_path):
    """As apply_chat_template of transformers 5.24 gives them, and an end of text."""
    names, counted = spelt(llama, LINE, tmp_path, template=data.load_chat_template(llama))
    answer = ["▁Paris", "▁is", "▁", "</s>"]
    assert names == ["<s>", "▁[INST]", "▁Hello", "▁[/INST]", *answer, "</s>"]
    assert counted == answer


def test_a_token_of_prompt_and_answer_counts(llama, tmp_path):
    line = {"prompt": "Hello Pa", "answer": "ris is"}
    names, counted = spelt(llama, line, tmp_path)
    assert names == ["▁Hello", "▁Paris", "▁is", "</s>"]
    assert counted == names[1:]


def byte_level(*names, trim_offsets=True):
    """One token a byte, and special ones."""
    alphabet = sorted(hf.pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*names, *alphabet])}
    backend = hf.Tokenizer(hf.models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.post_processor = hf.processors.ByteLevel(trim_offsets=trim_offsets)
    backend.add_special_tokens([*names])
    return backend


@pytest.mark.parametrize("trim_offsets", [True, False])
def test_spaces_and_parts_of_characters_count_with_their_answer(trim_offsets, tmp_path):
    """Offsets leave spaces out, or not; both bytes of é have those of the whole character."""
    backend = byte_level("<e>", trim_offsets=trim_offsets)
    folder = saved(backend, tmp_path / "theirs", eos_token="<e>")
    names, counted = spelt(folder, {"prompt": "is?  ", "answer": "  é y"}, tmp_path)
    assert names == [*"is?ĠĠĠĠÃ©Ġy", "<e>"]
    assert counted == [*"ĠĠÃ©Ġy", "<e>"]


@pytest.mark.parametrize(
    "config, expected",
    [({}, ["i", "<x>", "a", "<x>", "<e>"]), ({"split_special_tokens": True}, [*"i<x>a<x>", "<e>"])],
    ids=["whole", "split"],
)
def test_special_tokens_in_instructions_are_those_of_the_tokenizer(config, expected, tmp_path):
    folder = saved(byte_level("<e>", "<x>"), tmp_path / "theirs", eos_token="<e>", **config)
    names, counted = spelt(folder, {"prompt": "i<x>", "answer": "a<x>"}, tmp_path)
    assert names == expected
    assert counted == expected[expected.index("a") :]


def test_a_document_begins_as_the_tokenizers_texts_do(llama, tmp_path):
    """<s> is what the first token is predicted from, and is never predicted itself."""
    tokenizer = data.load_tokenizer(llama)
    documents = [data.Document(name, text) for name, text in (("a", "Hello"), ("b", "Paris is"))]
    rows = data.pack(documents, tokenizer, row_length=4, folder=tmp_path / "cache")
    batch = next(iter(data.evaluation_batches(rows, batch_size=2)))
    name = hf.Tokenizer.from_file(str(llama / "tokenizer.json")).id_to_token
    shown = [[name(i) for i in part.ravel()] for part in (batch.tokens, batch.targets)]
    assert shown[0][:5] == ["<s>", "▁Hello", "<s>", "▁Paris", "▁is"]
    assert shown[1][:5] == ["▁Hello", "</s>", "▁Paris", "▁is", "</s>"]
    plain = data.ByteTokenizer()
    rows = data.pack(documents, plain, row_length=4, folder=tmp_path / "cache")
    assert next(iter(data.evaluation_batches(rows, batch_size=1))).tokens[0, 0] == plain.end_of_text
