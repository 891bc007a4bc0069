import subprocess
import sys

import pytest

from jaxformer import config as c
from jaxformer import zoo
from jaxformer.zoo import __main__ as command
from jaxformer.zoo import printing

KINDS = {kind.__name__: kind for kind in vars(c).values() if isinstance(kind, type)}


def run(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["zoo", *arguments])
    command.main()
    return capsys.readouterr().out


@pytest.mark.parametrize("name", zoo.names())
def test_options_are_code_that_rebuilds_the_model(name):
    text = c.python_source(zoo.get(name), defaults=False, width=80)
    assert c.from_python(text, KINDS) == zoo.get(name)
    assert max(map(len, text.splitlines())) <= 100


def test_table(monkeypatch, capsys):
    out = run(monkeypatch, capsys)
    lines = out.splitlines()
    assert max(map(len, lines)) <= printing.WIDTH
    numbered = [line for line in lines[2 : lines.index("")] if line[:3].strip().isdigit()]
    assert [int(line[:3]) for line in numbered] == list(range(1, 46))
    for row, line in zip(zoo.survey(), numbered, strict=True):
        preset = row.preset or "not published"
        assert f" {preset} " in f"{line} "
        differs = line[110:]
        assert ("yes" in differs) == bool(row.differences)
        assert ("*" in differs) == bool(row.assumptions)
    at = next(i for i, line in enumerate(lines) if line.startswith("14 BLOOM"))
    assert "Parallel" in lines[at] and "released:" in lines[at + 1] and "Serial" in lines[at + 1]
    at = next(i for i, line in enumerate(lines) if line.startswith("30 Command R+"))
    assert lines[at + 1].strip() == "released: + QK-norm"
    at = next(i for i, line in enumerate(lines) if line.startswith("22 Olmo 2"))
    assert lines[at + 1].strip() == "tricks: Z-loss, QK-norm" and lines[at + 2].startswith("23")
    at = next(i for i, line in enumerate(lines) if line.startswith("35 Mixtral"))
    assert lines[at + 1].split() == ["released:", "RMSNorm", "Serial", "yes", "RoPE", "SwiGLU"]
    closing = " ".join(lines[lines.index("") :])
    assert "45 rows as the lecture lists them, the last 7 since 2026, 43 with a preset" in closing
    assert "A star: something about the model is assumed" in closing


@pytest.mark.slow
def test_layers_without_attention_have_no_window(monkeypatch, capsys):
    out = run(monkeypatch, capsys, "nemotron-3-nano")
    assert "23 of 52 layers are recurrent" in out and "have a window" not in out


@pytest.mark.slow
def test_the_state_of_recurrent_layers_does_not_grow(monkeypatch, capsys):
    """On paper: keys and values of 6 layers, two inputs of 10 convolutions."""
    out = run(monkeypatch, capsys, "lfm-2.5-1.2b")
    assert f"KV cache per token      {6 * 2 * 8 * 64 * 2:,} bytes (12.0 KiB) in bfloat16" in out
    assert f"and {10 * 2 * 2048 * 2:,} bytes for any number of tokens: 10 of 16 layers are" in out
    assert "layers have a window" not in out


def test_a_configuration_of_ones_own(tmp_path, monkeypatch, capsys):
    path = tmp_path / "mine.json"
    path.write_text(c.to_json(zoo.get("gpt-1")))
    out = run(monkeypatch, capsys, str(path))
    expected = run(monkeypatch, capsys, "gpt-1")
    assert out.partition("parameters ")[2].strip() in expected
    path.write_text('{"type": "Pretrain", "model": {}}')
    with pytest.raises(SystemExit):
        run(monkeypatch, capsys, str(path))
    message = "expected an object of type TransformerConfig, got one of type 'Pretrain'."
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_mixtures(monkeypatch, capsys):
    """The released cells, with the lecture's in brackets where they differ."""
    lines = run(monkeypatch, capsys).splitlines()
    at = lines.index(printing.mixture_table().splitlines()[0])
    rows = [line.split() for line in lines[at + 1 : at + 13]]
    assert rows[6] == "DeepSeek v1 2024 64 6 2 11/64 (1/4) deepseek-moe-16b".split()
    assert rows[8] == "DeepSeek v3 2024 256 8 1 1/14 deepseek-v3".split()
    assert rows[10] == "MiniMax 2025 32 2 0 ~1/4 unsupported".split()
    out = run(monkeypatch, capsys, "--markdown")
    assert "| Grok | 2024 | 8 | 2 | 0 | 4/3 | `grok-1` |" in out.splitlines()
    assert (
        "| 2/5 (1/2) | `llama-4-maverick` |" in out and "| needs matrix and scalar LSTMs |" in out
    )
    out = run(monkeypatch, capsys, "deepseek-v3")
    assert "Row 9 of the mixtures of experts: DeepSeek v3, 2024" in out


def test_what_nobody_published_is_not_called_released(monkeypatch, capsys):
    """Of LaMDA, norm, block and placement; of no other row is a blank cell filled by assumption."""
    lines = run(monkeypatch, capsys).splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("10 LaMDA"))
    assert lines[at].endswith("lamda-137b        *")
    assert lines[at + 1].split() == ["assumed:", "RMSNorm", "Serial", "yes"]
    assert sum(line.strip().startswith("assumed:") for line in lines) == 1
    assert [row.name for row in zoo.survey() if row.is_assumed] == ["LaMDA"]
    assert "after `assumed:`, cells that we assume because nothing is published" in " ".join(lines)


def test_one_model(monkeypatch, capsys):
    """Parameters, FLOPs and cache on paper: 80 layers, 64 + 8 heads of 128, 4096 tokens."""
    out = run(monkeypatch, capsys, "llama-2-70b")
    D, F, V, T, layers = 8192, 28_672, 32_000, 4096, 80
    products = 2 * D * D + 2 * D * 1024 + 3 * D * F
    flops = 2 * (layers * (products + 2 * T * D) + D * V)
    assert "68,976,648,192 (68.98 B)" in out
    assert f"{flops:,} ({flops / 1e9:.2f} G), in a sequence of 4,096 tokens" in out
    assert "327,680 bytes (320.0 KiB) in bfloat16" in out
    assert "MultiHead(num_heads=64, num_kv_heads=8, head_dim=128)" in out
    assert "Row 19 of the survey: LLaMA2 (70B), 2023" in out and "arXiv:2307.09288" in out


@pytest.mark.slow
def test_what_some_models_add(monkeypatch, capsys):
    out = run(monkeypatch, capsys, "gemma-2-27b")
    grows = 23 * 2 * 16 * 128 * 2
    assert f"beyond 4,096 tokens {grows:,} bytes: 23 of 46 layers have a window" in out
    out = run(monkeypatch, capsys, "mixtral-8x7b")
    assert "used by one token     12,879,925,248 (12.88 B)" in out
    out = run(monkeypatch, capsys, "t5-v1.1-xxl")
    assert "Row 5 of" in out and "Row 6 of" in out and "without cross-attention" in out
    out = run(monkeypatch, capsys, "gpt-2-xl")
    assert "at most 1,024 tokens" in out and "in a sequence of 1,024 tokens" in out
    out = run(monkeypatch, capsys, "palm-540b")
    assert "z-loss    0.0001, in training only." in out and "assumed" in out


def test_list(monkeypatch, capsys):
    out = run(monkeypatch, capsys, "--list")
    listed = [
        name.strip()
        for line in out.replace(",\n", ", ").splitlines()
        for name in line.split(": ")[1].split(",")
    ]
    assert sorted(listed) == sorted(zoo.names())


@pytest.mark.slow
def test_the_command_line_refuses_unknown_names():
    done = subprocess.run(
        [sys.executable, "-m", "jaxformer.zoo", "lama-2-70b"], capture_output=True, text=True
    )
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("error: There is no preset 'lama-2-70b'. Similar: llama-2-70b")


@pytest.mark.parametrize("flags", [["gpt-2-xl", "--list"], ["--list", "--markdown"]])
def test_one_thing_is_printed_at_a_time(flags, monkeypatch, capsys):
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, capsys, *flags)
    assert ended.value.code == 2 and "not allowed with argument" in capsys.readouterr().err


@pytest.mark.slow
def test_a_reader_that_leaves_early_is_no_error():
    command = [sys.executable, "-m", "jaxformer.zoo"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
