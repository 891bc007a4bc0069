import json
import math
import os
import resource
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxformer.training.metrics import (
    JsonLinesWriter,
    MultiWriter,
    TensorBoardWriter,
    WandbWriter,
    read_json_lines,
)


def steps(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def refuse(constant):
    raise ValueError(f"{constant} is not JSON")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "metrics.jsonl"


@contextmanager
def file_size_limit(size):
    """No file of this process can grow beyond a size, as on a full disk.

    Not longer than a test needs, since pytest's own output may be a file.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_line_is_the_step_the_time_and_the_numbers(path, monkeypatch):
    monkeypatch.setattr("time.time", lambda: 1767225600.25)
    writer = JsonLinesWriter(path)
    writer.write(20, {"loss": 5.25, "learning_rate": 3e-4})
    line = '{"step": 20, "time": 1767225600.25, "loss": 5.25, "learning_rate": 0.0003}\n'
    assert path.read_text() == line, "the line must be there before close"
    writer.close()
    assert path.read_text() == line


def test_numbers_of_numpy_and_whole_numbers_are_written(path):
    writer = JsonLinesWriter(path)
    writer.write(1, {"loss": np.float32(0.5), "tokens": 7, "norm": np.array(2.0)})
    writer.close()
    (line,) = read_json_lines(path)
    assert (line["loss"], line["tokens"], line["norm"]) == (0.5, 7.0, 2.0)


def test_numbers_that_are_not_finite_stay_valid_json(path):
    writer = JsonLinesWriter(path)
    writer.write(1, {"a": math.nan, "b": math.inf, "c": -math.inf})
    writer.close()
    fields = json.loads(path.read_text(), parse_constant=refuse)
    assert (fields["a"], fields["b"], fields["c"]) == ("NaN", "Infinity", "-Infinity")
    (line,) = read_json_lines(path)
    assert math.isnan(line["a"]) and line["b"] == math.inf and line["c"] == -math.inf


@settings(max_examples=20, deadline=None)
@given(st.dictionaries(st.text().filter(lambda n: n not in ("step", "time")), st.floats()))
def test_what_is_written_is_read(tmp_path_factory, numbers):
    path = tmp_path_factory.mktemp("lines") / "metrics.jsonl"
    writer = JsonLinesWriter(path)
    writer.write(3, numbers)
    writer.close()
    (line,) = read_json_lines(path)
    del line["time"]
    np.testing.assert_equal(line, {"step": 3, **numbers})


def test_the_reader_accepts_lines_of_other_writers_only_if_they_have_a_step(path):
    path.parent.mkdir()
    for bad in (
        *("[1]", "{", "null", "", "1", "[" * 99_999, '{"loss": 1.0}', '{"step": 1, "loss": "low"}'),
        *('{"step": 1, "loss": null}', '{"step": null}', '{"step": 1.5}', '{"step": true}'),
    ):
        path.write_text(f'{{"step": 1}}\n{bad}\n')
        with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2 is not a line of metrics: "):
            read_json_lines(path)


def test_resuming_drops_the_steps_that_come_again(path):
    writer = JsonLinesWriter(path)
    for step in range(1, 8):
        writer.write(step, {"loss": 1.0 / step})
    writer.close()
    before = path.read_bytes().splitlines()
    resumed = JsonLinesWriter(path, resume_from=4)
    assert path.read_bytes().splitlines() == before[:4], "kept lines must not change by one byte"
    resumed.write(5, {"loss": 9.0})
    resumed.close()
    assert steps(path) == [1, 2, 3, 4, 5]
    assert read_json_lines(path)[-1]["loss"] == 9.0
    assert os.listdir(path.parent) == ["metrics.jsonl"]


def test_resuming_drops_a_line_that_was_cut_short(path):
    path.parent.mkdir()
    path.write_text('{"step": 1, "time": 0.0}\n{"step": 2, "ti')
    JsonLinesWriter(path, resume_from=2).close()
    assert path.read_text() == '{"step": 1, "time": 0.0}\n'


def test_resuming_from_zero_begins_anew_and_needs_no_file(path):
    JsonLinesWriter(path, resume_from=0).close()
    assert path.read_text() == ""
    writer = JsonLinesWriter(path)
    writer.write(1, {})
    writer.close()
    JsonLinesWriter(path, resume_from=0).close()
    assert path.read_text() == ""


def test_a_new_run_does_not_continue_the_file_of_another(path):
    writer = JsonLinesWriter(path)
    writer.write(1, {})
    writer.write(17, {})
    writer.close()
    with pytest.raises(ValueError, match="already has 2 lines, up to step 17. Pass resume_from"):
        JsonLinesWriter(path)
    assert steps(path) == [1, 17]


@pytest.mark.parametrize("name", ["step", "time"])
def test_the_fields_of_every_line_are_taken(path, name):
    writer = JsonLinesWriter(path)
    with pytest.raises(ValueError, match=f"'{name}' is a reserved name; rename the metric"):
        writer.write(1, {name: 1.0})
    writer.close()


def test_a_full_disk_is_an_error_and_leaves_whole_lines(path):
    writer = JsonLinesWriter(path)
    writer.write(1, {"loss": 1.0})
    before = path.read_bytes()
    message = r"Metrics of step 2 could not be written to .*metrics.jsonl"
    with file_size_limit(len(before) + 11), pytest.raises(OSError, match=message):
        writer.write(2, {"loss": 1.0})
    writer.close()
    assert path.read_bytes() == before


def test_a_full_disk_while_resuming_leaves_the_file_as_it_was(path):
    writer = JsonLinesWriter(path)
    writer.write(1, {"loss": 1.0})
    writer.write(2, {"loss": 1.0})
    writer.close()
    before = path.read_bytes()
    message = r"Metrics of step 1 could not be written to .*\.jsonl"
    with file_size_limit(5), pytest.raises(OSError, match=message):
        JsonLinesWriter(path, resume_from=1)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == ["metrics.jsonl"]


def events(folder):
    """Every event of every file, oldest file first, read by the record format's own rules."""
    from tensorboardX.proto import event_pb2

    for path in sorted(folder.glob("events.out.tfevents.*"), key=lambda p: p.name.split(".")[-1]):
        data = path.read_bytes()
        while data:
            size = int.from_bytes(data[:8], "little")
            yield event_pb2.Event.FromString(data[12 : 12 + size])
            data = data[12 + size + 4 :]


def test_tensorboard_gets_scalars_by_name_and_step(tmp_path):
    writer = TensorBoardWriter(tmp_path)
    writer.write(3, {"train/loss": 0.5, "rate": np.float32(0.25)})
    first, second = events(tmp_path)
    assert first.file_version == "brain.Event:2"
    assert second.step == 3
    values = {value.tag: value.simple_value for value in second.summary.value}
    assert values == {"train/loss": 0.5, "rate": 0.25}
    writer.close()


def test_a_resumed_tensorboard_run_hides_the_steps_that_come_again(tmp_path):
    from tensorboardX.proto import event_pb2

    for resume_from in (None, 4):
        writer = TensorBoardWriter(tmp_path, resume_from=resume_from)
        writer.write(5, {"loss": 1.0})
        writer.close()
    assert len(list(tmp_path.iterdir())) == 2, "two writers of one second must not share a file"
    starts = [
        e.step for e in events(tmp_path) if e.session_log.status == event_pb2.SessionLog.START
    ]
    assert starts == [5]


def test_a_full_disk_is_an_error_for_tensorboard(tmp_path):
    writer = TensorBoardWriter(tmp_path)
    writer.write(1, {"loss": 1.0})
    (path,) = tmp_path.iterdir()
    with file_size_limit(path.stat().st_size + 7):
        with pytest.raises(OSError, match="Metrics of step 2 could not be written"):
            writer.write(2, {"loss": 1.0})
        with pytest.raises(OSError, match="Metrics of step 2 could not be written"):
            writer.close()
    writer.close()


class Recorder:
    """Stands for wandb and for its run."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda *args, **kwargs: self.calls.append((name, args, kwargs)) or self


def test_weights_and_biases_logs_by_step(monkeypatch):
    wandb = Recorder()
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=wandb.init))
    with MultiWriter([WandbWriter("project", "name", {"depth": 3})]) as metrics:
        metrics.write(7, {"loss": np.float32(0.5)})
    assert wandb.calls == [
        ("init", (), {"project": "project", "name": "name", "config": {"depth": 3}}),
        ("log", ({"loss": 0.5},), {"step": 7}),
        ("finish", (), {}),
    ]


def test_a_missing_library_is_named_with_its_extra(monkeypatch, tmp_path):
    for name in ("wandb", "tensorboardX", "tensorboardX.event_file_writer"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"needs wandb, .*: pip install 'jaxformer\[wandb\]'"):
        WandbWriter("project", "name", {})
    with pytest.raises(ImportError, match=r"needs tensorboardX, .* 'jaxformer\[train\]'"):
        TensorBoardWriter(tmp_path)


class Memory:
    def __init__(self, error=None):
        self.written, self.closed, self.error = [], 0, error

    def write(self, step, metrics):
        self.written.append((step, dict(metrics)))

    def close(self):
        self.closed += 1
        if self.error:
            raise self.error


def test_metrics_go_to_every_writer_and_each_is_closed_once():
    writers = [Memory(), Memory()]
    with MultiWriter(writers) as metrics:
        metrics.write(1, {"loss": 2.0})
        metrics.write(2, {"loss": 1.0})
    metrics.close()
    for writer in writers:
        assert writer.written == [(1, {"loss": 2.0}), (2, {"loss": 1.0})]
        assert writer.closed == 1


def test_every_writer_is_closed_even_when_one_fails():
    writers = [Memory(), Memory(OSError("full")), Memory()]
    with pytest.raises(OSError, match="full"), MultiWriter(writers):
        pass
    assert [writer.closed for writer in writers] == [1, 1, 1]


def test_no_writers_is_fine():
    with MultiWriter([]) as metrics:
        assert metrics.write(1, {"loss": 1.0}) is None
