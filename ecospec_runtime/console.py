"""What both command lines share: one handler for users' mistakes, JSON for machines, rich output on terminals only."""

from __future__ import annotations

import errno
import functools
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console

from ecospec_runtime import __version__
from ecospec_runtime.errors import SettingError, UserError

F = TypeVar("F", bound=Callable[..., Any])

PLAIN_WIDTH = 176
USER_MISTAKE = 2
INTERRUPTED = 130
MOST_THREADS = 1024  # more than ever help; OpenMP crashes on absurd numbers
_DISK = {
    errno.EACCES: "no permission; choose another place or change its permissions",
    errno.EPERM: "no permission; choose another place or change its permissions",
    errno.EROFS: "read-only file system; choose another place",
    errno.ENOSPC: "no space left on the device; free some or choose another place",
    errno.EISDIR: "is a folder; give a file",
    errno.ENOTDIR: "a part of this path is a file, not a folder; choose another place",
    errno.EEXIST: "exists and is not a folder; choose another place",
    errno.ENOENT: "no such file or folder; check the path",
}


def show_version(asked: bool) -> None:
    """Print the version and leave, if asked for."""
    if asked:
        print(f"ecospec {__version__}")
        raise typer.Exit


def common_options(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """What may stand before a command's name."""


def new_app(name: str, text: str) -> typer.Typer:
    """A Typer application with `--version` whose usage errors are plain text with exit code 2."""
    app = typer.Typer(
        name=name, help=text, no_args_is_help=True, add_completion=False, rich_markup_mode=None,
        pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]},
    )  # fmt: skip
    app.callback()(common_options)
    return app


@contextmanager
def naming_options(owner: str, options: Mapping[str, str]) -> Iterator[None]:
    """Let a mistake in a setting of the class `owner` name the command's option: `options` has it by key."""
    try:
        yield
    except SettingError as error:
        if error.owner != owner or error.key not in options:
            raise
        raise UserError(f"{options[error.key]} {error.problem}") from None


def option_name(key: str) -> str:
    """`--max-new-tokens` for max_new_tokens."""
    return "--" + key.replace("_", "-")


def handled(function: F) -> F:
    """Turn a user's mistake into one line on stderr and exit code 2, Ctrl-C into 130; anything else is a bug and shows."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        quiet_libraries()
        try:
            return function(*args, **kwargs)
        except UserError as error:
            fail(str(error))
        except KeyboardInterrupt:
            fail("interrupted", INTERRUPTED)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None
        except OSError as error:
            if error.errno not in _DISK or error.filename is None:
                raise
            fail(f"{error.filename}: {_DISK[error.errno]}")
        except ModuleNotFoundError as error:
            if error.name is None or error.name.startswith("ecospec"):
                raise
            fail(f"Python package '{error.name}' is missing; install it with: pip install 'ecospec[train]'")

    return wrapper  # type: ignore[return-value]


def quiet_libraries() -> None:
    """Off a terminal, keep the progress bars of libraries out of the output."""
    if sys.stderr.isatty():
        return
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if "transformers" in sys.modules:  # it reads the variable at import only
        sys.modules["transformers"].utils.logging.disable_progress_bar()


def fail(message: str, code: int = USER_MISTAKE) -> None:
    """Print `message` as one line on stderr and leave with `code`."""
    print(f"error: {' '.join(message.split())}", file=sys.stderr, flush=True)
    raise typer.Exit(code) from None


def leads() -> bool:
    """Whether this process is the one that prints and writes: the first of a torchrun, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def note(message: str) -> None:
    """One line on stderr, beside the output proper; from the first process only."""
    if leads():
        print(message, file=sys.stderr, flush=True)


def console() -> Console:
    """A rich console on stdout; without a terminal it writes plain text, `PLAIN_WIDTH` columns wide."""
    return Console() if sys.stdout.isatty() else Console(width=PLAIN_WIDTH, no_color=True, highlight=False)


def existing_part(path: Path) -> Path:
    """The path itself, or the nearest folder above it that exists; a link to nothing exists."""
    whole = path.absolute()
    return next(part for part in (whole, *whole.parents) if os.path.lexists(part))


def check_folder(folder: Path) -> None:
    """Refuse a folder that could not be made or written to; makes nothing. Raises OSError or UserError."""
    place = existing_part(folder)
    if not place.is_dir():
        raise UserError(f"{folder}: not a folder to write to ({place} is a file); choose another place")
    if not os.access(place, os.W_OK | os.X_OK):
        raise UserError(f"{place}: no permission to write; choose another place or change its permissions")


def check_writable(path: Path | None) -> None:
    """Refuse a result file that cannot be written before hours of work, not after; makes nothing. Raises OSError or UserError."""
    if path is None or not leads():
        return
    if path.is_dir():
        raise UserError(f"{path}: is a folder; give a file")
    if path.exists():
        with path.open("a", encoding="utf-8"):
            pass
    else:
        check_folder(path.parent)


def write_json(path: Path | None, value: Any) -> None:
    """Write `value` as JSON, through a rename so that a reader never sees half a file. No path or not first: no file."""
    if path is None or not leads():
        return
    text = json.dumps(value, indent=2, allow_nan=False) + "\n"
    if path.exists() and not path.is_file():  # a device or pipe, such as /dev/stdout, must stay one
        path.write_text(text, encoding="utf-8")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")  # workers may write the same result
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)
