import os
import re
import shlex
import types
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import chain
from pathlib import Path

import pytest

from experiments import report
from experiments.ablate import Ablation
from experiments.translate import runs as translate
from jaxformer import errors, zoo
from jaxformer.checks import field_types
from jaxformer.config import GLU, MLP, Attention, Latent, LayerNorm, RMSNorm, Rope, SharedKV
from jaxformer.data import ByteLevel, StandardLibrary, TextFiles
from jaxformer.generation import Greedy, Sample
from jaxformer.parallel import DistributedConfig, MeshConfig
from jaxformer.run import (
    command_line,
    exporting,
    finetuning,
    preference_training,
    pretraining,
    text_generation,
)
from jaxformer.run.command_line import exit_with_error, parse_args, parse_run, readable_errors
from jaxformer.run.evaluation import Evaluate
from jaxformer.run.planning import Plan
from jaxformer.training.optimizers import SGD, AdamW, Muon, OptimizerConfig
from jaxformer.training.schedules import Constant
from tests.small_models import LLAMA_VARIANTS


def read(*arguments):
    return parse_run(pretraining.RUNS, "Trains.", list(arguments))


def refusal(capsys, *arguments):
    """What is said of wrong arguments, without the box around it."""
    with pytest.raises(SystemExit) as ended, readable_errors():
        read(*arguments)
    assert ended.value.code not in (0, None)
    out, err = capsys.readouterr()
    assert out == ""
    return " ".join(" ".join(inside_of_boxes(err)).split())


def inside_of_boxes(text):
    """Lines without the frame that tyro draws, of strokes or, for a pipe, of spaces."""
    lines = [re.sub(r"^[│ ] | *│?$", "", line) for line in text.split("\n")]
    return [line for line in lines if line.strip("╭╰─╮╯- ")]


def help_by_flag(capsys, runs, *arguments):
    """What `--help all` says of each flag, without its default."""
    with pytest.raises(SystemExit) as ended:
        parse_run(runs, "Trains.", [*arguments, "--help", "all"])
    assert ended.value.code == 0
    text = re.sub(r"\n {30}", " ", capsys.readouterr().out)
    entries = (line.split(maxsplit=1) for line in text.split("\n") if line.startswith("  --"))
    return {flag: entry.partition("(default:")[0].strip() for flag, entry in entries}


def flags(run, prefix=""):
    """Every field that is a flag of its own: choices are, records of settings are not."""
    for field, hint in field_types(type(run)).items():
        name = prefix + field.replace("_", "-")
        if is_dataclass(hint) or hint == Attention:
            yield from flags(getattr(run, field), f"{name}.")
        else:
            yield f"--{name}"


@pytest.mark.parametrize(
    "module, arguments",
    [(pretraining, []), (pretraining, ["small"]), (text_generation, []), (preference_training, [])],
    ids=["pretrain", "pretrain small", "generate", "dpo"],
)
def test_help_documents_every_field(capsys, module, arguments):
    texts = help_by_flag(capsys, module.RUNS, *arguments)
    run = module.RUNS[arguments[0] if arguments else "default"]
    wanted = set(flags(run))
    assert len(wanted) >= len(fields(run))
    flag_of_true = re.compile(r"(?<=--)no-|(?<=\.)no-")
    shown = {flag_of_true.sub("", flag) for flag in texts} - {"--learning-rate"}
    assert shown - {"--model.attention"} == wanted  # its fields are flags too
    undocumented = {flag for flag, text in texts.items() if not re.search(r"[a-z]{3}.*\.", text)}
    assert not undocumented


@pytest.mark.parametrize("module", [pretraining, finetuning, preference_training])
def test_every_default_that_the_help_shows_is_accepted(module, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        parse_run(module.RUNS, "Trains.", ["--help=all"])
    page = re.sub(r"\n {30}", "  ", capsys.readouterr().out)
    entries = re.findall(r"^  (--\S+) (\S+(?: \.\.\.)?)  .*\(default: +(.*)\)$", page, re.M)
    assert ("--init", "TEXT", "None") in entries and len(entries) > 50
    words = [
        (flag, *(shlex.split(x) if head[-3:] == "..." or x[0] == "'" else [re.sub("  +", " ", x)]))
        for flag, head, x in entries
        if flag not in ("--learning-rate", "--model.attention")
    ]
    default = module.RUNS["default"]
    assert parse_run(module.RUNS, "Trains.", [*chain(*words)]) == default


def test_help_shows_the_ranges_of_numbers(capsys):
    texts = help_by_flag(capsys, pretraining.RUNS)
    for flag, end in {
        "--steps": "counted from the start of the run. Must be positive.",
        "--seed": "dropout. Must lie between 0 and 4294967295.",
        "--devices": "simulated. Must be positive.",
        "--model.dropout.residual": "that follows it. Must be in [0, 1).",
        "--optimizer.selection-bias-rate": "experts with more. Must be at least 0.",
    }.items():
        assert texts[flag].endswith(end)
    assert "Must" not in texts["--model.residual-multiplier"]


def test_help_names_the_runs(capsys):
    with pytest.raises(SystemExit):
        read("tiny", "--help")
    text = capsys.readouterr().out
    assert "Runs: default, tiny, small. The first argument picks one;" in text
    assert "(20)" in text and "(600)" not in text  # its steps


def test_a_run_is_chosen_by_name_and_the_first_is_the_default():
    assert read() == pretraining.RUNS["default"]
    for name, run in pretraining.RUNS.items():
        assert read(name) == run


def test_the_help_of_pretrain_names_only_runs_that_exist():
    named = re.findall(r"jaxformer pretrain (\w+)", pretraining.__doc__)
    assert named
    assert set(named) <= set(pretraining.RUNS)


@pytest.mark.parametrize(
    "flag, similar",
    [
        ("--step", "--steps"),
        ("--batchsize=3", "--batch-size"),
        ("--num_layers", "--model.num-layers"),
        ("--model.num-layer", "num-layers"),
        ("--optimizer.clipnorm", "clip-norm"),
        ("--optmizer.clip-norm", "--optimizer.clip-norm"),
        ("--learnig-rate", "--learning-rate?"),
        ("--lrr", "--lr?"),
        ("--improt", "--import or --prompt?"),
    ],
)
def test_a_flag_that_is_misspelt_gets_the_most_similar(capsys, flag, similar):
    name = flag.partition("=")[0].replace("_", "-")
    assert f"error: There is no flag {name}. Did you mean {similar}" in refusal(capsys, flag, "5")


def test_a_program_without_named_runs_names_similar_flags_too(capsys):
    with pytest.raises(SystemExit):
        parse_args(Plan, "", ["llama-3-8b", "--device", "1"])
    assert "There is no flag --device. Did you mean --devices?" in capsys.readouterr().err


def test_a_misspelt_rate_of_the_optimizer_gets_the_flag_of_the_rate(capsys):
    for name in ("lr", "learning-rate", "learnig-rate"):
        text = refusal(capsys, f"--optimizer.{name}", "5")
        assert f"There is no flag --optimizer.{name}. Pass --learning-rate." in text


@pytest.mark.parametrize("flags", [["--lr", "3e-3"], ["--learning_rate=3e-3"]])
def test_the_learning_rate_has_a_flag(flags):
    for runs in (pretraining.RUNS, finetuning.RUNS):
        schedule = next(iter(runs.values())).optimizer.schedule
        run = parse_run(runs, "", flags)
        assert run.optimizer.schedule == replace(schedule, peak=3e-3)


def test_a_learning_rate_is_one_number(capsys):
    assert refusal(capsys, "--lr", "fast") == (
        "error: --lr must be a number, such as 1e-4; got 'fast'."
    )
    both = "--lr", "1e-3", "--optimizer.schedule", "Constant(peak=1e-3)"
    assert "--lr and --optimizer.schedule both set the learning rate" in refusal(capsys, *both)
    assert "Pass --learning-rate." in refusal(capsys, "--optimizer.lr", "1e-3")


def test_the_name_of_an_option_without_needed_fields_is_enough(capsys):
    flags = ["--model.norm", "LayerNorm", "--optimizer.optimizer", "AdamW", "--tokenizer"]
    run = parse_run(pretraining.RUNS, "", [*flags, "ByteLevel", "--corpus", "StandardLibrary"])
    assert (run.model.norm, run.optimizer.optimizer) == (LayerNorm(), AdamW())
    assert (run.tokenizer, run.corpus) == (ByteLevel(), StandardLibrary())
    muon = parse_run(pretraining.RUNS, "", ["--optimizer.optimizer", "Muon(adamw=AdamW)"])
    assert muon.optimizer.optimizer == Muon(adamw=AdamW())
    assert "Cosine needs peak" in refusal(capsys, "--optimizer.schedule", "Cosine")
    assert "Did you mean LayerNorm?" in refusal(capsys, "--model.norm", "LayerNrom")
    assert "Did you mean eps?" in refusal(capsys, "--model.norm", "LayerNorm(epss=1e-6)")


@pytest.mark.parametrize(
    "flag, message",
    [
        ("--optimizer.learning-rate", "Flags of --optimizer: --optimizer.schedule, --optimizer.o"),
        (
            "--optimizer.schedule.peak=3",
            "as in --optimizer.schedule 'Cosine(peak=0.02, warmup_step",
        ),
        ("--steps.more", "Pass --steps as one value, as in --steps 600"),
    ],
)
def test_a_flag_that_an_option_lacks_names_its_flags(capsys, flag, message):
    output = refusal(capsys, flag, "3e-4")
    assert (
        output.startswith(f"error: There is no flag {flag.removesuffix('=3')}.")
        and message in output
    )


def test_the_flags_of_an_attention_kind_are_its_fields(capsys):
    decay = "--model.attention", "Decay(num_heads=2, head_dim=8)"
    message = "There is no flag --model.attention.windows. Flags of --model.attention: "
    names = "num-heads", "head-dim", "min-memory", "max-memory", "angles"
    message += ", ".join(f"--model.attention.{name}" for name in names)
    assert f"{message}." in refusal(capsys, *decay, "--model.attention.windows", "3")


@pytest.mark.parametrize("name", ["nope", "Tiny", ""])
def test_an_unknown_run_lists_those_there_are(capsys, name):
    message = f"error: There is no named run {name!r}. Named runs: default, tiny, small."
    hint = " Did you mean tiny?" if name == "Tiny" else ""
    assert refusal(capsys, name) == message + hint


def test_a_preset_is_not_a_named_run(capsys):
    assert refusal(capsys, "gpt-1").endswith("by save_pretrained, and pass --init FOLDER.")


TINY = pretraining.RUNS["tiny"]
OTHERS = {
    "small": pretraining.RUNS["small"],
    "another kind of attention": replace(
        TINY,
        model=replace(
            TINY.model,
            attention=Latent(num_heads=2, latent_dim=8, nope_dim=4, rope_dim=4, value_dim=4),
        ),
    ),
    "a choice for each layer": replace(TINY, model=zoo.get("gemma-3-27b").tiny()),
    "norms by layer": replace(TINY, model=replace(TINY.model, norm_placement=("pre", "res_post"))),
    "kinds side by side": replace(TINY, model=LLAMA_VARIANTS["hybrid heads"]),
    "text in quotes": replace(TINY, corpus=TextFiles(path='it\'s "mine".txt'), prompt="-- it's"),
    "other settings": replace(
        TINY,
        tensorboard=False,
        scan=True,
        devices=None,
        sample_tokens=None,
        optimizer=OptimizerConfig(schedule=Constant(peak=1e-5), optimizer=SGD(), clip_norm=None),
        mesh=MeshConfig(data=2, tensor=2),
        output=Path("a b"),
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_the_flags_of_a_run_make_it_again(name):
    run = OTHERS[name]
    flags = list(chain(*command_line.changed_flags(run, TINY).values()))
    assert flags and parse_run(pretraining.RUNS, "", ["tiny", *flags]) == run


def test_plain_flags_replace_fields_and_nothing_else():
    run = read("tiny", "--steps", "7", "--model.num-layers", "3", "--scan", "--devices", "None")
    assert (run.steps, run.model.num_layers, run.scan, run.devices) == (7, 3, True, None)
    assert run.batch_size == pretraining.RUNS["tiny"].batch_size
    assert run.optimizer == pretraining.RUNS["tiny"].optimizer


def test_a_choice_is_written_as_python():
    run = read(
        *("--model.norm", "LayerNorm(eps=1e-3)"),
        *("--corpus", "TextFiles(path='it is.txt', suffixes=('.txt',))"),
        *("--tokenizer", "ByteLevel()"),
        *("--optimizer.optimizer", "SGD(momentum=0.5)"),
        *("--optimizer.schedule", "Constant(peak=1)"),
        *("--model.attention.qk-norm", "None"),
        *("--optimizer.clip-norm", "None"),
    )
    assert run.model.norm == LayerNorm(eps=1e-3)
    assert run.corpus == TextFiles(path="it is.txt", suffixes=(".txt",))
    assert run.tokenizer == ByteLevel()
    assert run.optimizer.optimizer == SGD(momentum=0.5)
    assert run.optimizer.schedule == Constant(peak=1.0)
    assert run.model.attention.qk_norm is None
    assert run.optimizer.clip_norm is None


@pytest.mark.parametrize(
    "flags, vocab_size",
    [
        ([], 512),
        (["--tokenizer", "BPE(vocab_size=32768)"], 32_768),
        (["--tokenizer", "BPE(vocab_size=1000)"], 1024),
        (["--tokenizer=ByteLevel()"], 384),
        (["--tokenizer", "Characters()"], 512),  # only its text tells
        (["--tokenizer", "BPE(vocab_size=1000)", "--model.vocab-size", "1003"], 1003),
        (["--tokenizer", "BPE(vocab_size=1000)", "--model.vocab_size=512"], 512),
        (["--tokenizer", "BPE(vocab_size=512)", "--steps", "3"], 512),
    ],
)
def test_the_vocabulary_follows_the_tokenizer(flags, vocab_size):
    """Unless a flag says another."""
    assert read("tiny", *flags).model.vocab_size == vocab_size


def test_a_choice_per_layer_takes_several():
    run = read(
        *("--model.attention.windows", "4", "None"),
        *("--model.attention.positions", "Rope(base=500.0)", "None", "Alibi()"),
        *("--model.feed-forward", "MLP(hidden_dim=8)", "GLU(hidden_dim=9)"),
    )
    assert run.model.attention.windows == (4, None)
    assert run.model.attention.positions[:2] == (Rope(base=500.0), None)
    assert len(run.model.attention.positions) == 3
    assert run.model.feed_forward == (MLP(hidden_dim=8), GLU(hidden_dim=9))


def test_the_kind_of_attention_is_written_as_python_and_its_fields_are_flags():
    kind = "--model.attention", "SharedKV(num_heads=4, head_dim=16)"
    run = read("--model.attention.windows", "4", "None", *kind)
    assert run.model.attention == SharedKV(num_heads=4, head_dim=16, windows=(4, None))
    run = read("tiny", "--model.attention=SharedKV(num_heads=2, head_dim=8)")
    assert run.model.attention == SharedKV(num_heads=2, head_dim=8)
    assert run.steps == pretraining.RUNS["tiny"].steps


def test_what_is_printed_as_the_default_is_read_back():
    for value in (RMSNorm(), LayerNorm(parameters="none")):
        shown = repr(value).replace("'", '"')
        assert read("--model.norm", shown).model.norm == value


def test_quotes_inside_a_default_are_left_as_they_are(capsys):
    @dataclass(frozen=True, kw_only=True)
    class Reading:
        """Has a corpus.

        Attributes:
            corpus: The text.
        """

        corpus: TextFiles | ByteLevel = TextFiles(path="it's.txt")

    with pytest.raises(SystemExit):
        parse_run({"default": Reading()}, "Reads.", ["--help"])
    assert 'The text (TextFiles(path="it\'s.txt")).' in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--model.norm", "LayerNorm(epsilon=1e-3)"], "LayerNorm has no field epsilon;"),
        (["--model.norm", "LayerNorm(eps='x')"], "eps: expected float, got 'x'."),
        (["--corpus", "missing.txt"], "There is no file or folder 'missing.txt'."),
        (["--model.norm", "LayerNorm("], "Cannot parse 'LayerNorm(' as a configuration."),
        (["--model.norm", "3"], "'3' is not one of LayerNorm(eps, parameters, scale_offset), RMS"),
        (["--model.norm", "GLU(hidden_dim=3)"], "expected a number, a string, None, or an option"),
        (["--model.norm", "None"], "'None' is not one of LayerNorm("),
        (["--tokenizer", "BPE(vocab_size=100)"], "vocab_size must be at least 257"),
        (["--corpus", "TextFiles()"], "TextFiles needs path."),
        (["--model.attention", "GLU(hidden_dim=3)"], "Cannot parse 'GLU(hidden_dim=3)': expected"),
        (["--model.attention", "Rope()"], "'Rope()' is not one of MultiHead(num_heads, num_kv_hea"),
        (["--model.attention"], "Cannot parse 'nothing': expected a number"),
        (["--model.attention.windows"], "at least one entry"),
        (["--model.attention.windows", "2.5"], "'2.5' is not one of int, Chunks(size), Bl"),
        (["--model.attention.windows", "0"], "MultiHead.windows[0] must be positive; got 0."),
        (["--model.attention.num-kv-heads", "3"], "num_heads=4, num_kv_heads=3."),
        (["--model.dropout.residual", "1"], "Dropout.residual must be in [0, 1); got 1.0."),
        (["--steps", "many"], "Error parsing --steps: invalid literal for int()"),
        (["--steps", "0"], "steps must be positive; got 0."),
        (["--evaluate-every", "0"], "evaluate_every must be positive; got 0."),
        (["--devices", "0"], "devices must be positive; got 0."),
        (["--steps", "1e20"], "Error parsing --steps: invalid literal for int()"),
        (["--steps", f"1{'0' * 20}"], f"at most 2147483647; got 1{'0' * 20}."),
        (["--held-out", "1"], "held_out must lie between 0 and 1; got 1.0."),
        (["--held-out", "nan"], "held_out must be a finite float32 number; got nan."),
        (["--wandb", ""], "wandb must name a project; got ''."),
        (["--resume-or-begin"], "--resume-or-begin needs --output FOLDER"),
        (
            [
                *("--hosts.coordinator-address", "localhost:x", "--hosts.num-processes", "2"),
                *("--hosts.process-id", "0"),
            ],
            "coordinator_address must be host:port, with a port from 1 to 65535; got "
            "'localhost:x'.",
        ),
        (["--seed", "-1"], "seed must lie between 0 and 4294967295; got -1."),
        (["--dtype", "float16"], "invalid choice 'float16'"),
        (["--stepz", "4"], "--stepz"),
        (["--steps"], "--steps"),
        (["--steps", "4", "tiny"], "tiny"),
        (
            ["--model.embedding.positions", "Learned(max_length=100)"],
            "length 256 is more than the 100 learned positions of the model.",
        ),
        (["--model.topology", "Encoder()"], "Pretraining needs the topology Decoder; got Encod"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_flags_are_refused_with_a_message(capsys, arguments, message):
    output = refusal(capsys, *arguments)
    assert message.replace(" ", "") in output.replace(" ", "")
    assert "Traceback" not in output


@pytest.mark.parametrize("kind, name", [(Evaluate, "CHECKPOINT"), (Plan, "NAME")])
def test_a_missing_argument_is_called_as_in_the_usage(kind, name, capsys):
    with pytest.raises(SystemExit):
        parse_args(kind, "", [])
    words = " ".join(" ".join(inside_of_boxes(capsys.readouterr().err)).split())
    assert re.search(rf"Missing from jaxformer {kind.__name__.lower()}: {name} ", words)
    with pytest.raises(SystemExit):
        parse_args(kind, "", ["--help"])
    assert re.match(rf"usage: .* {name} \[--flag VALUE", capsys.readouterr().out)


def test_samplers_of_generate():
    assert parse_run(text_generation.RUNS, "", ["--sampler", "Greedy()"]).sampler == Greedy()
    chosen = parse_run(text_generation.RUNS, "", ["--sampler", "Sample(top_k=3)"]).sampler
    assert chosen == Sample(top_k=3)


def test_the_process_own_arguments_are_the_default(monkeypatch):
    monkeypatch.setattr("sys.argv", ["pretrain.py", "tiny", "--seed", "5"])
    assert parse_run(pretraining.RUNS, "").seed == 5


def test_the_command_of_the_help_is_that_of_the_module(monkeypatch, capsys):
    main = types.ModuleType("__main__")
    main.__spec__ = types.SimpleNamespace(name="experiments.pretrain")
    monkeypatch.setitem(__import__("sys").modules, "__main__", main)
    with pytest.raises(SystemExit):
        read("tiny", "--help")
    assert capsys.readouterr().out.startswith("usage: python -m experiments.pretrain tiny [--flag")


SCREEN = 45  # lines


@pytest.mark.parametrize(
    "module", [pretraining, finetuning, preference_training, text_generation, translate, exporting]
)
def test_the_first_page_of_the_help_fits_a_screen_and_names_the_others(module, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        parse_run(module.RUNS, module.__doc__, ["--help"])
    page = capsys.readouterr().out
    assert len(page.split("\n")) <= SCREEN
    listed = re.search(r"--help TOPIC those of one topic: (.*?)\.", " ".join(page.split()))
    for topic in listed[1].split(", ") if listed else []:
        with pytest.raises(SystemExit) as ended:
            parse_run(module.RUNS, module.__doc__, ["--help", topic])
        assert ended.value.code == 0
        assert "\n  --" in capsys.readouterr().out


def test_a_topic_of_the_help_has_its_flags_alone(capsys):
    with pytest.raises(SystemExit):
        read("--help", "optimizer")
    flags = re.findall(r"^  (--[\w.-]+)", capsys.readouterr().out, re.M)
    assert {flag.partition(".")[0] for flag in flags} == {"--optimizer", "--learning-rate"}
    with pytest.raises(SystemExit):
        read("--help", "optimizer.clip-norm")
    page = capsys.readouterr().out
    assert re.findall(r"^  (--[\w.-]+)", page, re.M) == ["--optimizer.clip-norm"]
    with pytest.raises(SystemExit):
        read("--help=optimizer.clip-norm")
    assert capsys.readouterr().out == page
    assert "There is no topic 'optimiser'. Did you mean optimizer?" in refusal(
        capsys, "--help", "optimiser"
    )


@pytest.mark.parametrize("error", [ValueError, OSError, ImportError, FileNotFoundError])
def test_expected_errors_end_the_process_with_their_message(capsys, monkeypatch, error):
    monkeypatch.delenv("JAXFORMER_TRACEBACK", raising=False)
    monkeypatch.setattr(
        errors, "IMPORTED_MODULES", ["tests.mine"]
    )  # so this file's are a person's own
    with pytest.raises(SystemExit) as ended, readable_errors():
        raise error("No 3 of 7.")
    assert ended.value.code == 1
    hint = "(Set JAXFORMER_TRACEBACK=1 for the traceback.)"
    assert capsys.readouterr() == ("", f"error: No 3 of 7.\n{hint}\n")
    monkeypatch.setenv("JAXFORMER_TRACEBACK", "1")
    with pytest.raises(error, match="No 3 of 7."), readable_errors():
        raise error("No 3 of 7.")


@pytest.mark.parametrize(
    "module, text, line",
    [
        ("experiments.here", "list(zip([1], [2, 3], strict=True))", 2),
        ("jaxformer.here", "a, b = 1, 2, 3", 2),
        ("__main__", "try:\n        int('x')\n    finally:\n        pass", 3),
        ("__main__", "try:\n        int('x')\n    except ValueError:\n        raise", 3),
        ("experiments.here", "import numpy; numpy.zeros(2) + numpy.zeros(3)", 2),
        ("a_library", "raise ValueError('as it likes')", 2),
    ],
)
def test_a_value_error_that_nobody_raised_on_purpose_is_told_as_a_bug(module, text, line):
    names = {"__name__": module}
    exec(compile(f"def work():\n    {text}\n", "here.py", "exec"), names)
    with pytest.raises(ValueError) as raised, readable_errors():
        names["work"]()
    assert raised.value.__notes__ == [
        f"This is a bug in the program, not an error in your input: here.py:{line}, in work."
    ]


def test_ctrl_c_ends_the_process_without_a_traceback(capsys):
    with pytest.raises(SystemExit) as ended, readable_errors():
        raise KeyboardInterrupt
    assert ended.value.code == 130
    assert capsys.readouterr().err == "\nInterrupted.\n"


@pytest.mark.parametrize(
    "goes_on, status",
    [
        (lambda: None, 141),
        (lambda: print("x" * 99_999), 141),
        (lambda: exit_with_error("Not so."), 1),
    ],
    ids=["a short text", "a long one", "a failure"],
)
def test_a_reader_that_leaves_ends_the_process_in_silence(goes_on, status, capfd, monkeypatch):
    """As `head` does; Python's own last flush is that of closing the stream."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    with open(write_end, "w") as pipe:
        monkeypatch.setattr("sys.stdout", pipe)
        with pytest.raises(SystemExit) as ended, readable_errors():
            print("a line")
            goes_on()
    assert ended.value.code == status
    assert "pipe" not in capfd.readouterr().err


def test_a_broken_pipe_other_than_standard_output_is_reported(capsys):
    with pytest.raises(SystemExit) as ended, readable_errors():
        raise BrokenPipeError("The store has hung up.")
    assert ended.value.code == 1 and "The store has hung up." in capsys.readouterr().err


def test_unexpected_errors_keep_their_traceback():
    with pytest.raises(ZeroDivisionError), readable_errors():
        raise ZeroDivisionError


def test_failing_ends_with_status_1(capsys):
    with pytest.raises(SystemExit) as ended:
        exit_with_error("Not so.")
    assert ended.value.code == 1
    assert capsys.readouterr().err == "error: Not so.\n"


@pytest.mark.parametrize(
    "arguments, status, message",
    [
        (["--help"], 0, "Folder of studies and benchmarks"),
        (["--nope"], 1, "There is no flag --nope. --help all lists all flags."),
        (["--results", "nowhere"], 2, "results must name a folder; nowhere is not"),
    ],
)
def test_the_report_reads_its_flags_before_it_writes(arguments, status, message, capsys):
    with pytest.raises(SystemExit) as ended:
        command_line.parse_args(report.Report, report.__doc__, arguments)
    assert ended.value.code == status
    shown = capsys.readouterr()
    assert message in " ".join((shown.out + shown.err).split())


TINY, TEXT = pretraining.RUNS["tiny"], TextFiles(path="plain.txt")


@pytest.mark.parametrize(
    "run, fields, message",
    [
        (TINY, {"resume": True, "resume_or_begin": True}, "--resume and --resume-or-begin cannot"),
        (TINY, {"prompt": "a", "sample_tokens": None}, "--prompt needs --sample-tokens."),
        (Evaluate(checkpoint=Path("x"), tasks=("any",)), {"stride": 3}, "--stride needs --text."),
        (Evaluate(checkpoint=Path("x"), choices=Path("x")), {"limit": 3}, "--limit needs --tasks."),
        (
            Evaluate(checkpoint=Path("x"), choices=Path("x")),
            {"task_folder": Path("x")},
            "--task-folder needs --tas",
        ),
        (
            Evaluate(checkpoint=Path("x"), choices=Path("x")),
            {"chat_template": "chatml"},
            "--chat-template nee",
        ),
        (
            Evaluate(checkpoint=Path("x"), text=TEXT),
            {"chat_template": "x"},
            "--chat-template needs --te",
        ),
        (Ablation(axis="norm", run="tiny"), {"size": "gpu"}, "--size and --run cannot be comb"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_what_would_change_nothing_is_refused(run, fields, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        replace(run, **fields)


@pytest.mark.parametrize(
    "fields", [{"steps": 7, "epochs": 2.0}, {"hosts": DistributedConfig(initialization_timeout=5)}]
)
def test_a_run_whose_flags_do_not_go_together_leaves_nothing(fields, tmp_path):
    with pytest.raises(
        ValueError, match=r"steps 7 and --epochs 2 cann|DistributedConfig.*pass --distributed"
    ):
        pretraining.pretrain(replace(TINY, output=tmp_path / "out", devices=1, **fields))
    assert not (tmp_path / "out").exists()


def test_generating_refuses_numbers_that_count_nothing():
    for flags in ({"devices": 0}, {"max_new_tokens": 0}, {"seed": -1}):
        (name,) = flags
        with pytest.raises(ValueError, match=f"{name} must "):
            text_generation.Generate(checkpoint=Path("x"), **flags)
