"""Secrets that this process was given, and what is told to others without them.

A secret comes from the environment, or from a Prefect block, which is put there, and is known by its variable's
name; or it is made here and learnt. Its value is replaced by that name wherever text leaves the process: in log
records, in this project's errors, in what is told of a child's log, in run files.
"""

from __future__ import annotations

import base64
import contextlib
import logging
import os
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, urlsplit

# As these end, names of variables and fields hold secrets. AWS_ACCESS_KEY_ID is no secret, like a user's name.
SECRET_NAME = re.compile(r"(TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|AUTH_STRING|_KEY)$", re.IGNORECASE)
# Shorter values are words that stand in any text.
FEWEST_CHARACTERS = 8
_OWN_PREFIX = "DRAFTSMITH_"  # names of pieces of work, not secrets
_STORES = ("AWS_",)
_OTHERS = ("PREFECT_", "WANDB_", "MLFLOW_")

_learnt: dict[str, str] = {}


def learn_secret(value: str, name: str) -> None:
    """Have a value that is in no variable of a secret's name replaced too, by `name`."""
    if len(value) >= FEWEST_CHARACTERS:
        _learnt[value] = name


def redact(text: str) -> str:
    """The text with the name in brackets in the place of each secret."""
    for value, name in _forms():
        if value in text:
            text = text.replace(value, f"({name})")
    return text


def redact_bytes(data: bytes) -> bytes:
    """The same for text of any encoding, whose bytes stay otherwise."""
    return redact(data.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")


@contextlib.contextmanager
def clean_errors() -> Iterator[None]:
    """Take secrets out of whatever is raised in the context, and of what caused it: others show an error's text."""
    try:
        yield
    except BaseException as error:
        seen: set[int] = set()
        one: BaseException | None = error
        while one is not None and id(one) not in seen:
            seen.add(id(one))
            if any(isinstance(said, str) and redact(said) != said for said in one.args):
                one.args = tuple(redact(said) if isinstance(said, str) else said for said in one.args)
            if isinstance(one, OSError) and one.strerror is not None:  # what its text is made of
                one.strerror = redact(one.strerror)
            one = one.__cause__ or one.__context__
        raise


def redact_logs() -> None:
    """Have every log record of this process made without secrets, whoever logs it. May be called again."""
    factory = logging.getLogRecordFactory()
    if not isinstance(factory, _Redacting):
        logging.setLogRecordFactory(_Redacting(factory))


def withheld(*, needs_store: bool = False) -> set[str]:
    """Variables of this process's that a child has no use for: keys of the store, of Prefect and of trackers.

    The hub's token and whatever vLLM itself may read are not among them.

    Args:
        needs_store: it reads and writes artifacts.
    """
    prefixes = _OTHERS if needs_store else (*_STORES, *_OTHERS)
    named = {name for name in os.environ if name.startswith(prefixes) and SECRET_NAME.search(name)}
    return named | {name for name in os.environ if name.startswith(_OTHERS) and _password(os.environ[name])}


class _Redacting:
    """Makes log records; formats one only where it may hold a secret."""

    def __init__(self, factory: Any) -> None:
        self._factory = factory

    def __call__(self, *arguments: Any, **named: Any) -> logging.LogRecord:
        record: logging.LogRecord = self._factory(*arguments, **named)
        try:
            said = record.getMessage()
        except Exception:  # wrong arguments: the handler says so, without them
            return record
        if (clean := redact(said)) != said:
            record.msg, record.args = clean, ()
        if record.exc_info and record.exc_info[1] is not None:
            trace = logging.Formatter().formatException(record.exc_info)
            if (clean := redact(trace)) != trace:
                record.exc_text = clean  # which formatters then take
        return record


def _forms() -> list[tuple[str, str]]:
    """Every spelling of every secret and its name, longest first: one may be a part of another."""
    found = dict(_forms_of_environment())
    for value, name in _learnt.items():
        found.setdefault(value, name)
    return sorted(found.items(), key=lambda form: -len(form[0]))


def _forms_of_environment() -> Iterator[tuple[str, str]]:
    for name, value in os.environ.items():
        if SECRET_NAME.search(name) and not name.startswith(_OWN_PREFIX):
            for form in (value, quote(value, safe=""), base64.b64encode(value.encode(errors="replace")).decode()):
                if len(value) >= FEWEST_CHARACTERS:
                    yield form, name
            if name.endswith("AUTH_STRING") and len(password := value.partition(":")[2]) >= FEWEST_CHARACTERS:
                yield password, name
        elif len(password := _password(value)) >= FEWEST_CHARACTERS:
            yield password, name


def _password(value: str) -> str:
    """Of a URL that holds one; else empty."""
    if "://" not in value or "@" not in value:
        return ""
    try:
        return urlsplit(value).password or ""
    except ValueError:
        return ""
