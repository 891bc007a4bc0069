"""Pretrain a decoder on text.

    jaxformer pretrain                                  # minutes on a laptop's CPU
    jaxformer pretrain --steps 200 --model.num-layers 2 # any field is a flag
    jaxformer pretrain small --corpus my.txt            # your own text
    jaxformer pretrain --init Qwen/Qwen3-0.6B --corpus my.txt  # a pretrained model
    jaxformer pretrain --resume --steps 2000            # resume the newest run
    jaxformer pretrain --output X --resume-or-begin     # start or resume, in a loop

By default it trains on the source code of Python's standard library. It reports bits per byte on
held-out text, compares them with gzip, and ends with a sample. All files are written to --output.

At SIGINT (Ctrl-C), SIGTERM or SIGHUP a run finishes the steps on the device, saves and exits with
status 130, 143 or 129; --resume resumes it. The third such signal ends the run at once. Only one
run at a time can use a folder.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxformer import data
from jaxformer import functional as F
from jaxformer.checks import NotNegative, Size
from jaxformer.config import TransformerConfig
from jaxformer.data.tokenization import TokenizationProgress
from jaxformer.errors import naming_fields, with_fields
from jaxformer.generation import Sample, generate
from jaxformer.json_files import json_with_checksum, read_json_with_checksum
from jaxformer.parallel import is_primary_process, local_batch_slice, num_batch_shards, put_batch
from jaxformer.run.beginning import begin
from jaxformer.run.command_line import run_program
from jaxformer.run.loading import shared_stop_tokens
from jaxformer.run.models import muon_config, qwen3_like
from jaxformer.run.output_folder import own_chat_template, own_tokenizer
from jaxformer.run.plot import plot_run
from jaxformer.run.program import train
from jaxformer.run.recorder import Evaluation, Recorder, TrainData, TrainResult
from jaxformer.run.run_config import (
    LENGTH_MULTIPLE,
    UPDATES_PER_EPOCH,
    EpochsConfig,
    HeldOut,
    check_rows,
    check_uses,
    fitting_batch_size,
    fitting_length,
)
from jaxformer.run.train_setup import TrainSetup
from jaxformer.training import loop, train_step
from jaxformer.training.metrics import read_json_lines
from jaxformer.training.optimizers import OptimizerConfig
from jaxformer.training.progress import format_count, sanitize_text

MIN_GZIP_BYTES = 4096  # of held-out text; of less, gzip's 20 bytes of header are a large part
CORPUS_FILE = "corpus.json"  # digests of the files of the text
PARTS: Mapping[data.PartName, str] = {"train": "training data", "held_out": "held-out data"}


@dataclass(frozen=True, kw_only=True)
class Pretrain(EpochsConfig):
    """Options of a pretraining run: corpus, tokenizer, row length, epochs, sample.

    Attributes:
        corpus: Text to train and evaluate on.
        chat_template: Chat template of instructions, instead of that of the tokenizer's folder: a
            Jinja file, or "chatml". It is saved with the run.
        held_out: Fraction of the text of each source that is held out for evaluation.
        held_out_bytes: Maximum number of bytes that are held out of each source; None is no limit.
        length: Row length in tokens.
        cache: Folder for tokenized text.
        buffer_gb: Maximum number of gigabytes in `cache` of a corpus in a store, such as
            hf://datasets/NAME, which is tokenized while the model is trained.
        evaluate_rows: Held-out rows of an evaluation during training; the final one uses all rows.
        prompt: Prompt of the sample that is printed at the end; if it is empty, that of the first
            held-out instruction, or the beginning of a text.
        sample_tokens: Length of the sample in tokens; None is no sample.
    """

    model: TransformerConfig = qwen3_like(model_dim=192, num_layers=4, num_heads=4, vocab_size=4096)
    optimizer: OptimizerConfig = muon_config(warmup_steps=20)
    TOPIC: ClassVar = "data"
    FIRST_PAGE: ClassVar[tuple[str, ...]] = (
        *("corpus", "init", "steps", "batch_size", "length", "learning_rate", "dtype", "devices"),
        *("output", "resume"),
    )

    corpus: data.CorpusConfig = data.StandardLibrary()
    tokenizer: data.TokenizerConfig = data.BPE(vocab_size=4096)
    chat_template: str | None = None
    held_out: HeldOut = 0.05
    held_out_bytes: Size | None = 20_000_000
    length: Size = 256
    batch_size: Size = 8
    steps: Size = 600
    cache: Path = Path("runs/cache")
    buffer_gb: NotNegative = 20.0
    evaluate_every: Size = 100
    evaluate_rows: Size = 64
    prompt: str = "def "
    sample_tokens: Size | None = 160

    def __post_init__(self):
        super().__post_init__()
        check_uses(self, needs={"prompt": "sample_tokens"})
        check_rows(self, "Pretraining")
        has_tokenizer = self.init or isinstance(self.tokenizer, data.PretrainedTokenizer)
        if self.chat_template is not None and not (has_instructions(self.corpus) and has_tokenizer):
            raise ValueError(
                with_fields(
                    "--chat-template needs a corpus of Instructions and a pretrained tokenizer: "
                    "pass --init FOLDER or --tokenizer FOLDER."
                )
            )

    @property
    def context(self) -> int:
        """Maximum number of tokens of a sample with its prompt."""
        return self.model.max_length or self.length


RUNS = {
    "default": Pretrain(),
    "tiny": Pretrain(
        model=qwen3_like(model_dim=64, num_layers=2, num_heads=4, vocab_size=512),
        tokenizer=data.BPE(vocab_size=512),
        length=64,
        steps=20,
        evaluate_every=10,
        save_every=10,
        optimizer=muon_config(warmup_steps=2),
    ),
    "small": Pretrain(
        model=qwen3_like(model_dim=768, num_layers=12, num_heads=12, vocab_size=32768),
        tokenizer=data.BPE(vocab_size=32768),
        length=1024,
        batch_size=64,
        steps=10_000,
        evaluate_every=500,
        evaluate_rows=256,
        save_every=1000,
        dtype="bfloat16",
        scan=True,
        optimizer=muon_config(warmup_steps=200),
    ),
}


class PackedCorpus(NamedTuple):
    """Packed training and held-out rows, with their tokenizer and the held-out documents."""

    tokenizer: data.Tokenizer
    template: data.ChatTemplate | None  # of the instructions, if there are any
    train: data.AnyRows
    held_out: data.AnyRows
    corpora: tuple[data.Corpus, ...]
    cache: Path  # folder of the packed rows

    @property
    def held_out_documents(self) -> data.Documents:
        """The held-out documents of all corpora."""
        parts = [corpus.documents("held_out") for corpus in self.corpora]
        return data.Documents(lambda: chain.from_iterable(parts))


@naming_fields()
def pretrain(run: Pretrain) -> Path:
    """Pretrain a decoder on text, evaluate it, and print a sample.

        from jaxformer import data, run
        folder = run.pretrain(run.Pretrain(corpus=data.TextFiles(path="my.txt"), steps=200))
        model = run.load_run(folder)

    Fields that have their defaults follow from the others, as on the command line: the model and
    tokenizer of `init`, the saved settings of `output` where the run resumes.

    Args:
        run: Options of the run.

    Returns:
        The output folder, with checkpoints, metrics and the tokenizer.

    Raises:
        ValueError: The options do not fit each other, the text or this machine; or `output` has an
            earlier run, or none to resume.
    """
    return train_on_text(begin(run, RUNS))


def train_on_text(run: Pretrain, runs: Mapping[str, Pretrain] = RUNS) -> Path:
    """The course of a run on text: pretrain, evaluate and sample; returns the output folder."""
    return train(run, runs, LanguageModelingData, length=run.largest().length)


def main(arguments: list[str] | None = None) -> None:
    """Pretrain by the command line."""
    run_program(train_on_text, RUNS, __doc__, arguments)


def prepare_corpus(run: Pretrain, resumes_from: Path | None = None) -> PackedCorpus:
    """Read, split, tokenize and pack the corpus, or open the packed rows of an earlier run.

    Args:
        run: The run.
        resumes_from: Output folder of a resumed run, whose tokenizer is used, and whose text must
            be the same.

    Raises:
        ValueError: The text cannot be read, split or encoded, or has changed, or a part has less
            than one row.
    """
    print(f"Corpus: {run.corpus}", flush=True)
    parts = run.corpus.parts if isinstance(run.corpus, data.Mixture) else (run.corpus,)
    template = own_chat_template(run, resumes_from) if has_instructions(run.corpus) else None
    config = own_tokenizer(run, resumes_from)
    recorded = resumes_from and read_json_with_checksum(resumes_from / CORPUS_FILE)
    records = recorded if recorded and len(recorded) == len(parts) else [None] * len(parts)
    corpora = tuple(
        open_corpus(run, part, config, template, x) for part, x in zip(parts, records, strict=True)
    )
    if template is None and has_instructions(run.corpus):
        print(
            "  without a chat template, prompt and answer are joined as they are; for --chat, "
            "pass --chat-template"
        )
    tokenizer = saved_tokenizer(resumes_from)
    if tokenizer is None:
        tokenizer = data.cached_tokenizer(
            config,
            corpora,
            run.cache,
            on_train=lambda size: print(
                f"  training the tokenizer on {format_count(size)} bytes", flush=True
            ),
        )
    largest, length = run.largest(), run.length
    packed = [pack_corpus(largest, corpus, tokenizer) for corpus in corpora]
    if length is None:
        length = fitted_row_length(largest, packed)
        largest = replace(largest, length=length)
        packed = [pack_corpus(largest, corpus, tokenizer) for corpus in corpora]
    for corpus, rows in zip(corpora, packed, strict=True):
        describe_corpus(largest, corpus, *rows)
    weights = run.corpus.weights if isinstance(run.corpus, data.Mixture) else None
    train, held_out = (data.mix_rows(rows, weights) for rows in zip(*packed, strict=True))
    return PackedCorpus(tokenizer, template, train, held_out, corpora, run.cache)


def open_corpus(
    run: Pretrain,
    source: data.Source,
    tokenizer: data.TokenizerConfig,
    template: data.ChatTemplate | None,
    recorded: Mapping[str, Any] | None,
) -> data.Corpus:
    """Open a source of the corpus; no text is read that has been read before."""
    is_trained = isinstance(tokenizer, data.BPE | data.Characters)
    has_own = isinstance(source, data.Packed) and not is_trained
    corpus = data.Corpus(
        source,
        folder=run.cache,
        tokenizer=data.build_tokenizer(tokenizer, ()) if has_own else None,
        template=template,
        held_out=run.held_out,
        max_bytes=run.held_out_bytes,
        seed=run.seed,
        recorded=recorded,
        buffer_bytes=round(run.buffer_gb * 1e9),
    )
    if corpus.is_streamed:
        print(
            f"  {len(corpus.record['files'])} files of {format_count(corpus.num_bytes)} bytes are "
            f"read in {len(corpus.shards)} shards while the model is trained; held-out text is of "
            f"the shard of {corpus.first}",
            flush=True,
        )
    return corpus


def saved_tokenizer(folder: Path | None) -> data.Tokenizer | None:
    """Tokenizer of a resumed run; None if there is none, or its file is damaged."""
    try:
        return None if folder is None else data.load_tokenizer(folder)
    except (ValueError, OSError):
        return None


def pack_corpus(
    run: Pretrain, corpus: data.Corpus, tokenizer: data.Tokenizer
) -> tuple[data.AnyRows, data.AnyRows]:
    """Tokenize and pack the training part and the held-out part of one corpus."""
    packed = []
    for part, name in PARTS.items():
        try:
            progress = TokenizationProgress()
            rows = corpus.pack(part, tokenizer, row_length=run.length, on_progress=progress)
            packed.append(rows)
        except ValueError as error:
            raise ValueError(f"{corpus.source}, {name}: {error}") from error
    train, held_out = packed
    return train, held_out


def fitted_row_length(run: Pretrain, packed: list[tuple[data.AnyRows, data.AnyRows]]) -> int:
    """Row length for the packed rows of a corpus: shorter if these are few.

    An instruction is never split, so rows have room for the longest; text makes enough rows.
    """
    parts = [rows for pair in packed for rows in pair if isinstance(rows, data.PackedRows)]
    num_rows = sum(len(train) for train, _ in packed)
    if len(parts) < 2 * len(packed) or num_rows >= UPDATES_PER_EPOCH * run.batch_size:
        return run.length
    if not has_instructions(run.corpus):
        fits = min(min(a.num_targets // UPDATES_PER_EPOCH, b.num_targets) for a, b in packed)
        return min(run.length, max(1, fits // LENGTH_MULTIPLE) * LENGTH_MULTIPLE)
    rows = [(part, part[np.arange(len(part))]) for part in parts]
    # The last input of an instruction may be an end of text, as are those that fill rows.
    longest = [x.positions[x.tokens[:, :-1] != part.end_of_text].max(initial=0) for part, x in rows]
    return fitting_length(2 + int(max(longest)), run.length)


def describe_corpus(
    run: Pretrain, corpus: data.Corpus, train: data.AnyRows, held_out: data.AnyRows
) -> None:
    """Print the sizes of the parts of a corpus.

    Raises:
        ValueError: A part has less than one row.
    """
    if corpus.source is not run.corpus:
        print(f"  {corpus.source}", flush=True)
    answers_only = isinstance(corpus.source, data.Instructions)
    for rows, name in zip((train, held_out), PARTS.values(), strict=True):
        if rows.epoch is None:  # a stream
            continue
        if rows.num_targets < run.length and not answers_only:
            raise ValueError(
                f"held_out={run.held_out} of {train.num_bytes + held_out.num_bytes} bytes leaves "
                f"{rows.num_targets} tokens of {name}, less than one row of {run.length} tokens; "
                "use more text, another --held-out or --held-out-bytes, or a smaller --length."
            )
        counted = " of answers" if answers_only else ""
        print(
            f"  {name}: {rows.num_documents} documents, {format_count(rows.num_bytes)} bytes and "
            f"{format_count(rows.num_targets)} tokens{counted}",
            flush=True,
        )
    limit = run.held_out_bytes
    if limit is not None and run.held_out * (train.num_bytes + held_out.num_bytes) > limit:
        print(
            f"  held out are at most {format_count(limit)} bytes, not {run.held_out:.2%} "
            "(--held-out-bytes None for all)"
        )


class LanguageModelingData(TrainData):
    """Packed rows to train on, and bits per byte of the held-out text.

    Attributes:
        gzip: Bits per byte of the held-out text compressed by gzip; None if it is short.
    """

    def __init__(self, run: Pretrain, setup: TrainSetup):
        """Prepare the corpus and batches, and measure gzip."""
        self._corpus = corpus = prepare_corpus(run, setup.resumes_from)
        run = self._fit(run, setup.mesh)
        tokens, rows = corpus.tokenizer.vocab_size, run.model.vocab_size
        if rows > tokens:
            print(f"Vocabulary: {tokens:,} tokens, {rows:,} rows of the embedding.")
        if run.sample_tokens is not None:
            encode_prompt(run, corpus)
        self._run, self._setup, self._mesh = run, setup, setup.mesh
        self.tokenizer, self.sequence_length = corpus.tokenizer, run.length
        self.rows_per_epoch = corpus.train.epoch
        self.gzip: float | None = None
        if corpus.held_out.num_bytes >= MIN_GZIP_BYTES:
            parts = corpus.corpora, corpus.tokenizer, corpus.cache
            self.gzip = data.cached_gzip_bits_per_byte(*parts)
        self._batches = make_batches(corpus.train, setup.mesh, run.batch_size, seed=run.seed)
        self.get_batch = lambda step: put_batch(self._batches[step], setup.mesh, run.batch_size)
        self._eval_step = train_step.make_eval_step(setup.model, setup.mesh)

    def _fit(self, run: Pretrain, mesh: Mesh) -> Pretrain:
        """The run with the row length and the batch size of the corpus, where it has none."""
        rows, length, batch_size = self._corpus.train, run.length, run.batch_size
        if length is None:
            length = rows.row_length
        if batch_size is None:
            unit = num_batch_shards(mesh.shape) * run.gradient_accumulation_steps
            batch_size = run.largest().batch_size
            if rows.epoch is not None:
                batch_size = fitting_batch_size(run, rows.epoch, unit)
        self.fitted = {"length": length, "batch_size": batch_size}
        return replace(run, **self.fitted)

    def fingerprint(self) -> dict[str, Any]:
        """Digests of the rows."""
        train, held_out = self._corpus.train, self._corpus.held_out
        return {"data": {"train": train.digest, "held_out": held_out.digest}}

    def files(self) -> dict[str, str]:
        """Records of the corpora, with which a resumed run compares them; the chat template."""
        records = json_with_checksum([corpus.record for corpus in self._corpus.corpora])
        return {CORPUS_FILE: records, **template_file(self._run, self._corpus.template)}

    def is_ready(self, step: int) -> bool:
        """Whether the batch need not wait for a file of a store."""
        return self._batches.is_ready(step)

    def evaluate(self, step: int, params: Any, recorder: Recorder, *, final: bool) -> Evaluation:
        """Bits per byte of an even sample of the held-out rows; `final` ones of all."""
        rows, train = self._corpus.held_out, self._corpus.train
        run = self._run
        count = len(rows) if final else min(run.evaluate_rows, len(rows))
        index = np.linspace(0, len(rows) - 1, count).astype(int)
        model = self._eval_step, params
        nats, tokens = evaluate_rows(*model, rows, self._mesh, run.batch_size, index=index)
        bits = float(F.bits_per_byte(nats * rows.num_targets / tokens, rows.num_bytes))
        recorder.progress.update(step, bits_per_byte=bits)
        if not final:
            return Evaluation({"held_out_bits_per_byte": bits}, loss=bits)
        metrics = {"final_held_out_bits_per_byte": bits}
        if self.gzip is not None:
            metrics["gzip_bits_per_byte"] = self.gzip
        metrics["tokens_per_byte"] = train.num_targets / train.num_bytes
        return Evaluation(metrics, loss=bits)

    def report(self, result: TrainResult | None) -> None:
        """Print the held-out loss and a sample, and plot the run."""
        folder = self._setup.local_folder
        if result is not None:
            bits = result[1]["final_held_out_bits_per_byte"]
            yardstick = "" if self.gzip is None else f" (gzip -9: {self.gzip:.3f})"
            print(f"\nHeld-out loss: {bits:.3f} bits per byte{yardstick}.")
            print_sample(self._run, self._corpus, result[0], self._setup)
        if is_primary_process():
            lines = read_json_lines(folder / "metrics.jsonl")
            plot_run(folder / "run.png", lines, gzip=self.gzip)


def make_batches(rows: data.AnyRows, mesh: Mesh, batch_size: int, *, seed: int) -> data.Batches:
    """The batches of this process."""
    local_rows = local_batch_slice(mesh, batch_size)
    return data.Batches(rows, batch_size=batch_size, seed=seed, local_rows=local_rows)


def evaluate_rows(
    eval_step: Any, params: Any, rows: data.AnyRows, mesh: Mesh, batch_size: int, **options: Any
) -> tuple[float, int]:
    """Summed negative log-likelihood (nats) and token count; options of `evaluation_batches`."""
    options |= {"batch_size": batch_size, "local_rows": local_batch_slice(mesh, batch_size)}
    batches = data.evaluation_batches(rows, **options)
    sharded = (put_batch(batch, mesh, batch_size) for batch in batches)
    return loop.evaluate(eval_step, params, sharded)


def has_instructions(corpus: data.CorpusConfig) -> bool:
    """Whether any source of the corpus has instructions."""
    parts = corpus.parts if isinstance(corpus, data.Mixture) else (corpus,)
    return any(isinstance(part, data.Instructions) for part in parts)


def template_file(run: Any, template: data.ChatTemplate | None) -> dict[str, str]:
    """Name and content of the file of --chat-template, if it is set."""
    if run.chat_template is None or template is None:
        return {}
    return {"chat_template.jinja": template.source}


def encode_prompt(run: Pretrain, text: PackedCorpus) -> list[int]:
    """Encode the prompt of the sample: after the bos token, or as the user message of a chat.

    Without a prompt it is that of the first held-out instruction, if there are any.

    Raises:
        ValueError: It cannot be encoded, or it fills the context.
    """
    template, tokenizer, rows = text.template, text.tokenizer, text.held_out
    if not (run.prompt or isinstance(rows, data.StreamedRows)) and has_instructions(run.corpus):
        num_asked = 1 + int(rows.loss_mask_at([0])[0].argmax())
        return rows[[0]].tokens[0, :num_asked][1 - run.context :].tolist()
    try:
        if template is not None:
            chat_text = [{"role": "user", "content": run.prompt}]
            prompt = data.encode_chat(chat_text, template, tokenizer)
        else:
            prompt = [data.bos_token_id(tokenizer), *tokenizer.encode(run.prompt).tolist()]
    except ValueError as error:
        raise ValueError(f"prompt {run.prompt[:40]!a} cannot be encoded: {error}") from error
    longest = run.context
    if len(prompt) >= longest:
        raise ValueError(
            f"prompt has {len(prompt)} tokens, special tokens included, which leaves no space for "
            f"new tokens in a context of {longest}; shorten it."
        )
    return prompt


def print_sample(run: Pretrain, corpus: PackedCorpus, params: Any, setup: TrainSetup) -> None:
    """Print the model's continuation of the sample prompt, if --sample-tokens is set."""
    if run.sample_tokens is None:
        return
    tokenizer, prompt = corpus.tokenizer, encode_prompt(run, corpus)
    answers, folder = has_instructions(run.corpus), setup.local_folder
    tokens = generate(
        run.model,
        params,
        np.asarray(prompt, np.int32),
        max_new_tokens=min(run.sample_tokens, run.context - len(prompt)),
        vocab_size=tokenizer.vocab_size,
        sampler=Sample(temperature=0.8, top_p=0.95),
        stop_tokens=shared_stop_tokens(folder, tokenizer) if answers else (),
        key=jax.random.key(run.seed),
        dtype=run.dtype,
        mesh=setup.mesh,
    )
    print(f"\nSample:\n{sanitize_text(tokenizer.decode(np.asarray(tokens)), sys.stdout)}")
