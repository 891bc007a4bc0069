import gzip
import io
import json
import os
import shutil
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers as hf

from jaxformer import Transformer, generation, save_pretrained, zoo
from jaxformer.config import (
    GLU,
    MLP,
    DynamicNTK,
    Embedding,
    EncoderDecoder,
    Learned,
    LinearScaling,
    Llama3Scaling,
    LongRope,
    MultiHead,
    NTKScaling,
    TransformerConfig,
    Yarn,
)
from jaxformer.costs import num_parameters
from jaxformer.data import ByteLevel, CharacterTokenizer, TextFiles, export_tokenizer, train_bpe
from jaxformer.generation import Beam, Greedy, Sample, unroll
from jaxformer.layers.layouts import layout_of
from jaxformer.parallel import MeshConfig, make_mesh
from jaxformer.run import pretraining, text_generation
from jaxformer.run.command_line import parse_run
from jaxformer.run.loading import load_run
from jaxformer.training.checkpoints import Checkpoints
from jaxformer.training.optimizers import OptimizerConfig
from jaxformer.training.progress import sanitize_text
from jaxformer.training.schedules import Constant
from tests.data.test_tokenizers import spaced_tokenizer
from tests.interop.numpy_folders import LLAMA, llama_shapes, random_tensors, write_folder
from tests.small_models import random_params

MODEL = TransformerConfig(
    vocab_size=257,
    model_dim=16,
    num_layers=2,
    attention=MultiHead(num_heads=2, num_kv_heads=1, head_dim=6),
    feed_forward=(MLP(hidden_dim=11),),
    embedding=Embedding(positions=Learned(max_length=16)),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Output of a pretraining run of two steps, both saved."""
    path = tmp_path_factory.mktemp("run")
    (path / "corpus.txt").write_text("the lazy dogs\n" * 40)
    run = pretraining.Pretrain(
        model=MODEL,
        corpus=TextFiles(path=str(path / "corpus.txt")),
        tokenizer=ByteLevel(),
        held_out=0.2,
        length=16,
        batch_size=2,
        steps=2,
        save_every=1,
        optimizer=OptimizerConfig(schedule=Constant(peak=1.0)),
        scan=True,
        devices=1,
        output=path / "out",
        cache=path / "cache",
        tensorboard=False,
        sample_tokens=None,  # so none is compiled
    )
    return pretraining.pretrain(run)


def text(folder, **fields):
    fields = {"prompt": "the la", "max_new_tokens": 9, "sampler": Greedy(), **fields}
    return text_generation.generate(text_generation.Generate(checkpoint=folder, **fields))


def test_the_text_begins_with_the_prompt_and_is_printed(folder, capsys):
    output = text(folder)
    assert output.startswith("the la")
    assert capsys.readouterr().out == f"{output}\n"


@pytest.mark.slow
def test_greedy_text_is_the_same_every_time(folder):
    assert text(folder) == text(folder, seed=5)


@pytest.mark.slow
def test_a_draft_model_changes_no_text_and_says_how_often_it_was_right(folder, tmp_path, capsys):
    expected = text(folder)
    capsys.readouterr()
    assert text(folder, draft=folder, draft_tokens=3) == expected
    printed = capsys.readouterr()
    assert printed.out == f"{expected}\n"
    assert "6 of 6 drafted tokens were right, in 2 passes" in printed.err
    (tmp_path / "asked.txt").write_text("the la\nthe\n")
    files = [tmp_path / "alone.jsonl", tmp_path / "drafted.jsonl"]
    for file, options in zip(files, [{}, {"draft": folder}], strict=True):
        continued(folder, tmp_path / "asked.txt", file, **options)
    assert files[0].read_text() == files[1].read_text()
    assert "drafted tokens were right" in capsys.readouterr().err
    with pytest.raises(ValueError, match="--draft and --chat cannot be combined"):
        text_generation.Generate(checkpoint=folder, chat=True, draft=folder)


SCALINGS = {
    "LinearScaling(factor=4)": LinearScaling(factor=4.0),
    "NTKScaling(factor=4)": NTKScaling(factor=4.0),
    "DynamicNTK(factor=2, original_max_length=16)": DynamicNTK(factor=2.0, original_max_length=16),
    "Llama3Scaling(factor=8, original_max_length=16)": Llama3Scaling(
        factor=8.0, original_max_length=16
    ),
    "Yarn(factor=4, original_max_length=16)": Yarn(factor=4.0, original_max_length=16),
    "LongRope(short_factors=(1, 1, 1), long_factors=(1, 2, 4), "
    "original_max_length=16, max_length=64)": LongRope(
        short_factors=(1.0, 1.0, 1.0),
        long_factors=(1.0, 2.0, 4.0),
        original_max_length=16,
        max_length=64,
    ),
}


@pytest.mark.parametrize(
    "flag",
    [
        pytest.param(
            flag, marks=() if flag.startswith(("Yarn", "LongRope")) else pytest.mark.exhaustive
        )
        for flag in SCALINGS
    ],
)
@pytest.mark.slow
def test_rotary_positions_are_stretched_by_a_flag(folder, monkeypatch, flag):
    """The text is that of the model whose positions are stretched so."""
    seen = []
    real = text_generation.stream

    def spied(config, *more, **options):
        seen.append(config)
        return real(config, *more, **options)

    monkeypatch.setattr(text_generation, "stream", spied)
    arguments = ["--checkpoint", str(folder), "--rope-scaling", flag]
    arguments += ["--prompt", "the la", "--max-new-tokens", "3"]
    text_generation.generate(parse_run(text_generation.RUNS, "Generates.", arguments))
    assert seen == [MODEL.with_rope_scaling(SCALINGS[flag])] != [MODEL]


@pytest.mark.slow
def test_sampled_text_depends_on_the_seed(folder):
    sampler = Sample(temperature=5.0)
    texts = [text(folder, sampler=sampler, seed=seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert all(output.startswith("the la") for output in texts)


def test_an_empty_prompt_starts_a_document(folder):
    assert isinstance(text(folder, prompt="", max_new_tokens=9), str)


@pytest.mark.slow
def test_the_checkpoint_of_a_step_is_read(folder):
    """The newest without a step. Of two steps, so that another was not read."""
    loaded = {step: load_run(folder, step) for step in (None, 1, 2)}
    leaves = {step: jax.tree.leaves(model.params) for step, model in loaded.items()}
    assert loaded[None].config == MODEL
    for newest, first, second in zip(leaves[None], leaves[1], leaves[2], strict=True):
        np.testing.assert_array_equal(newest, second)
        assert np.any(np.asarray(first) != np.asarray(second))


@pytest.mark.slow
def test_a_run_is_read_layer_by_layer_in_the_dtype_of_the_computation(folder):
    """What is then in memory is what decoding reads: no float32, and no stacked layers."""
    whole, loaded = load_run(folder, layout="stacked"), load_run(folder, dtype="bfloat16")
    assert layout_of(whole.params) == "stacked" != layout_of(loaded.params)
    params = unroll(whole.config, whole.params)
    jax.tree.map(
        lambda x, y: np.testing.assert_array_equal(x, y.astype(x.dtype), strict=True),
        loaded.params,
        params,
    )
    assert {x.dtype.name for x in jax.tree.leaves(loaded.params)} == {"bfloat16"}


@pytest.mark.parametrize("kind", ["a run", "a Hugging Face folder"])
@pytest.mark.slow(but=["a Hugging Face folder"])
def test_a_model_larger_than_the_memory_is_refused(kind, folder, tmp_path, monkeypatch):
    """Before it is read; in bfloat16 it is half as large, and read."""
    config = MODEL
    if kind != "a run":
        config, folder = zoo.get("llama-2-7b").tiny(), tmp_path / "llama"
        save_pretrained(folder, config, random_params(config))
        export_tokenizer(CharacterTokenizer("ab"), folder)
    size, limit = 4 * num_parameters(config), "jaxformer.run.loading.device_memory_limit"
    mesh = make_mesh(MeshConfig(data=1), jax.devices()[:1])
    monkeypatch.setattr(limit, lambda: size - 1)
    numbers = (
        rf"need {size / 1000:.3g}\d* kB per device in float32, but a device has [\d.]+ kB\. Take"
    )
    with pytest.raises(ValueError, match=numbers):
        load_run(folder, mesh=mesh)
    assert load_run(folder, mesh=mesh, dtype="bfloat16").config.num_layers == config.num_layers


def test_an_unknown_step_is_refused_with_those_there_are(folder):
    message = r"There is no checkpoint 7 in .*checkpoints; it has 1, 2\."
    with pytest.raises(ValueError, match=message):
        text(folder, step=7)


def test_ignore_is_refused_for_a_run(folder):
    with pytest.raises(ValueError, match="--ignore is for a Hugging Face folder; .*/out is a run"):
        text(folder, ignore=("my_note",))


def test_a_folder_without_checkpoints_is_refused(tmp_path, folder):
    message = "has no checkpoints and no config.json; pass the output folder of a run, or a Hugg"
    with pytest.raises(ValueError, match=f"^{tmp_path} {message}"):
        text(tmp_path)
    with pytest.raises(ValueError, match=f"checkpoints {message}"):
        text(folder / "checkpoints")
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ValueError, match=r"There is no checkpoint in .*/checkpoints\."):
        text(tmp_path)


@pytest.mark.slow
def test_a_checkpoint_of_another_model_is_refused(folder, tmp_path):
    """One whose description does not fit its arrays."""
    with Checkpoints(folder / "checkpoints") as saved:
        description = saved.read_description()
    description["config"]["model_dim"] = 14
    del description["schema"]
    with Checkpoints(tmp_path / "checkpoints") as changed:
        params = load_run(folder, layout="stacked").params
        changed.save(1, {"params": params}, description)
    with pytest.raises(ValueError, match=r"Checkpoint 1 in .* does not match"):
        text(tmp_path)


def test_a_checkpoint_of_another_program_is_refused(tmp_path):
    with Checkpoints(tmp_path / "checkpoints") as saved:
        saved.save(3, {"params": {"x": jnp.zeros(2)}}, {"run": {}})
    with pytest.raises(ValueError, match="a checkpoint in .* has no config, tokenizer: another"):
        text(tmp_path)


@pytest.mark.slow
def test_text_beyond_the_learned_positions_is_refused(folder):
    message = "The model has 16 learned positions, but a prompt of 14 tokens with max_.*=4 needs 17"
    with pytest.raises(ValueError, match=message):
        text(folder, prompt="thirteen byte", max_new_tokens=4)
    assert text(folder, prompt="thirteen byte", max_new_tokens=3).startswith("thirteen byte")


@pytest.mark.slow
def test_a_replaced_tokenizer_is_refused(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    train_bpe(["the lazy dogs"] * 9, vocab_size=260).save(copy)
    with pytest.raises(ValueError, match="copy is not the one the checkpoint was trained with"):
        text(copy)


# Hugging Face folders


def export(folder, config, **extra):
    """A model with random weights and a tokenizer that marks the start of a text itself."""
    tokenizer = train_bpe(["the lazy dogs sleep"] * 9, vocab_size=270)
    tokenizer.save(folder.parent / "tokenizer")
    rng = np.random.default_rng(0)
    blank = jnp.zeros((1, 2), jnp.int32)
    source = blank if isinstance(config.topology, EncoderDecoder) else None
    init = Transformer(config).init
    shapes = jax.eval_shape(lambda: init(jax.random.key(0), blank, source=source))["params"]
    params = jax.tree.map(lambda x: 0.3 * rng.normal(size=x.shape).astype(np.float32), shapes)
    extra = {"bos_token_id": 5, "eos_token_id": [3], **extra}
    save_pretrained(folder, config, params, extra=extra)
    saved = json.loads((folder.parent / "tokenizer/tokenizer.json").read_text())
    first = saved["model"]["vocab"]["!"]
    start, one, two = (
        {kind: {"id": name, "type_id": 0}}
        for kind, name in (("SpecialToken", "!"), ("Sequence", "A"), ("Sequence", "B"))
    )
    saved["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [start, one],
        "pair": [start, one, two],
        "special_tokens": {"!": {"id": "!", "ids": [first], "tokens": ["!"]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(saved))
    shutil.copy(folder.parent / "tokenizer/tokenizer_config.json", folder)
    return tokenizer, params, first


@pytest.mark.slow
def test_a_hugging_face_folder_continues_text_as_its_makers_begin_it(tmp_path):
    config = replace(
        MODEL, vocab_size=272, embedding=Embedding(), feed_forward=(GLU(hidden_dim=11),)
    )
    tokenizer, params, first = export(tmp_path / "hub", config)
    actual = text(tmp_path / "hub", prompt="the la", max_new_tokens=9)
    prompt = [first, *tokenizer.encode("the la").tolist()]
    tokens = generation.generate(
        config, params, [prompt], max_new_tokens=9, stop_tokens=(3,), vocab_size=270
    )[0, len(prompt) :].tolist()
    assert actual == "the la" + tokenizer.decode(text_generation.truncate_at_stop(tokens, (3,)))
    with pytest.raises(ValueError, match="is a Hugging Face folder; it has no checkpoint 4"):
        text(tmp_path / "hub", step=4)
    path = tmp_path / "hub/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"my_note": 1}))
    with pytest.raises(ValueError, match="my_note = 1: unknown attribute"):
        text(tmp_path / "hub")
    assert text(tmp_path / "hub", ignore=("my_note",)) == actual


@pytest.mark.parametrize("sampler", [Greedy(), Beam(num_beams=2)])
@pytest.mark.slow
def test_an_encoder_decoder_folder_answers_its_source(tmp_path, sampler):
    config = replace(zoo.get("t5-small").tiny(), vocab_size=272)
    tokenizer, params, first = export(tmp_path / "hub", config, decoder_start_token_id=7)
    actual = text(tmp_path / "hub", prompt="the lazy", max_new_tokens=5, sampler=sampler)
    source = [first, *tokenizer.encode("the lazy").tolist()]
    tokens = generation.generate(
        config,
        params,
        [[7]],
        source=[source],
        max_new_tokens=5,
        stop_tokens=(3,),
        vocab_size=270,
        sampler=sampler,
    )[0, 1:].tolist()
    assert actual == tokenizer.decode(text_generation.truncate_at_stop(tokens, (3,)))


def test_pieces_wait_for_whole_characters():
    text = "aé→z"
    ids = list(text.encode())

    def decode(ids):
        return bytes(ids).decode(errors="replace")

    assert list(text_generation.decode_stream(ids[1:], decode, ids[:1])) == ["é", "→", "z", ""]
    assert list(text_generation.decode_stream(ids[1:2], decode, ids[:1])) == [
        "\N{REPLACEMENT CHARACTER}"
    ]


CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def assistant(tmp_path_factory):
    """A Hugging Face folder whose tokenizer has a chat template."""
    folder = tmp_path_factory.mktemp("assistant") / "model"
    backend = hf.Tokenizer(hf.models.BPE())
    backend.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = hf.decoders.ByteLevel()
    trainer = hf.trainers.BpeTrainer(
        vocab_size=270,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(hf.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(["system user assistant " * 9], trainer)
    settings = LLAMA | {"vocab_size": backend.get_vocab_size(), "eos_token_id": 1}
    write_folder(folder, settings, random_tensors(llama_shapes(settings)))
    backend.save(str(folder / "tokenizer.json"))
    words = {"eos_token": "<|im_end|>", "chat_template": CHAT}
    (folder / "tokenizer_config.json").write_text(json.dumps(words))
    return folder


def written(*messages):
    turns = [f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in messages]
    return "".join(turns) + "<|im_start|>assistant\n"


def greedily(folder, text):
    """What follows a conversation that is written so, read by the tokenizers library."""
    backend = hf.Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = load_run(folder)
    prompt = backend.encode(text).ids
    tokens = generation.generate(model.config, model.params, [prompt], max_new_tokens=6)
    new = np.asarray(tokens)[0, len(prompt) :].tolist()
    return backend.decode(new[: new.index(1)] if 1 in new else new)


@pytest.mark.slow
def test_a_conversation_goes_on_with_what_was_said_before(assistant, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\nAnd now?\n\nnever read\n"))
    options = {"chat": True, "system": "Be brief.", "max_new_tokens": 6, "sampler": Greedy()}
    last = text_generation.generate(text_generation.Generate(checkpoint=assistant, **options))
    begun = [("system", "Be brief."), ("user", "Hi")]
    first = greedily(assistant, written(*begun))
    more = [*begun, ("assistant", first), ("user", "And now?")]
    assert last == greedily(assistant, written(*more)) != first
    first, last = (sanitize_text(text, sys.stdout) for text in (first, last))
    count = text_generation.format_count(num_parameters(load_run(assistant).config))
    assert capsys.readouterr().out == (
        f"{assistant}, {count} parameters. An empty line ends the conversation, Ctrl-C an answer.\n"
        f"> {first}\n> {last}\n> \n"
    )


@pytest.mark.slow
def test_an_interrupt_ends_an_answer_and_not_the_conversation(assistant, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\nAnd now?\n\n"))
    answer, asked = text_generation.Conversation.answer, []

    def interrupted(self, prompt, **options):
        asked.append(prompt)
        for number, token in enumerate(answer(self, prompt, **options)):
            if len(asked) == 1 and number == 2:
                raise KeyboardInterrupt
            yield token

    monkeypatch.setattr(text_generation.Conversation, "answer", interrupted)
    options = {"chat": True, "max_new_tokens": 6, "sampler": Greedy()}
    last = text_generation.generate(text_generation.Generate(checkpoint=assistant, **options))
    assert len(asked) == 2 and last
    assert capsys.readouterr().out.count("> ") >= 3


@pytest.mark.parametrize("asked", ["prompt", "chat", "prompts"])
@pytest.mark.slow(but=["prompts"])
def test_texts_beyond_the_context_of_a_model_are_named_once(
    asked, assistant, tmp_path, monkeypatch, capsys
):
    folder = shutil.copytree(assistant, tmp_path / "model")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"max_position_embeddings": 1024}))
    (tmp_path / "asked.txt").write_text("Hi\nGo on\nNo\n")
    fields = {
        "prompt": {"prompt": "Go on"},
        "chat": {"chat": True},
        "prompts": {"prompts": tmp_path / "asked.txt", "output": tmp_path / "said.jsonl"},
    }[asked]
    backend = hf.Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompt = written(("user", "Go on")) if asked == "chat" else "Go on"
    fitting = 1024 - len(backend.encode(prompt).ids)
    monkeypatch.setattr(text_generation, "stream", lambda *_, **__: iter(()))
    monkeypatch.setattr(
        text_generation, "generate_tokens", lambda c, p, rows, **_: np.full((len(rows), 9), 1)
    )
    monkeypatch.setattr(text_generation.Conversation, "answer", lambda *_, **__: (x for x in ()))
    for count in (fitting, fitting + 1):
        monkeypatch.setattr("sys.stdin", io.StringIO("Go on\n" + "And now?\n" * (count > fitting)))
        text_generation.generate(
            text_generation.Generate(checkpoint=folder, max_new_tokens=count, **fields)
        )
        assert capsys.readouterr().err == (
            "Warning: prompt and new tokens are up to 1,025 tokens, but the model knows 1,024 "
            "positions (max_position_embeddings, or the rows of its training). Pass a smaller "
            "--max-new-tokens, or scale RoPE by --rope-scaling.\n"
        ) * (count > fitting)
    monkeypatch.setattr("sys.stdin", io.StringIO("Go on\n"))
    scaled = {"rope_scaling": LinearScaling(factor=4.0), "max_new_tokens": 2048, **fields}
    text_generation.generate(text_generation.Generate(checkpoint=folder, **scaled))
    assert not capsys.readouterr().err


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.slow
def test_prompts_of_a_file_are_continued_together(assistant, tmp_path, chat):
    texts = ["Hi", "What?", "Go on"]
    (tmp_path / "x.txt").write_text("\n".join(texts))
    (tmp_path / "x.jsonl").write_text("\n".join(json.dumps({"prompt": text}) for text in texts))
    expected = [
        {"prompt": text, "text": greedily(assistant, written(("user", text)) if chat else text)}
        for text in texts
    ]
    for name in ("x.txt", "x.jsonl"):
        options = {"chat": chat, "max_new_tokens": 6, "sampler": Greedy(), "batch_size": 2}
        fields = {"prompts": tmp_path / name, "output": tmp_path / "said.jsonl", **options}
        answers = text_generation.generate(text_generation.Generate(checkpoint=assistant, **fields))
        assert [json.loads(line) for line in answers.splitlines()] == expected
        assert (tmp_path / "said.jsonl").read_text() == answers


def continued(folder, prompts, output, **fields):
    fields = {"max_new_tokens": 3, "sampler": Greedy(), "batch_size": 2, **fields}
    return text_generation.generate(
        text_generation.Generate(checkpoint=folder, prompts=prompts, output=output, **fields)
    )


@pytest.mark.slow
def test_every_line_of_a_packed_file_has_its_answer(folder, tmp_path, monkeypatch):
    """Line i answers line i, an empty one too; here a model says once more what it was asked."""

    def echo(config, params, prompts, *, max_new_tokens, **options):
        rows = [[*prompt, *prompt[1:], *[256] * 16] for prompt in prompts]
        return np.array([row[:15] for row in rows])

    monkeypatch.setattr(text_generation, "generate_tokens", echo)
    texts = ["the", "", "a\u2028\x85", "\x0c\r\x0b", "", "\rz"]
    (tmp_path / "asked.txt.gz").write_bytes(gzip.compress("\n".join([*texts, ""]).encode()))
    answers = continued(
        folder, tmp_path / "asked.txt.gz", tmp_path / "said.jsonl", max_new_tokens=7
    )
    assert [json.loads(line) for line in answers.splitlines()] == [
        {"prompt": text, "text": text} for text in texts
    ]
    assert (tmp_path / "said.jsonl").read_text() == answers


@pytest.mark.slow
@pytest.mark.parametrize("sampler", [Greedy(), Beam(num_beams=2)], ids=["greedy", "beam"])
def test_a_text_has_the_space_before_its_first_word(sampler, folder, tmp_path, monkeypatch, capsys):
    """In a file as on the terminal: a tokenizer decodes the first word of a text without it."""
    tokenizer, load = spaced_tokenizer(["the", "fox"]), text_generation.load_run

    def load_spaced(*arguments, **options):
        model = load(*arguments, **options)
        return model._replace(tokenizer=tokenizer, bos_tokens=(), stop_tokens=(0,))

    monkeypatch.setattr(text_generation, "load_run", load_spaced)
    monkeypatch.setattr(
        text_generation, "generate_tokens", lambda c, p, prompts, **_: np.array([[1, 2, 0]])
    )
    monkeypatch.setattr(text_generation, "stream", lambda c, p, prompts, **_: iter([[2]]))
    (tmp_path / "asked.txt").write_text("the\n")
    said = continued(folder, tmp_path / "asked.txt", tmp_path / "said.jsonl", sampler=sampler)
    assert json.loads(said)["text"] == " fox"
    run = text_generation.Generate(
        checkpoint=folder, prompt="the", max_new_tokens=1, sampler=sampler
    )
    assert text_generation.generate(run) == "the fox"


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("x.txt", b"a\nb\n" + 14 * b"c" + b"\n", r"x.txt line 3: The model has 16 .* 15 tokens"),
        ("x.txt", b"a\n\xff\n", r"x.txt is not UTF-8: .*, in line 2\."),
        ("x.jsonl", b'{"prompt": "a"}\n{"prompt": "b"\n', r"x.jsonl line 2 is not JSON"),
        ("x.jsonl", b'{"prompt": "a"}\n{"prompt": 5}\n', r"x.jsonl line 2: field .* got a int"),
        ("x.txt", b"", r"x.txt has no lines\."),
    ],
)
def test_a_prompt_that_cannot_be_continued_is_named_before_any_is(
    folder, tmp_path, monkeypatch, name, content, message
):
    monkeypatch.setattr(text_generation, "generate_tokens", None)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        continued(folder, tmp_path / name, tmp_path / "said.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_character_that_an_exported_tokenizer_lacks_is_named(tmp_path):
    config = zoo.get("llama-2-7b").tiny()
    folder, tokenizer = tmp_path / "model", CharacterTokenizer("ab")
    params = jax.eval_shape(Transformer(config).init, jax.random.key(0), jnp.zeros((1, 2), int))
    params = jax.tree.map(lambda x: np.zeros(x.shape, np.float32), params["params"])
    save_pretrained(folder, config, params)
    export_tokenizer(tokenizer, folder)
    (tmp_path / "x.txt").write_text("ab\nac\n")
    with pytest.raises(ValueError, match="x.txt line 2: The text cannot be encoded: .*Miss"):
        continued(folder, tmp_path / "x.txt", tmp_path / "said.jsonl")


@pytest.mark.slow
def test_an_output_is_whole_or_as_it_was(folder, tmp_path, monkeypatch):
    """Where the second batch fails; a folder is refused before a model is read."""
    calls, real = [], text_generation.generate_tokens

    def once(*arguments, **options):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*arguments, **options)

    monkeypatch.setattr(text_generation, "generate_tokens", once)
    prompts, output = tmp_path / "asked.txt", tmp_path / "said.jsonl"
    prompts.write_text("a\nb\nc\n")
    output.write_text("earlier")
    with pytest.raises(KeyboardInterrupt):
        continued(folder, prompts, output)
    assert output.read_text() == "earlier" and set(tmp_path.iterdir()) == {prompts, output}
    with pytest.raises(IsADirectoryError, match=str(tmp_path)):
        continued(tmp_path, prompts, tmp_path)


def test_an_output_pipe_stays_a_pipe(tmp_path):
    """And stays what it is, as /dev/stdout must."""
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    with text_generation.output_file(tmp_path / "pipe") as file:
        file.write("a line")
    assert os.read(reader, 99) == b"a line" and (tmp_path / "pipe").is_fifo()
    os.close(reader)


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--system", "Be brief."], "--system needs --chat."),
        (["--output", "x"], "--output needs --prompts."),
        (["--chat", "--batch-size", "3"], "--batch-size needs --prompts."),
        (["--prompt", "a", "--prompts", "x"], "--prompt and --prompts cannot be combined."),
    ],
)
def test_flags_that_are_of_no_use_together_are_refused(flags, message, capsys):
    with pytest.raises(SystemExit) as ended:
        parse_run(text_generation.RUNS, "", flags)
    assert ended.value.code and message in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_an_assistant_answers_one_prompt(assistant, capsys):
    options = {"chat": True, "prompt": "Hi", "max_new_tokens": 6, "sampler": Greedy()}
    answer = text_generation.generate(text_generation.Generate(checkpoint=assistant, **options))
    assert answer == greedily(assistant, written(("user", "Hi")))
    assert capsys.readouterr().out == f"{sanitize_text(answer, sys.stdout)}\n"


@pytest.mark.slow
def test_chat_needs_a_chat_template(folder):
    with pytest.raises(ValueError, match=r"out has no chat template: .*--chat-template chatml"):
        text_generation.generate(text_generation.Generate(checkpoint=folder, chat=True))
    with pytest.raises(ValueError, match=r"--chat-template needs --chat\."):
        text_generation.Generate(checkpoint=folder, chat_template="chatml")
