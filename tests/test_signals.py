"""Signals and closed outputs as a request to stop."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from unmask.cli.runs import run_until_paused
from unmask.util import signals
from unmask.util.signals import SIGNALS, Paused, stop_requests


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, in seconds, that the signals see."""
    now = [100.0]
    monkeypatch.setattr(signals.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def closed_pipe() -> Iterator[int]:
    """A descriptor that nobody reads."""
    source, sink = os.pipe()
    os.close(source)
    yield sink
    os.close(sink)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_a_request_and_a_second_one_ends_at_once(
    number: signal.Signals, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    class EndedError(Exception):
        pass

    def end(*_: object) -> None:
        raise EndedError

    monkeypatch.delenv("WORLD_SIZE", raising=False)
    before = signal.signal(number, end)
    try:
        with pytest.raises(EndedError), stop_requests() as should_stop:
            assert not should_stop()
            signal.raise_signal(number)
            signal.raise_signal(number)  # a launcher sends the same signal once more
            assert should_stop()
            clock[0] += 0.5
            if number != signal.SIGINT:  # a person presses Ctrl-C; others may come from a batch system and a launcher
                signal.raise_signal(number)
                clock[0] += 5
            signal.raise_signal(number)
            pytest.fail("the second signal did not end it")
        assert signal.getsignal(number) is end
    finally:
        signal.signal(number, before)


def test_an_ignored_hangup_stays_ignored() -> None:
    """`nohup unmask train` survives the end of its terminal."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_requests() as should_stop:
            signal.raise_signal(signal.SIGHUP)
            assert not should_stop()
    finally:
        signal.signal(signal.SIGHUP, before)


def stop_when_closed(tmp_path: Path) -> None:
    def training(should_stop):
        print("a line that nobody reads", flush=True)
        assert should_stop()
        raise Paused(tmp_path / "run", 3)

    assert run_until_paused("train", tmp_path / "run", training) is None


def test_a_closed_output_is_a_request_and_standard_error_says_how_to_resume(
    closed_pipe: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with os.fdopen(os.dup(closed_pipe), "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        stop_when_closed(tmp_path)
        assert sys.stdout is stdout
    err = capfd.readouterr().err
    assert f"stopped after update 3. To resume: unmask train --resume {tmp_path / 'run'}" in err
    assert "stopping after this update" in err


def test_a_run_stops_silently_if_both_outputs_are_closed(
    closed_pipe: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    standard_error = os.dup(2)
    try:
        with os.fdopen(os.dup(closed_pipe), "w") as stdout, os.fdopen(2, "w", closefd=False) as stderr:
            os.dup2(closed_pipe, 2)
            monkeypatch.setattr(sys, "stdout", stdout)
            monkeypatch.setattr(sys, "stderr", stderr)
            stop_when_closed(tmp_path)
    finally:
        os.dup2(standard_error, 2)
        os.close(standard_error)
    assert capfd.readouterr().err == ""
