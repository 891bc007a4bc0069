"""Prompts and answers: what of them counts, and how they lie in rows."""

import json

import pytest
import tokenizers as hf

from jaxformer import data
from jaxformer.data import ChatTemplate, Instructions

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "And 3+3?"},
    {"role": "assistant", "content": "6"},
]
BYTES = data.ByteTokenizer()
END = BYTES.end_of_text


def write(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Instructions(path=str(path))


def rows_of(documents, length, folder, tokenizer=BYTES):
    return data.pack(documents, tokenizer, row_length=length, folder=folder)


def spelt(tokens):
    return "".join("E" if t == END else chr(t) for t in tokens)


def test_answers_count_and_prompts_do_not(tmp_path):
    corpus = write(
        tmp_path / "x.jsonl", {"prompt": "ab", "answer": "c"}, {"prompt": "d", "answer": "ef"}
    )
    rows = rows_of(data.documents(corpus), 9, tmp_path)
    batch = next(iter(data.evaluation_batches(rows, batch_size=1)))
    assert spelt(rows[0].tokens) == "EabcEdefEE"
    assert spelt(batch.targets[0][batch.loss_mask[0]]) == "cEefE"
    assert rows[0].segments.tolist() == [1, 1, 1, 1, 2, 2, 2, 2, 0]
    assert (rows.num_targets, rows.num_bytes, rows.num_documents) == (5, 3, 2)


def test_no_instruction_crosses_the_end_of_a_row(tmp_path):
    lines = [{"prompt": "a" * n, "answer": "b" * n} for n in (1, 2, 1, 3)]
    rows = rows_of(data.documents(write(tmp_path / "x.jsonl", *lines)), 7, tmp_path)
    assert [spelt(row.tokens) for row in map(rows.__getitem__, range(len(rows)))] == [
        "EabEEEEE",
        "EaabbEEE",
        "EabEEEEE",
        "EaaabbbE",
    ]
    batches = list(data.evaluation_batches(rows, batch_size=4))
    counted = [spelt(t[m]) for t, m in zip(batches[0].targets, batches[0].loss_mask, strict=True)]
    assert counted == ["bE", "bbE", "bE", "bbbE"]


def test_an_instruction_may_end_with_its_row(tmp_path):
    lines = [
        {"prompt": "a", "answer": "b"},
        {"prompt": "c", "answer": "de"},
        {"prompt": "", "answer": "f"},
    ]
    rows = rows_of(data.documents(write(tmp_path / "x.jsonl", *lines)), 7, tmp_path)
    assert [spelt(rows[i].tokens) for i in range(len(rows))] == ["EabEcdeE", "EfEEEEEE"]


def test_what_is_longer_than_a_row_is_counted_and_said(tmp_path):
    lines = [{"prompt": "abc", "answer": "defgh"}, {"prompt": "i", "answer": "j"}]
    warning = "1 of 2 instructions are longer than a row of 6 tokens and are truncated."
    with pytest.warns(UserWarning, match=warning):
        rows = rows_of(data.documents(write(tmp_path / "x.jsonl", *lines)), 6, tmp_path)
    assert [spelt(rows[i].tokens) for i in (0, 1)] == ["EabcdeE", "EijEEEE"]
    assert rows.num_targets == 2 + 2  # of the first answer what fits, and no end
    assert rows.num_bytes == 2 + 1


@pytest.mark.filterwarnings("ignore:.* are longer than a row")
@pytest.mark.parametrize("length", [7, 11, 12, 13, 14, 15, 16, 24, 40])
@pytest.mark.parametrize("kind", ["bytes", "characters", "pieces"])
def test_bytes_are_those_of_the_targets_that_count(kind, length, tmp_path):
    """Wherever a row cuts an answer: they are what its tokens are decoded to."""
    answer = "z\u00e9\u5929z\U0001f600z" * 3
    tokenizer = {
        "bytes": BYTES,
        "characters": data.CharacterTokenizer("".join(sorted(set("abc" + answer)))),
        "pieces": data.train_bpe(["abc abc z"], vocab_size=262),
    }[kind]
    corpus = write(tmp_path / "x.jsonl", {"prompt": "abc", "answer": answer})
    rows = rows_of(data.documents(corpus), length, tmp_path, tokenizer)
    targets = rows[[0]].tokens[:, 1:][rows.loss_mask_at([0])].tolist()
    if kind == "characters":
        size = len(tokenizer.decode(targets).encode())
    else:  # a byte each
        size = len(targets) - targets.count(tokenizer.end_of_text)
    assert rows.num_bytes == size > 0


def test_instructions_whose_prompts_fill_a_row_are_left_out(tmp_path):
    lines = [{"prompt": "a" * n, "answer": "b"} for n in (6, 2, 9)]
    corpus = write(tmp_path / "x.jsonl", *lines)
    with pytest.warns(UserWarning, match="2 of 3 instructions are longer than a row of 6 tokens"):
        rows = rows_of(data.documents(corpus), 6, tmp_path)
    assert [spelt(rows[i].tokens) for i in range(len(rows))] == ["EaabEEE"]
    assert (rows.num_documents, rows.num_targets, rows.num_bytes) == (1, 2, 1)


@pytest.mark.parametrize(
    "prompt, answer, message",
    [
        ("a" * 9, "b", "prompts of 2 instructions fill rows of 6 tokens without an answer"),
        ("a", "", "The answers of 2 instructions are empty"),
    ],
)
def test_instructions_that_teach_nothing_are_refused(prompt, answer, message, tmp_path):
    corpus = write(tmp_path / "x.jsonl", *[{"prompt": prompt, "answer": answer}] * 2)
    with pytest.raises(ValueError, match=message):
        rows_of(data.documents(corpus), 6, tmp_path / "cache")
    assert all(path.suffix == ".parts" for path in (tmp_path / "cache").iterdir())


def test_rows_are_opened_again_and_differ_by_what_counts(tmp_path):
    documents = data.documents(write(tmp_path / "x.jsonl", {"prompt": "ab", "answer": "cd"}))
    rows, again = (rows_of(documents, 9, tmp_path / "cache") for _ in range(2))
    assert rows.digest == again.digest and len(list((tmp_path / "cache").iterdir())) == 1
    other = data.documents(write(tmp_path / "x.jsonl", {"prompt": "abc", "answer": "d"}))
    assert rows_of(other, 9, tmp_path / "cache").digest != rows.digest
    plain = [data.Document("x", "abcd")]
    assert rows_of(plain, 9, tmp_path / "cache").loss_mask is None


def test_a_template_writes_a_conversation_of_which_the_assistants_part_counts():
    pieces = ChatTemplate(TEMPLATE, {}).spans(TALK)
    assert [text for text, counts in pieces if counts] == ["4<|im_end|>\n", "6<|im_end|>\n"]
    assert "".join(text for text, _ in pieces) == ChatTemplate(TEMPLATE, {}).render(TALK)
    assert pieces[0][0].endswith("2+2?<|im_end|>\n<|im_start|>assistant\n")
    assert pieces[-1] == ("", False)


@pytest.fixture
def chatting(tmp_path):
    """A folder of a tokenizer whose special tokens a chat template spells out."""
    backend = hf.Tokenizer(hf.models.BPE())
    backend.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = hf.decoders.ByteLevel()
    names = ["<|im_start|>", "<|im_end|>"]
    alphabet = hf.pre_tokenizers.ByteLevel.alphabet()
    trainer = hf.trainers.BpeTrainer(
        vocab_size=300, special_tokens=names, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(["Be brief. And 2+2? user assistant system"], trainer)
    folder = tmp_path / "theirs"
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_special_tokens_of_a_template_are_single_tokens(chatting, tmp_path):
    """As the tokenizers library reads the rendered text."""
    template, tokenizer = data.load_chat_template(chatting), data.load_tokenizer(chatting)
    corpus = write(tmp_path / "x.jsonl", {"messages": TALK}, {"prompt": "Hi", "answer": "Yes"})
    documents = data.documents(corpus, template=template)
    rows = rows_of(documents, 400, tmp_path, tokenizer)
    end = tokenizer.end_of_text
    theirs = hf.Tokenizer.from_file(str(chatting / "tokenizer.json"))
    conversation = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
    expected = [end]
    for messages in (TALK, conversation):
        expected += [*theirs.encode(template.render(messages)).ids, end]
    tokens = rows[0].tokens
    assert tokens[: len(expected)].tolist() == expected
    batch = next(iter(data.evaluation_batches(rows, batch_size=1)))
    counted = batch.targets[0][batch.loss_mask[0]].tolist()
    assert theirs.decode(counted, skip_special_tokens=False) == (
        "4<|im_end|>\n6<|im_end|>\nYes<|im_end|>\n"
    )
    assert batch.positions[0][1] == 0  # a template opens its text itself
    assert rows.num_bytes == len("4\n6\nYes\n")  # however <|im_end|> is spelt
    answers = [data.loss_text(document, tokenizer) for document in documents]
    assert answers == ["4\n6\n", "Yes\n"]


@pytest.mark.parametrize("normaliser", [None, hf.normalizers.NFKC()], ids=["as it is", "NFKC"])
@pytest.mark.parametrize("pieces", ["words", "unigrams", "byte fallback"])
def test_the_text_that_counts_is_that_of_the_file(pieces, normaliser, tmp_path):
    """What a tokenizer leaves out or writes otherwise is of it; bytes are those of the file."""
    answer = " the \ufb01rst\u2003\u212b  \u5929 "
    if pieces == "words":
        names = {"<eos>": 0, "?": 1, "what": 2}
        backend = hf.Tokenizer(hf.models.WordLevel(names, unk_token="?"))
        backend.pre_tokenizer = hf.pre_tokenizers.Whitespace()
        backend.add_special_tokens(["?"])
    elif pieces == "unigrams":
        scores = [("<eos>", 0.0), ("?", 0.0), ("what", -1.0), (" ", -1.0)]
        backend = hf.Tokenizer(hf.models.Unigram(scores, unk_id=1))
        backend.add_special_tokens(["?"])
    else:
        names = {f"<0x{i:02X}>": i for i in range(256)} | {"<eos>": 256, "\u2581": 257, "what": 258}
        backend = hf.Tokenizer(hf.models.BPE(names, [], byte_fallback=True, unk_token="<0x3F>"))
        backend.pre_tokenizer = hf.pre_tokenizers.Metaspace(prepend_scheme="first")
    if normaliser is not None:
        backend.normalizer = normaliser
    tokenizer = data.BPETokenizer(backend, end_of_text="<eos>")
    corpus = write(tmp_path / "x.jsonl", {"prompt": "what", "answer": answer})
    (document,) = data.documents(corpus)
    assert data.loss_text(document, tokenizer) == answer
    assert rows_of([document], 99, tmp_path, tokenizer).num_bytes == len(answer.encode())


def test_a_template_may_stand_in_a_file_of_its_own(chatting):
    (chatting / "chat_template.jinja").write_text("{{ eos_token }}{{ messages[0].content }}")
    template = data.load_chat_template(chatting / "tokenizer.json")
    assert template.render([{"role": "user", "content": "x"}]) == "<|im_end|>x"
    (chatting / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(ValueError, match=r"Invalid chat template: "):
        data.load_chat_template(chatting)


@pytest.mark.parametrize(
    "source, message",
    [
        ("{{ raise_exception('No system here.') }}", "No system here"),
        ("{{ messages.__class__.__mro__ }}", "fails on these messages: .* is unsafe"),
        ("{{ messages|length }}", "leaves out the content of the assistant's messages"),
        (
            "{{ messages|map(attribute='content')|map('length')|sum }}"
            "{% for m in messages %}{{ m.content }}{% endfor %}",
            "renders other messages differently depending on message 3",
        ),
    ],
)
def test_templates_are_run_in_a_sandbox_and_must_be_consistent(source, message):
    with pytest.raises(ValueError, match=message):
        ChatTemplate(source, {}).spans(TALK)


@pytest.mark.parametrize(
    "line, message",
    [
        ({"prompt": "a"}, "x.jsonl line 2: answer must be text; the record has prompt"),
        ({"prompt": "a", "answer": 3}, "line 2: answer must be text"),
        ({}, "line 2: prompt and answer must be text; the record has no fields"),
        ({"messages": TALK}, "line 2: messages needs a tokenizer with a chat template"),
        ({"messages": [3]}, "line 2: messages must be a list of objects with role and content"),
        ({"messages": TALK, "tools": [{}]}, "line 2: the field tools is not supported: write"),
        (
            {"prompt": "a", "completion": "b"},
            r"line 2: answer .*named by Instructions\(path=..., p",
        ),
        (
            {"instruction": "a", "input": 3, "output": "b"},
            r"instruction and input must be text; .*3",
        ),
        ({"instruction": "a", "output": "b", "system": "c"}, "messages needs a tokenizer with a"),
        ({"conversations": "a"}, "line 2: conversations must be a list; got 'a'"),
        (
            {"instruction": "a", "output": "b", "history": [["c", "d"], ["e"]]},
            r"history must be pairs of texts; got \[\['c', 'd'\], \['e'\]\]",
        ),
        (
            {"instruction": "a", "output": "b", "history": ["cd"]},
            r"history must be pairs of texts; got \['cd'\]",
        ),
        (
            {"conversations": [{"from": "bing"}]},
            "a message from 'bing'; system, user, assistant, hu",
        ),
    ],
)
def test_a_line_that_is_no_instruction_is_refused_with_its_place(line, message, tmp_path):
    corpus = write(tmp_path / "x.jsonl", {"prompt": "a", "answer": "b"}, line)
    with pytest.raises(ValueError, match=message):
        list(data.documents(corpus))


def test_records_of_alpaca_are_prompts_and_answers(tmp_path):
    """The input follows the instruction on a new line; empty fields are as if they were absent."""
    alpaca = {"instruction": "Add.", "input": "2+2", "output": "4"}
    empty = {"instruction": "Hi", "input": "", "output": "Yes", "system": "", "history": []}
    ours = {"prompt": "Add.\n2+2", "answer": "4"}, {"prompt": "Hi", "answer": "Yes"}
    for template in (None, ChatTemplate(TEMPLATE, {})):
        read, expected = (
            [x.spans for x in data.documents(write(tmp_path / name, *lines), template=template)]
            for name, lines in (("a.jsonl", (alpaca, empty)), ("b.jsonl", ours))
        )
        assert read == expected
    named = Instructions(path=str(tmp_path / "a.jsonl"), prompt="instruction", answer="output")
    assert next(iter(data.documents(named))).text == "Add.4"


@pytest.mark.parametrize(
    "line",
    [
        {
            "conversations": [
                {"from": "system", "value": "Be brief."},
                *(
                    {"from": x, "value": m["content"]}
                    for x, m in zip(("human", "gpt", "user", "assistant"), TALK[1:], strict=True)
                ),
            ]
        },
        {
            "system": "Be brief.",
            "conversations": [
                {"from": "human" if m["role"] == "user" else "gpt", "value": m["content"]}
                for m in TALK[1:]
            ],
        },
        {"conversations": TALK},
        {
            "instruction": "And 3+3?",
            "output": "6",
            "system": "Be brief.",
            "history": [["2+2?", "4"]],
        },
        {"messages": [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in TALK]},
        {
            "messages": [
                {**m, "content": [m["content"][:1], {"text": m["content"][1:]}]} for m in TALK
            ]
        },
    ],
    ids=[
        "sharegpt",
        "sharegpt's system",
        "conversations",
        "alpaca's history",
        "parts",
        "two parts",
    ],
)
def test_conversations_of_other_forms_are_messages(line, tmp_path):
    template = ChatTemplate(TEMPLATE, {})
    (read,) = data.documents(write(tmp_path / "x.jsonl", line), template=template)
    assert read.spans == template.spans(TALK)


@pytest.mark.parametrize(
    "message, refusal",
    [
        ({}, "line 1: message 2 of role assistant has no content; give it a text, or remove the"),
        ({"content": None, "name": "x"}, "line 1: message 2 of role assistant has no content"),
        (
            {"content": 3},
            "line 1: the content of message 2 of role assistant must be a .*; got int",
        ),
        ({"content": ["a", {"type": "image", "url": "b"}]}, "parts with a text; got image"),
        ({"content": [{"type": "text", "text": None}]}, "parts with a text; got text"),
    ],
)
@pytest.mark.parametrize("last", [[], TALK[3:]], ids=["last", "within"])
def test_a_message_without_a_text_is_refused_with_its_place(message, refusal, last, tmp_path):
    talk = [TALK[1], {"role": "assistant", **message}, *last]
    corpus = write(tmp_path / "x.jsonl", {"messages": talk})
    with pytest.raises(ValueError, match=refusal):
        list(data.documents(corpus, template=ChatTemplate(TEMPLATE, {})))


def test_a_tool_call_needs_no_content():
    call = {"function": {"name": "f", "arguments": {"x": 1}}}
    source = "{% for m in messages %}{{ m.content or '' }}{{ m.tool_calls or '' }};{% endfor %}"
    messages = [TALK[1], {"role": "assistant", "content": None, "tool_calls": [call]}]
    pieces = ChatTemplate(source, {}).spans(messages)
    assert [text for text, counts in pieces if counts] == [f"{[call]};"]


def test_instructions_are_held_out_whole(tmp_path):
    lines = [{"prompt": f"{n}?", "answer": "x" * n} for n in range(1, 30)]
    documents = data.documents(write(tmp_path / "x.jsonl", *lines))
    train, held_out = map(list, data.split(documents, held_out=0.2))
    assert sorted([*train, *held_out]) == sorted(documents) and len(held_out) > 1
