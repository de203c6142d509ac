"""Watching over nodes: they end together, nothing stays behind, and every line is shown once."""

import contextlib
import os
import signal
import sys
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch import supervisor
from launch.job import Job
from launch.plan import NodePlan, Plan
from launch.runtimes.local import Process
from launch.state import LaunchState
from launch.supervisor import split_lines, supervise
from trainer.errors import UserError


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
    """Supervise nodes, with less patience. Returns the exit code; keeps the end, the state and what was cleaned."""
    monkeypatch.setattr(supervisor, "PEERS_GRACE_S", 0.3)
    monkeypatch.setattr(supervisor, "STOP_GRACE_S", 1.0)
    job = Job(command=("train",), runtime="local", name="run")

    def start(*nodes, limit=None, starter=None, show=False):
        plan = Plan(Job(**{**vars(job), "time_limit_min": limit}), ())
        start.end = supervise(
            plan, starter or (lambda: list(nodes)), lambda: start.cleaned.append(1), start.state, show=show
        )
        return start.end.code

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
    assert run.end.cause == run.state.read()["cause"] == "node 0 was stopped at once by a second request"


def test_a_node_that_does_not_heed_a_request_is_ended_after_a_while(run):
    node = FakeNode(after_s=FOREVER)
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
    assert run(node) == 137
    assert node.asked == ["stop", "kill", "remove"]
    assert run.end.cause == "node 0 did not end in time and was killed"


def test_a_node_that_nothing_ends_is_named(run, monkeypatch):
    class Immortal(FakeNode):
        def kill(self):
            self.asked.append("kill")

    monkeypatch.setattr(supervisor, "KILL_GRACE_S", 0.1)
    node = Immortal(after_s=3)
    assert run(FakeNode(), node, limit=0.001) == 1
    assert node.asked == ["stop", "kill", "remove"]
    assert run.state.read()["cause"] == "node 1 did not end in time and was killed"


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


def test_a_record_that_cannot_be_written_changes_neither_the_end_nor_what_is_cleaned(run, monkeypatch, capsys):
    def full(*told):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run.state, "end", full)
    assert run(FakeNode(75)) == 75
    assert run.cleaned == [1]
    assert "No space left on device" in capsys.readouterr().err
    assert "launch.json does not tell the end" in run.end.warnings[0]


def test_what_cannot_be_removed_is_told_and_the_end_is_that_of_the_nodes(run, monkeypatch, capsys):
    monkeypatch.setattr(run, "cleaned", None)
    assert run(FakeNode(3)) == 3
    assert run.state.read()["exit_code"] == 3
    assert "what the run left was not removed" in capsys.readouterr().err


def test_a_node_whose_output_breaks_off_is_waited_for(run, capsys):
    class Broken(FakeNode):
        def chunks(self):
            yield b"first\n"
            raise OSError("connection reset")

    assert run(Broken(3), FakeNode(3, after_s=0.1)) == 3
    assert run.state.log.read_text() == "[0:-] first\n"
    assert run.end.warnings == ("the output of node 0 broke off: connection reset",)
    assert run.state.read()["warnings"] == list(run.end.warnings)
    assert "broke off" in capsys.readouterr().err


def test_a_node_whose_end_nobody_can_tell_has_failed(run):
    class Gone(FakeNode):
        def wait(self):
            raise ConnectionError("the engine is gone")

    began = time.monotonic()
    assert run(Gone(), FakeNode(after_s=FOREVER)) == 1
    assert time.monotonic() - began < 5
    assert run.state.read()["cause"] == "node 0 ended with exit code 1 (the engine is gone)"


def test_a_node_that_cannot_be_reached_does_not_keep_the_others_from_being_asked(run, capsys):
    class Deaf(FakeNode):
        def stop(self):
            raise ConnectionError("no answer")

        kill = remove = stop

    other = FakeNode(after_s=FOREVER, stopped=75)
    assert run(Deaf(after_s=0.5), other, limit=0.001) == 75
    assert other.asked == ["stop", "kill", "remove"]
    assert [text.rpartition(" was ")[2] for text in run.end.warnings] == [
        f"not {done}: no answer" for done in ("stopped", "killed", "removed")
    ]


class Script(Process):
    """A node that is a process of this host; it says more than a pipe can hold."""

    def __init__(self, script="seq 50000; echo last"):
        words = ("sh", "-c", script)
        super().__init__(NodePlan(0, words, {"PATH": os.environ["PATH"]}, ""), {}, os.sched_getaffinity(0))


def test_what_a_process_started_is_killed_with_it(run):
    began = time.monotonic()
    assert run(Script("sleep 60; true"), limit=0.001) != 0
    assert time.monotonic() - began < 5


def test_a_full_disk_stops_the_log_and_not_the_run(run, capsys):
    run.state.folder.mkdir()
    run.state.log.symlink_to("/dev/full")
    assert run(Script(), show=True) == 0
    told = capsys.readouterr()
    assert told.out.endswith("[0:-] last\n")
    warning = f"{run.state.log} is not whole: No space left on device"
    assert told.err == f"warning: {warning}\n"
    assert run.state.read()["warnings"] == [warning]


def test_a_broken_screen_stops_showing_and_not_the_run(run, monkeypatch, capsys):
    reader, writer = os.pipe()
    os.close(reader)
    with contextlib.suppress(BrokenPipeError), os.fdopen(writer, "w") as screen:
        monkeypatch.setattr(sys, "stdout", screen)
        assert run(Script(), show=True) == 0
        assert len(run.state.log.read_text().splitlines()) == 50001
    assert "no longer shown" in run.end.warnings[0]
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("broken", ["run.log", "the folder", "launch.json"])
def test_a_folder_that_cannot_be_written_is_said_before_anything_starts(broken, run):
    if broken == "the folder":
        run.state.folder.write_text("")
    else:
        (run.state.folder / broken).mkdir(parents=True)
    with pytest.raises(UserError, match=r"^Cannot (write|read) \S+: [\w ]+\. HINT: [^\n]+$"):
        run(starter=lambda: pytest.fail("started"))


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
