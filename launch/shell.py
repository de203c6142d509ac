"""The one place that turns argument lists into text, and that runs other programs."""

import shlex
import subprocess
from collections.abc import Mapping, Sequence

from trainer.errors import UserError


def quote(argv: Sequence[str]) -> str:
    """The words as one shell line that yields exactly these words."""
    return " ".join(shlex.quote(word) for word in argv)


def command_line(argv: Sequence[str], env: Mapping[str, str] | None = None) -> str:
    """A shell line that runs `argv` in an environment of just `env`, or in the shell's own if it is None."""
    if env is None:
        return quote(argv)
    return quote(["env", "-i", *(f"{key}={value}" for key, value in env.items()), *argv])


def output(argv: Sequence[str]) -> str | None:
    """What a program prints, without the last newline; None if it is missing or fails."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def run(argv: Sequence[str], env: Mapping[str, str] | None = None) -> None:
    """Run a program with its output shown. Raises UserError with the command if it fails."""
    if failed := code(argv, env):
        raise UserError(f"`{quote(argv)}` ended with exit code {failed}.", "its output above says why")


def code(argv: Sequence[str], env: Mapping[str, str] | None = None) -> int:
    """Run a program with its output shown and return its exit code. Raises UserError if there is no such program."""
    try:
        return subprocess.run(argv, env=env, check=False).returncode
    except FileNotFoundError:
        raise UserError(f"The program {argv[0]} is not installed.", f"install {argv[0]}") from None
