"""Where the trials of `tune` live: a SQLite or PostgreSQL database, or a journal file, shared by any number of workers."""

from __future__ import annotations

import logging
import time
import warnings
from pathlib import Path

import optuna
from optuna.exceptions import ExperimentalWarning
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from ecospec_runtime.errors import UserError, first_line

BEAT_S = 20  # a running trial says so this often
GRACE_S = 90  # and counts as abandoned after so much silence
JOURNAL = ".journal"
MEMORY = ("sqlite://", "sqlite:///:memory:")  # of one process, gone with it
FORMS = "sqlite:///FILE, postgresql://USER@HOST/DATABASE, or a file that ends in .journal"
LOCK_WAIT_S = 60  # SQLite lets one worker write at a time
OPEN_TRIES = 6
_RACES = ("already exists", "unique", "duplicate", "locked")  # what workers that create the tables at once are told


def default_storage(out: Path) -> str:
    """SQLite in the output folder."""
    return f"sqlite:///{out.resolve() / 'study.db'}"


def shown(where: str) -> str:
    """A storage as it may be printed and logged: without its password."""
    try:
        return make_url(where).render_as_string(hide_password=True) if "://" in where else where
    except ArgumentError:
        return where


def open_storage(where: str) -> BaseStorage:
    """Open a storage, creating what is missing. Raises UserError for one that cannot be opened."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    if "://" not in where and not where.endswith(JOURNAL):
        raise UserError(f"storage {where}: not a storage; give {FORMS}")
    try:
        return open_database(where) if "://" in where else open_journal(Path(where))
    except ImportError:
        raise UserError(
            f"storage {shown(where)}: its database driver is missing; for PostgreSQL: pip install 'ecospec[postgres]'"
        ) from None
    except Exception as error:  # storage drivers raise families of their own
        raise UserError(
            f"storage {shown(where)}: cannot be opened ({first_line(error)}); check --storage, and remove the file if it is damaged"
        ) from None


def open_journal(path: Path) -> JournalStorage:
    """A file that workers append to, one at a time; on a shared file system too."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"no such folder: {path.parent}")
    return JournalStorage(JournalFileBackend(str(path)))


def open_database(url: str) -> RDBStorage:
    """A database with heartbeats. Workers that start together may trip over each other's tables: try again."""
    for scheme in ("postgresql://", "postgres://"):  # SQLAlchemy 2.0 and 2.1 would choose different drivers
        if url.startswith(scheme):
            url = "postgresql+psycopg://" + url.removeprefix(scheme)
    wait = {"connect_args": {"timeout": LOCK_WAIT_S}} if url.startswith("sqlite") else {}
    for attempt in range(OPEN_TRIES):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ExperimentalWarning)
                return RDBStorage(
                    url, engine_kwargs=wait, heartbeat_interval=None if url in MEMORY else BEAT_S, grace_period=GRACE_S
                )
        except SQLAlchemyError as error:
            if attempt + 1 == OPEN_TRIES or not any(word in str(error).lower() for word in _RACES):
                raise
            time.sleep(0.2 * (attempt + 1))
    raise AssertionError("unreachable")
