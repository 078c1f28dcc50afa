"""The one exception that means "the user can fix this": printed as a single line, exit code 2, never a traceback."""

from __future__ import annotations


class UserError(Exception):
    """A mistake in input, files or flags. The message names the file or key and the remedy, in one line."""
