"""The one exception that means "the user can fix this": printed as a single line, exit code 2, never a traceback."""

from __future__ import annotations


class UserError(Exception):
    """A mistake in input, files or flags. The message names the file or key and the remedy, in one line."""


class SettingError(UserError):
    """A key of a configuration class and what is wrong with it, so that a command can name its option instead."""

    def __init__(self, owner: str, key: str, problem: str):
        super().__init__(f"{owner}: '{key}' {problem}")
        self.owner, self.key, self.problem = owner, key, problem


def first_line(error: BaseException) -> str:
    """What a library's exception says, in one line: its first one, or its type where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
