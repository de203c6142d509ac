"""Errors that are the user's to mend."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A request that cannot be served: printed as one line with its hint, exit code 2, never retried."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(f"{message} HINT: {hint}")


def unknown_name(kind: str, given: str, valid: Iterable[str], flag: str) -> UserError:
    """The error for a name that is not in a table: it lists the table and guesses what was meant."""
    names = sorted(valid)
    close = difflib.get_close_matches(given, names, n=1)
    hint = f"{flag} {close[0]}" if close else f"choose one of them with {flag}"
    return UserError(f"Unknown {kind} {given!r}; valid are: {', '.join(names)}.", hint)
