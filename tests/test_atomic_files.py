import pytest

from jaxformer.atomic_files import atomic_file


def test_a_file_appears_when_it_is_whole(tmp_path):
    path = tmp_path / "x.json"
    with atomic_file(path) as partial:
        partial.write_text("new")
        assert not path.exists() and partial.parent == tmp_path
    assert path.read_text() == "new" and [*tmp_path.iterdir()] == [path]


def test_a_failure_leaves_what_was_there(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), atomic_file(path) as partial:
        partial.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "old" and [*tmp_path.iterdir()] == [path]
