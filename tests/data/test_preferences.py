"""Pairs of answers: their rows and batches, the split by prompt, and records that are refused."""

import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from jaxformer import data
from jaxformer.data import ChatTemplate, PreferenceBatches, read_preferences
from jaxformer.data.preference_records import EMPTY, EQUAL, read_pair
from tests.data.test_instructions import BYTES, TEMPLATE, spelt

CHATML = ChatTemplate(TEMPLATE, {})
LINES = [
    {"prompt": "ab", "chosen": "c", "rejected": "de"},
    {"prompt": "f", "chosen": "gh", "rejected": "g"},
    {"prompt": "ab", "chosen": "i", "rejected": "j"},
]


def write(folder, *lines):
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def read(folder, *lines, length=7, template=None):
    path = write(folder, *lines)
    return read_preferences(
        path, BYTES, template=template, row_length=length, folder=folder / "cache"
    )


def counted(rows):
    return [spelt(t[m]) for t, m in zip(rows.targets, rows.loss_mask, strict=True)]


def test_each_answer_is_a_row_with_its_prompt(tmp_path):
    pairs = read(tmp_path, *LINES)
    rows = pairs.rows(np.arange(4))
    assert [spelt(x) for x in rows.tokens] == ["EabcEEE", "EabdeEE", "EfghEEE", "EfgEEEE"]
    assert [spelt(x) for x in rows.targets] == ["abcEEEE", "abdeEEE", "fghEEEE", "fgEEEEE"]
    assert counted(rows) == ["cE", "deE", "ghE", "gE"]
    assert rows.segments.sum(-1).tolist() == [4, 5, 4, 3]
    assert rows.positions.tolist()[1] == [0, 1, 2, 3, 4, 0, 0]
    assert pairs.num_truncated == 0


def test_a_batch_has_both_answers_of_a_pair_in_one_place(tmp_path):
    pairs = read(tmp_path, *LINES)
    reference = np.where(pairs.loss_mask, np.arange(len(pairs.tokens)), 0).astype(np.float32)
    batch = pairs.batch(np.array([2, 0]), reference)
    assert counted(batch.chosen) == ["iE", "cE"] and counted(batch.rejected) == ["jE", "deE"]
    # "EabcEEabdeEEfghEEfgE" and then "EabiEEabjE": the places of "i" and "j" with their ends.
    assert [x[x > 0].tolist() for x in batch.chosen_reference] == [[23, 24], [3, 4]]
    assert [x[x > 0].tolist() for x in batch.rejected_reference] == [[28, 29], [8, 9, 10]]
    for rows, values in zip(batch[:2], batch[2:], strict=True):
        assert ((values > 0) == rows.loss_mask).all()


def test_batches_have_every_pair_once_in_an_epoch(tmp_path):
    lines = [{"prompt": chr(97 + n), "chosen": "x", "rejected": "y"} for n in range(5)]
    pairs = read(tmp_path, *lines)
    reference = np.zeros(len(pairs.tokens), np.float32)
    numbers = np.array([0, 1, 3, 4])
    batches = PreferenceBatches(pairs, reference, numbers, num_pairs=3, seed=1)
    drawn = "".join(chr(row[1]) for step in range(8) for row in batches[step].chosen.tokens)
    epochs = [drawn[i : i + 4] for i in range(0, 24, 4)]
    assert all(sorted(epoch) == list("abde") for epoch in epochs) and len(set(epochs)) > 1
    other = PreferenceBatches(pairs, reference, numbers, num_pairs=3, seed=2)
    assert any((other[n].chosen.tokens != batches[n].chosen.tokens).any() for n in range(4))
    with pytest.raises(ValueError, match="step must be at least 0; got -1"):
        batches[-1]
    with pytest.raises(ValueError, match="at least one pair; got 0 of 4 pairs"):
        PreferenceBatches(pairs, reference, numbers, num_pairs=0, seed=0)


def test_messages_and_texts_are_the_same_conversation(tmp_path):
    texts = {"prompt": "2+2?", "chosen": "4", "rejected": "5"}
    user = [{"role": "user", "content": "2+2?"}]
    answers = {
        name: [{"role": "assistant", "content": texts[name]}] for name in ("chosen", "rejected")
    }
    pairs = read(tmp_path, texts, {"prompt": user, **answers}, length=80, template=CHATML)
    rows = pairs.rows(np.arange(4))
    np.testing.assert_array_equal(rows.tokens[:2], rows.tokens[2:])
    assert counted(rows) == ["4<|im_end|>\n", "5<|im_end|>\n"] * 2


def test_prompts_are_held_out_with_all_of_their_pairs(tmp_path):
    lines = [
        {"prompt": f"{n // 2}", "chosen": f"a{n}", "rejected": "b"} for n in (*range(40), 0, 1)
    ]
    pairs = read(tmp_path, *lines)
    train, held_out = pairs.split(0.25)
    assert sorted([*train, *held_out]) == list(range(42)) and 10 <= len(held_out) <= 13
    prompts = [{lines[i]["prompt"] for i in part} for part in (train, held_out)]
    assert not prompts[0] & prompts[1]
    assert set(held_out) < set(pairs.split(0.5)[1])
    for fraction in (0, 1, -0.5):
        with pytest.raises(ValueError, match=f"fraction between 0 and 1; got {fraction}"):
            pairs.split(fraction)
    with pytest.raises(ValueError, match="held_out=0.5 of 2 pairs with 1 prompts leaves no pair"):
        read(tmp_path, LINES[0], LINES[2]).split(0.5)


def test_pairs_are_tokenized_once(tmp_path, monkeypatch):
    first = read(tmp_path, *LINES)
    (cached,) = (tmp_path / "cache").iterdir()
    with monkeypatch.context() as patch:
        patch.setattr("jaxformer.data.preferences._tokenize", None)
        again = read(tmp_path, *LINES)
    assert again.digest == first.digest and again.row_length == 7
    cached.write_bytes(cached.read_bytes()[:-40])
    assert read(tmp_path, *LINES).digest == first.digest
    changed = [{**LINES[0], "chosen": "k"}, *LINES[1:]]
    assert read(tmp_path, *changed).digest != first.digest
    assert read(tmp_path, *LINES, length=6).digest != first.digest


def test_rows_that_are_too_long_are_truncated(tmp_path):
    lines = [LINES[0], {"prompt": "ab", "chosen": "cdefghi", "rejected": "cd"}]
    pairs = read(tmp_path, *lines, length=6)
    assert counted(pairs.rows(np.array([2, 3]))) == ["cdef", "cdE"]
    assert pairs.num_truncated == 1


@pytest.mark.parametrize(
    "line, message",
    [
        ({"prompt": "a", "chosen": "b"}, "rejected must be text or .*; the record has prompt, cho"),
        ({"prompt": 3, "chosen": "b", "rejected": "c"}, "prompt must be text or a list of messag"),
        (
            {"prompt": "a", "chosen": [{"role": "assistant", "content": "b"}], "rejected": "c"},
            "messages needs a tokenizer with a chat template: pass --tokenizer FOLDER",
        ),
        (
            {"prompt": "a", "chosen": ["b"], "rejected": "c"},
            "chosen must be text or a list of messages, which are objects with role and content; "
            "the record has prompt, chosen, rejected",
        ),
    ],
)
def test_records_that_are_refused(line, message, tmp_path):
    with pytest.raises(ValueError, match=f"pairs.jsonl line 2: {message}"):
        read(tmp_path, LINES[0], line)


def test_a_file_without_pairs(tmp_path):
    with pytest.raises(ValueError, match="pairs.jsonl has no pairs"):
        read(tmp_path)
    assert data.Preferences is type(read(tmp_path, *LINES))


def test_an_answer_that_is_only_the_first_token_has_no_loss(tmp_path):
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {})
    line = {"prompt": [], "chosen": "b", "rejected": "c"}
    message = "no pair that a row of 7 tokens can use: 1 because a row has nothing of the answers"
    with pytest.raises(ValueError, match=message):
        read(tmp_path, line, template=template)


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


SYSTEM = {"role": "system", "content": "s"}


@pytest.mark.parametrize(
    "line",
    [
        {"prompt": "2+2?", "chosen": [assistant("4")], "rejected": [assistant("5")]},
        {"prompt": [user("2+2?")], "chosen": "4", "rejected": "5"},
        {"chosen": [user("2+2?"), assistant("4")], "rejected": [user("2+2?"), assistant("5")]},
        {
            "prompt": None,
            "chosen": [user("2+2?"), {**assistant("4"), "name": None}],
            "rejected": [user("2+2?"), assistant("5")],
        },
        {
            "prompt": "2+2?",
            "chosen": [user("2+2?"), assistant("4")],
            "rejected": [user("2+2?"), assistant("5")],
            "messages": [user("2+2?"), assistant("4")],
            "score_chosen": 9.5,
        },
        {
            "prompt": [user("2+2?")],
            "chosen": [user("2+2?"), assistant("4")],
            "rejected": [user("2+2?"), assistant("5")],
        },
        {"prompt": "2+2?", "chosen": "4", "rejected": "5", "messages": [user("?")], "margin": 1},
    ],
)
def test_forms_of_a_conversation(line, tmp_path):
    first = {"prompt": "2+2?", "chosen": "4", "rejected": "5"}
    pairs = read(tmp_path, first, line, length=80, template=CHATML)
    rows = pairs.rows(np.arange(4))
    np.testing.assert_array_equal(rows.tokens[:2], rows.tokens[2:])
    np.testing.assert_array_equal(rows.loss_mask[:2], rows.loss_mask[2:])
    assert pairs.prompt_keys[0] == pairs.prompt_keys[1] and not pairs.left_out.any()


def test_turns_that_both_answers_share_are_the_prompt(tmp_path):
    shared = [SYSTEM, user("a"), assistant("b"), user("c")]
    implicit = {"chosen": [*shared, assistant("d")], "rejected": [*shared, assistant("e")]}
    explicit = {"prompt": shared, "chosen": [assistant("d")], "rejected": [assistant("e")]}
    continued = {
        "prompt": shared[:3],
        "chosen": [user("c"), assistant("d")],
        "rejected": [user("c"), assistant("e")],
    }
    with_system = {**implicit, "prompt": shared[1:]}
    pairs = read(tmp_path, explicit, implicit, with_system, continued, length=200, template=CHATML)
    rows = pairs.rows(np.arange(8)).tokens.reshape(4, 2, -1)
    for others in rows[1:]:
        np.testing.assert_array_equal(others, rows[0])
    assert len(set(pairs.prompt_keys[:3])) == 1


def test_texts_that_begin_with_their_prompt(tmp_path):
    """The prompts are those of TRL's `extract_prompt`."""
    lines = [
        {"chosen": "The sky is blue.", "rejected": "The sky is green."},
        {"chosen": "Q: a A: b", "rejected": "Q: a A: bc"},  # the last character is an answer
        {"chosen": "Q: a A: bc", "rejected": "Q: a A: bd"},
        {"chosen": "Q: a A: b", "rejected": "Q: a A: "},
    ]
    pairs = read(tmp_path, *lines, length=30, template=CHATML)
    rows = pairs.rows(np.arange(8))
    assert counted(rows)[:4] == [" blue.E", " green.E", "bE", "bcE"]
    assert counted(rows)[4:] == ["cE", "dE", " bE", " E"]
    assert spelt(rows.tokens[0])[:17] == "EThe sky is blue."


def test_pairs_that_cannot_be_used_are_left_out_and_counted(tmp_path):
    lines = [
        {"prompt": "a", "chosen": " ", "rejected": "c"},
        {"prompt": "a", "chosen": None, "rejected": "c"},
        {"prompt": "a", "chosen": "b", "rejected": []},
        {"prompt": "a", "chosen": [assistant("")], "rejected": "c"},
        {"chosen": [user("a")], "rejected": [user("a"), assistant("b")]},
        {"chosen": [user("a"), assistant("")], "rejected": [user("a"), assistant("b")]},
        {"prompt": "a", "chosen": "b", "rejected": "b"},
        {"prompt": "a" * 80, "chosen": "h", "rejected": "i"},
        {"prompt": "a", "chosen": "b" * 80 + "c", "rejected": "b" * 80 + "d"},
        {"chosen": "b", "rejected": "c"},
        {"prompt": "a", "chosen": [user("a"), assistant("b")], "rejected": "c"},
        {"chosen": [user("a"), assistant("b")], "rejected": [user("d"), assistant("b")]},
    ]
    pairs = read(tmp_path, LINES[0], *lines, LINES[1], length=80, template=CHATML)
    assert len(pairs) == 2 and pairs.left_out.tolist() == [6, 1, 2, 3] and not pairs.num_truncated
    expected = read(tmp_path, *LINES[:2], length=80, template=CHATML)
    assert pairs.digest == expected.digest and expected.left_out_text == ""
    again = read(tmp_path, LINES[0], *lines, LINES[1], length=80, template=CHATML)
    assert again.left_out_text == (
        "6 because an answer is empty, 1 because both answers are equal, 2 because a row has "
        "nothing of the answers that differs, 3 because there is no prompt, and the answers begin "
        "differently"
    )


def test_null_answers_of_a_table_are_left_out(tmp_path):
    path = tmp_path / "pairs.parquet"
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([*LINES, {**LINES[0], "rejected": None}]), path
    )
    pairs = read_preferences(path, BYTES, template=None, row_length=7, folder=tmp_path / "cache")
    assert pairs.left_out.tolist() == [1, 0, 0, 0] and pairs.digest == read(tmp_path, *LINES).digest


def test_content_in_parts_is_its_text():
    """An empty part is no answer, equal texts are equal, and the prompt has one key."""
    text = lambda role, words: {"role": role, "content": words}  # noqa: E731
    parts = lambda role, words: text(role, [{"type": "text", "text": words}])  # noqa: E731

    def pair(form, chosen, rejected):
        record = {"prompt": [form("user", "q")]}
        record |= {"chosen": [chosen], "rejected": [rejected]}
        return read_pair(record, where="here")

    answer = text("assistant", "x")
    assert pair(text, answer, parts("assistant", "")) == EMPTY
    assert pair(text, answer, text("assistant", [])) == EMPTY
    assert pair(text, answer, parts("assistant", "x")) == EQUAL
    other = text("assistant", "y")
    assert pair(parts, answer, other).prompt_key == pair(text, answer, other).prompt_key
    with pytest.raises(ValueError, match="content of here must be a text.* got image"):
        pair(text, answer, text("assistant", [{"type": "image"}]))
