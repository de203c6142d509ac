"""Watching over nodes: they end together, nothing stays behind, and every line is shown once."""

import os
import signal
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch import supervisor
from launch.job import Job
from launch.plan import Plan
from launch.state import LaunchState
from launch.supervisor import split_lines, supervise


class FakeNode:
    """A node that ends with `code` after `after_s`, or when it is told to; it remembers what was asked of it."""

    def __init__(self, code=0, *, after_s=0.0, output=(), stopped=None, why=""):
        self.asked = []
        self._code = code
        self._after_s = after_s
        self._output = output
        self._stopped = stopped
        self._why = why
        self._ended = threading.Event()

    def chunks(self):
        yield from self._output
        self._ended.wait(self._after_s)

    def wait(self):
        return self._code

    def why(self):
        return self._why

    def stop(self):
        self.asked.append("stop")
        if self._stopped is not None:
            self._end(self._stopped)

    def kill(self):
        self.asked.append("kill")
        self._end(137)

    def remove(self):
        self.asked.append("remove")

    def _end(self, code):
        if not self._ended.is_set():
            self._code = code
            self._ended.set()


FOREVER = 30.0


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Supervise fake nodes; patience is shortened. Returns the exit code, and keeps the state and what was cleaned."""
    monkeypatch.setattr(supervisor, "PEERS_GRACE_S", 0.3)
    monkeypatch.setattr(supervisor, "STOP_GRACE_S", 1.0)
    job = Job(command=("train",), runtime="local", name="run")

    def start(*nodes, limit=None, starter=None, show=False):
        plan = Plan(Job(**{**vars(job), "time_limit_min": limit}), ())
        return supervise(
            plan, starter or (lambda: list(nodes)), lambda: start.cleaned.append(1), start.state, show=show
        )

    start.cleaned = []
    start.state = LaunchState(tmp_path / "run")
    return start


def test_a_run_whose_nodes_end_well_ends_well(run):
    nodes = FakeNode(), FakeNode(after_s=0.1)
    assert run(*nodes) == 0
    assert run.cleaned == [1]
    assert all(node.asked[-1] == "remove" and "stop" not in node.asked for node in nodes)
    assert (run.state.read()["exit_code"], run.state.supervisor()) == (0, None)


def test_the_code_of_the_first_node_to_fail_is_that_of_the_run(run):
    assert run(FakeNode(4, after_s=0.25), FakeNode(3, after_s=0.05, why=" (out of memory)"), FakeNode(0)) == 3
    assert run.state.read()["exit_code"] == 3
    assert "node 1" in run.state.read()["cause"]
    assert "(out of memory)" in run.state.read()["cause"]


def test_the_peers_of_a_failed_node_are_ended(run):
    peer = FakeNode(after_s=FOREVER)
    began = time.monotonic()
    assert run(FakeNode(3), peer) == 3
    assert time.monotonic() - began < 5
    assert peer.asked == ["kill", "remove"]


def test_a_request_to_stop_lets_the_nodes_save(run):
    nodes = [FakeNode(after_s=FOREVER, stopped=75) for _ in range(2)]
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
    assert run(*nodes) == 75
    assert all(node.asked[0] == "stop" and node.asked.count("stop") == 1 for node in nodes)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_second_request_ends_the_nodes_at_once(number, run, monkeypatch):
    monkeypatch.setattr(supervisor, "STOP_GRACE_S", FOREVER)
    node = FakeNode(after_s=FOREVER)
    for delay in (0.2, 0.6):
        threading.Timer(delay, os.kill, (os.getpid(), number)).start()
    began = time.monotonic()
    assert run(node) == 137
    assert time.monotonic() - began < 5
    assert node.asked == ["stop", "kill", "remove"]


def test_a_node_that_does_not_heed_a_request_is_ended_after_a_while(run):
    node = FakeNode(after_s=FOREVER)
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
    assert run(node) == 137
    assert node.asked == ["stop", "kill", "remove"]


def test_the_time_limit_is_a_request_to_stop(run):
    node = FakeNode(after_s=FOREVER, stopped=75)
    assert run(node, limit=0.002) == 75
    assert node.asked[0] == "stop"


def test_signals_mean_afterwards_what_they_meant_before(run):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    run(FakeNode())
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


def test_a_start_that_fails_is_cleaned_up_and_the_run_is_not_running(run):
    def broken():
        raise RuntimeError("no network")

    with pytest.raises(RuntimeError, match="no network"):
        run(starter=broken)
    assert run.cleaned == [1]
    assert run.state.supervisor() is None


def test_a_record_that_cannot_be_written_does_not_keep_the_network(run, monkeypatch):
    def full(*told):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run.state, "end", full)
    with pytest.raises(OSError, match="No space"):
        run(FakeNode())
    assert run.cleaned == [1]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_node_whose_output_breaks_off_does_not_hang_the_run(run):
    class Broken(FakeNode):
        def chunks(self):
            raise OSError("connection reset")

    began = time.monotonic()
    assert run(Broken(3), limit=0.03) != 0
    assert time.monotonic() - began < 1.5


def test_lines_are_kept_with_their_place_and_shown(run, capsys):
    run(FakeNode(output=[b"plain\n[0:1] a rank's\nhalf"]), FakeNode(output=[b"drawn\rdrawn over\n"]), show=True)
    lines = sorted(run.state.log.read_text().splitlines())
    assert lines == ["[0:-] half", "[0:-] plain", "[0:1] a rank's", "[1:-] drawn over"]
    assert sorted(capsys.readouterr().out.splitlines()) == lines


def test_a_detached_run_keeps_its_lines_and_shows_none(run, capsys):
    run(FakeNode(output=[b"plain\n"]))
    assert run.state.log.read_text() == "[0:-] plain\n"
    assert capsys.readouterr().out == ""


LINES = {
    "one": (b"a\n", [("a", False)]),
    "the last without an end": (b"a\nb", [("a", False), ("b", False)]),
    "one to be drawn over": (b"a\rb\n", [("a", True), ("b", False)]),
    "the ends of a terminal": (b"a\r\nb\r\n", [("a", False), ("b", False)]),
    "empty ones": (b"\n\na\n", [("", False), ("", False), ("a", False)]),
    "letters beyond ASCII": ("größe\n".encode(), [("größe", False)]),
    "bytes that are no text": (b"\xff\n", [("\ufffd", False)]),
    "nothing": (b"", []),
}


@pytest.mark.parametrize(("data", "lines"), LINES.values(), ids=LINES.keys())
def test_bytes_become_lines(data, lines):
    assert list(split_lines(iter([data]))) == lines


@given(st.lists(st.sampled_from([b"a", b"\n", b"\r", b"\r\n", "ü".encode(), b"\xff"]), max_size=12), st.data())
def test_lines_are_the_same_however_the_bytes_were_cut(pieces, data):
    whole = b"".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=6)))
    chunks = [whole[start:end] for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    assert list(split_lines(iter(chunks))) == list(split_lines(iter([whole])))
