"""Child processes and the signals that come while they are started."""

import signal
import subprocess
import sys
import threading

import pytest

from dsagen.ending import ending_as_interrupt, run_child, with_child

SLEEPER = ("sleep", "30")


class Scene:
    """A child that starts while `signals` come, and what was called of it."""

    def __init__(self, *signals, command=SLEEPER):
        self.signals, self.command, self.process, self.worked, self.stopped = signals, command, None, 0, 0

    def start(self):
        self.process = subprocess.Popen(self.command)
        for number in self.signals:
            signal.raise_signal(number)
        return self.process

    def work(self, process):
        assert process is self.process
        self.worked += 1
        return "done"

    def stop(self, process):
        self.stopped += 1
        process.kill()
        process.wait()

    def play(self):
        return with_child(self.start, self.work, self.stop)


@pytest.fixture(autouse=True)
def handlers():
    """What a process in the foreground begins with, and the same afterwards."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_child_without_signals_is_worked_with_and_stopped():
    scene = Scene()
    assert scene.play() == "done"
    assert (scene.worked, scene.stopped) == (1, 1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_it_starts_comes_once_the_child_is_sure_to_be_stopped(number):
    scene = Scene(number)
    with ending_as_interrupt() as received:
        own = signal.getsignal(number)
        with pytest.raises(KeyboardInterrupt):
            scene.play()
        assert signal.getsignal(number) is own
    assert (scene.worked, scene.stopped, scene.process.returncode) == (0, 1, -signal.SIGKILL)
    assert received == ([] if number == signal.SIGINT else [number])


def test_several_signals_all_come_and_the_first_interrupts():
    scene = Scene(signal.SIGTERM, signal.SIGHUP, signal.SIGTERM)
    with ending_as_interrupt() as received, pytest.raises(KeyboardInterrupt):
        scene.play()
    assert received == [signal.SIGTERM, signal.SIGHUP, signal.SIGTERM] and scene.stopped == 1


def test_a_handler_of_the_user_s_is_called_late_and_stays():
    calls = []

    def own(number, _frame):
        calls.append((number, scene.stopped))

    signal.signal(signal.SIGTERM, own)
    scene = Scene(signal.SIGTERM)
    assert scene.play() == "done"
    assert calls == [(signal.SIGTERM, 0)] and signal.getsignal(signal.SIGTERM) is own
    signal.raise_signal(signal.SIGTERM)
    assert len(calls) == 2


def test_a_child_that_does_not_start_holds_nothing_back():
    def start():
        signal.raise_signal(signal.SIGTERM)
        raise FileNotFoundError

    with ending_as_interrupt() as received, pytest.raises(KeyboardInterrupt):
        with_child(start, lambda _: None, lambda _: pytest.fail("nothing to stop"))
    assert received == [signal.SIGTERM]
    with pytest.raises(FileNotFoundError):
        run_child(["/nowhere/at/all"])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_signal_between_two_handlers_that_are_put_back_leaves_none_away(monkeypatch):
    put, came = signal.signal, []

    def put_and_signal(number, handler):
        put(number, handler)
        if handler is signal.default_int_handler and not came:
            came.append(number)
            signal.raise_signal(number)

    with ending_as_interrupt():
        own = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        monkeypatch.setattr(signal, "signal", put_and_signal)
        with pytest.raises(KeyboardInterrupt):
            run_child(["/nowhere/at/all"])
        monkeypatch.undo()
        assert came == [signal.SIGINT]
        assert {number: signal.getsignal(number) for number in own} == own


def test_a_thread_starts_children_and_leaves_handlers_alone():
    found = []
    thread = threading.Thread(target=lambda: found.append(Scene().play()))
    thread.start()
    thread.join()
    assert found == ["done"]


def test_a_child_may_be_ended_by_the_signals_that_were_held_back():
    code = "from signal import *; print(pthread_sigmask(SIG_BLOCK, []), getsignal(SIGTERM) == SIG_DFL)"
    assert run_child([sys.executable, "-c", code]).stdout.strip() == "set() True"


def test_what_a_child_prints_and_its_code_come_back():
    done = run_child(["sh", "-c", "cat; printf '\\377' >&2; exit 3"], stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stdout, done.stderr) == (3, "", "\N{REPLACEMENT CHARACTER}")


def test_a_child_that_takes_too_long_is_killed(monkeypatch):
    started = []

    class Kept(subprocess.Popen):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Kept)
    with pytest.raises(subprocess.TimeoutExpired):
        run_child(SLEEPER, timeout=0.2)
    (process,) = started
    assert process.returncode == -signal.SIGKILL and process.stdout.closed and process.stderr.closed
