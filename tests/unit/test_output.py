"""Lines with their place in front, whole, whatever the pieces they are written in."""

import io
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.output import PrefixedStream, prefix_lines


class Pipe(io.StringIO):
    """Remembers each write, as the reader of a pipe may see them."""

    def __init__(self):
        super().__init__()
        self.writes = []

    def write(self, text):
        self.writes.append(text)
        return super().write(text)


def written(*pieces, flush_between=False):
    pipe = Pipe()
    stream = PrefixedStream(pipe, "[0:1] ")
    for piece in pieces:
        assert stream.write(piece) == len(piece)
        if flush_between:
            stream.flush()
    stream.flush()
    return pipe


PIECES = {
    "one line": (["a\n"], "[0:1] a\n"),
    "two lines at once": (["a\nb\n"], "[0:1] a\n[0:1] b\n"),
    "a line in pieces": (["a", "b", "\n"], "[0:1] ab\n"),
    "a line drawn over": (["a\rb\r", "c\n"], "[0:1] a\r[0:1] b\r[0:1] c\n"),
    "a line that never ends": (["a"], "[0:1] a"),
    "an empty line": (["\n"], "[0:1] \n"),
    "the ends of a terminal": (["a\r\nb\r\n"], "[0:1] a\r\n[0:1] b\r\n"),
    "nothing": ([""], ""),
    "signs that only Python takes for line ends": (["a\x0cb\u2028c\x1dd\n"], "[0:1] a\x0cb\u2028c\x1dd\n"),
}


@pytest.mark.parametrize(("pieces", "text"), PIECES.values(), ids=PIECES.keys())
def test_every_line_starts_with_its_place(pieces, text):
    assert written(*pieces).getvalue() == text


def test_a_line_is_one_write_so_that_ranks_do_not_mix():
    pipe = written("loss ", "0.5", " speed ", "7", "\nnext", " line\n")
    assert pipe.writes == ["[0:1] loss 0.5 speed 7\n", "[0:1] next line\n"]


def test_a_line_flushed_in_two_halves_has_one_place():
    assert written("half", " and half\n", flush_between=True).getvalue() == "[0:1] half and half\n"


@given(st.lists(st.text(alphabet="ab \n\u2028", max_size=6), max_size=8))
def test_the_text_is_the_same_however_it_was_cut(pieces):
    text = "".join(pieces)
    lines = text.split("\n")
    whole = "".join(f"[0:1] {line}\n" for line in lines[:-1]) + (f"[0:1] {lines[-1]}" if lines[-1] else "")
    assert written(*pieces).getvalue() == whole


@pytest.fixture
def standard_streams(monkeypatch):
    out, err = Pipe(), Pipe()
    for name, stream in (("stdout", out), ("stderr", err)):
        monkeypatch.setattr(sys, f"__{name}__", stream)
        monkeypatch.setattr(sys, name, stream)
    return out, err


@pytest.mark.parametrize(("rank", "place"), [(5, "[1:5] "), (None, "[1:-] ")], ids=["a rank", "an agent"])
def test_both_streams_are_prefixed_if_the_launcher_asks(rank, place, standard_streams, monkeypatch):
    monkeypatch.setenv("TRAINER_LOG_PREFIX", "1")
    prefix_lines(1, rank)
    print("a")
    print("b", file=sys.stderr)
    assert [stream.getvalue() for stream in standard_streams] == [f"{place}a\n", f"{place}b\n"]


def test_a_rank_forked_from_a_prefixed_agent_has_only_its_own_place(standard_streams, monkeypatch):
    monkeypatch.setenv("TRAINER_LOG_PREFIX", "1")
    prefix_lines(1, None)
    prefix_lines(1, 5)
    print("a")
    assert standard_streams[0].getvalue() == "[1:5] a\n"


def test_without_a_launcher_nothing_is_prefixed(monkeypatch):
    monkeypatch.delenv("TRAINER_LOG_PREFIX", raising=False)
    before = sys.stdout, sys.stderr
    prefix_lines(0, 0)
    assert (sys.stdout, sys.stderr) == before


def test_everything_else_is_asked_of_the_stream_itself():
    assert PrefixedStream(sys.__stdout__, "").isatty() == sys.__stdout__.isatty()
    assert PrefixedStream(sys.__stdout__, "").encoding == sys.__stdout__.encoding
