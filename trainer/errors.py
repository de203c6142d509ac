"""Errors that are the user's to mend."""

import difflib
from collections.abc import Iterable

from trainer import contract


class UserError(ValueError):
    """A request that cannot be served: printed as one line with its hint, exit code 2, never retried."""

    exit_code = contract.EXIT_BAD_REQUEST

    def __init__(self, message: str, hint: str) -> None:
        self.message, self.hint = message, hint
        super().__init__(f"{message} HINT: {hint}")


class Unavailable(UserError):
    """Something outside the request is missing and may come back: one line too, but worth another attempt."""

    exit_code = contract.EXIT_FAILED


def unknown_name(kind: str, given: str, valid: Iterable[str], flag: str) -> UserError:
    """The error for a name that is not in a table: it lists the table and guesses what was meant."""
    names = sorted(valid)
    close = difflib.get_close_matches(given, names, n=1)
    hint = f"{flag} {close[0]}" if close else f"choose one of them with {flag}"
    return UserError(f"Unknown {kind} {given!r}; valid are: {', '.join(names)}.", hint)
