"""Progress of tokenization in a log."""

from jaxformer.data import tokenization


def test_a_log_that_has_a_share_has_the_end_too(capsys, monkeypatch):
    seconds = iter([0.0, 4.0, 11.0, 14.0, 0.0, 1.0])
    monkeypatch.setattr(tokenization.time, "monotonic", lambda: next(seconds))
    progress = tokenization.TokenizationProgress()
    for done in (30, 74, 100):
        progress(done, 100)
    shares = [line.split()[1] for line in capsys.readouterr().out.splitlines()]
    assert shares == ["74%", "100%"]
    tokenization.TokenizationProgress()(100, 100)  # after a second
    assert not capsys.readouterr().out
