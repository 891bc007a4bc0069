import pytest

from jaxformer import data

WORDS = "def return class self value import for in None True if else name path".split()


def sentence(seed):
    """Some lines of words; equal seeds give equal lines."""
    lines = [
        " " * (4 * (i % 3)) + " ".join(WORDS[(seed * 7 + i * j) % len(WORDS)] for j in range(1, 6))
        for i in range(seed % 5 + 1)
    ]
    return "\n".join(lines) + "\n"


@pytest.fixture
def documents():
    """Twenty-three short texts, some with characters of several bytes."""
    return [data.Document(f"{i}.py", sentence(i) + "äé→🙂" * (i % 2)) for i in range(23)]


@pytest.fixture
def tokenizer():
    return data.ByteTokenizer()


@pytest.fixture
def pack(tmp_path, tokenizer):
    def run(documents, *, row_length=13, tokenizer=tokenizer):
        return data.pack(documents, tokenizer, row_length=row_length, folder=tmp_path / "cache")

    return run
