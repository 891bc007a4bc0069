"""The text of a run: read, split, tokenised and packed."""

from pathlib import Path
from typing import NamedTuple

from experiments.pretrain_runs import Pretrain
from jaxformer import data


class Packed(NamedTuple):
    """Rows to train on and to evaluate on, and what they were made from."""

    tokenizer: data.Tokenizer
    train: data.PackedRows
    held_out: data.PackedRows
    held_out_documents: tuple[data.Document, ...]


def read_corpus(run: Pretrain, cache: Path) -> Packed:
    """The corpus of a run in rows; packed rows are opened again where they exist.

    Args:
        run: Its corpus, tokenizer, share of held-out documents, and length of a row.
        cache: Folder for the rows.

    Returns:
        The rows.
    """
    print(f"Corpus: {run.corpus}", flush=True)
    parts = data.split(data.documents(run.corpus), held_out=run.held_out)
    tokenizer = data.build_tokenizer(run.tokenizer, [d.text for d in parts.train])
    train, held_out = (
        data.pack(documents, tokenizer, row_length=run.length, folder=cache) for documents in parts
    )
    return Packed(tokenizer, train, held_out, tuple(parts.held_out))
