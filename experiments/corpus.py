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

    Raises:
        ValueError: The text cannot be read, split or encoded, or a part fills no row.
    """
    print(f"Corpus: {run.corpus}", flush=True)
    parts = data.split(data.documents(run.corpus), held_out=run.held_out)
    tokenizer = data.build_tokenizer(run.tokenizer, [d.text for d in parts.train])
    train, held_out = (
        data.pack(documents, tokenizer, row_length=run.length, folder=cache) for documents in parts
    )
    for rows, name in ((train, "to train on"), (held_out, "held out")):
        if rows.num_targets < run.length:
            raise ValueError(
                f"held_out {run.held_out} of {train.num_bytes + held_out.num_bytes} bytes leaves "
                f"{rows.num_targets} tokens {name}, less than one row of length {run.length}; give "
                "more text, another share or a smaller length."
            )
    return Packed(tokenizer, train, held_out, tuple(parts.held_out))


def encode_prompt(run: Pretrain, tokenizer: data.Tokenizer) -> list[int]:
    """The prompt of the sample at the end, after an end of text.

    Raises:
        ValueError: The tokenizer does not know it, or it leaves no room in a row.
    """
    try:
        prompt = [tokenizer.end_of_text, *tokenizer.encode(run.prompt).tolist()]
    except ValueError as error:
        raise ValueError(f"prompt {run.prompt[:40]!a} cannot be encoded: {error}") from error
    longest = run.model.max_length or run.length
    if len(prompt) >= longest:
        raise ValueError(
            f"prompt has {len(prompt)} tokens, its end of text included, which leave no room in "
            f"the length of {longest}; shorten it."
        )
    return prompt
