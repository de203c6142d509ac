"""Words to text and back: whatever the words, a shell reads the same ones."""

import shlex
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch import shell
from trainer.errors import UserError

WORD = st.text(
    st.characters(exclude_characters="\0", exclude_categories=["Cs"])
    | st.sampled_from(" '\"$`\\,\n\t*?~#!&|;<>(){}[]-=%"),
    max_size=12,
)


def read_by_bash(lines):
    """What bash makes of lines of words: a list of words for each, in one process."""
    script = "\n".join(f"printf '%s\\0' {line}; printf 'end\\n\\0'" for line in lines)
    done = subprocess.run(["bash", "-c", script], capture_output=True, check=True, env={"HOME": "/nowhere"})
    words = done.stdout.decode().split("\0")[:-1]
    found = [[]]
    for word in words:
        if word == "end\n":
            found.append([])
        else:
            found[-1].append(word)
    return found[:-1]


@settings(max_examples=12)
@given(st.lists(st.lists(WORD.filter(lambda word: word != "end\n"), min_size=1, max_size=5), min_size=10, max_size=30))
def test_bash_reads_the_words_that_were_quoted(commands):
    assert read_by_bash([shell.quote(words) for words in commands]) == commands


@given(st.lists(WORD, max_size=6))
def test_python_reads_the_words_that_were_quoted(words):
    assert shlex.split(shell.quote(words)) == words


def test_a_hostile_word_stays_one_word(hostile):
    assert read_by_bash([shell.quote(["a", hostile, "b"])]) == [["a", hostile, "b"]]


def test_a_hostile_value_reaches_the_environment_and_nothing_else_does(hostile, monkeypatch):
    monkeypatch.setenv("STRANGER", "1")
    code = (
        "import os, sys; sys.stdout.buffer.write(b'\\0'.join(b'='.join(pair) for pair in sorted(os.environb.items())))"
    )
    line = shell.command_line([sys.executable, "-S", "-E", "-c", code, hostile], {"KEY": hostile, "OTHER": "x"})
    told = subprocess.run(["bash", "-c", line], capture_output=True, check=True).stdout.decode().split("\0")
    ours = {item.partition("=")[0]: item.partition("=")[2] for item in told}
    assert (ours["KEY"], ours["OTHER"]) == (hostile, "x")
    assert "STRANGER" not in ours


def test_without_an_environment_the_shell_keeps_its_own():
    assert shell.command_line(["echo", "a b"]) == "echo 'a b'"


def test_the_output_of_a_program_comes_without_its_last_newline():
    assert shell.output(["printf", "a\\nb\\n"]) == "a\nb"


@pytest.mark.parametrize("argv", [["false"], ["/nowhere/program"]], ids=["one that fails", "one that is missing"])
def test_the_output_of_a_program_that_cannot_tell_is_none(argv):
    assert shell.output(argv) is None


def test_a_program_that_fails_is_named_with_its_command():
    with pytest.raises(UserError, match=r"`sh -c 'exit 3'` ended with exit code 3.* HINT: "):
        shell.run(["sh", "-c", "exit 3"])
    with pytest.raises(UserError, match=r"/nowhere/program is not installed.* HINT: "):
        shell.run(["/nowhere/program"])
    shell.run(["true"])
