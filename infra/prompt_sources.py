"""Reading of prompts: bytes of a package or file, and one conversation out of one line."""

from __future__ import annotations

import gzip
import importlib.metadata
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from infra import storage
from infra.errors import InputError
from infra.fingerprint import canonical_json, sha256_hex
from infra.locations import package_files, project_home

Messages = list[dict[str, Any]]

# Raised when the text built from HumanEval's data changes; part of the data set's revision.
HUMAN_EVAL_RECIPE = 1
HUMAN_EVAL_TEXT = "Complete the following Python function.\n\n```python\n{code}\n```"

SYSTEM_ROLES = frozenset({"system", "developer"})
_ROLES = SYSTEM_ROLES | {"user", "assistant", "tool"}
_MESSAGE_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id")


class UnusableRow(Exception):
    """A row cannot be used; the text is the reason it is counted under in the manifest."""


# --- bytes ---


def read_package(package: str, where: str) -> tuple[bytes, str]:
    """Data of a package that carries prompts, and its revision.

    Args:
        package: `human-eval`, the only one known so far.
        where: name of the config field, for errors.

    Raises:
        InputError: the package is not installed, or not whole.
    """
    try:
        files = package_files(package, "HumanEval.jsonl.gz")
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError as error:
        raise InputError(where, f"the package {package} is not installed here; install it with pip") from error
    if not files:
        raise InputError(where, f"{package} {version} carries no HumanEval.jsonl.gz; reinstall it")
    raw = files[0].read_bytes()
    return _unpacked(raw, where), f"{package}=={version} sha256:{sha256_hex(raw)} recipe:{HUMAN_EVAL_RECIPE}"


def read_file(file: str, where: str, config_folder: Path | None) -> tuple[bytes, str]:
    """Data of a JSONL file, and the sha256 of the file as its revision.

    Args:
        file: path or s3:// URL; gzip is recognized by its first bytes.
        where: name of the config field, for errors.
        config_folder: where a relative path is looked for first; then in the project's home.

    Raises:
        InputError: the file is not there or cannot be read.
        StorageError: the object store did not answer.
    """
    candidates = [file]
    if "://" not in file:
        folders = dict.fromkeys([*([config_folder] if config_folder else []), project_home()])
        candidates = list(dict.fromkeys(str(folder / Path(file).expanduser()) for folder in folders))
    for candidate in candidates:
        try:
            raw = storage.get(candidate)
        except FileNotFoundError:
            continue
        except InputError as error:
            raise InputError(where, error.problem) from error
        except (PermissionError, IsADirectoryError, NotADirectoryError) as error:
            raise InputError(where, f"{candidate}: {error.strerror}; name a JSONL file") from error
        return _unpacked(raw, where), f"sha256:{sha256_hex(raw)}"
    raise InputError(where, f"{file} is not there (looked for {' and '.join(candidates)})")


def lines(data: bytes) -> Iterator[bytes]:
    """The lines that hold anything. Cut at \\n only: U+2028 and its like may stand inside a JSON text."""
    for line in data.removeprefix(b"\xef\xbb\xbf").split(b"\n"):
        if line.strip():
            yield line


def _unpacked(raw: bytes, where: str) -> bytes:
    if raw[:2] != b"\x1f\x8b":
        return raw
    try:
        return gzip.decompress(raw)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(where, f"is a damaged gzip file ({error})") from error


# --- one conversation ---


def parse_human_eval(line: bytes) -> tuple[Messages, str | None]:
    """A HumanEval task as a request to complete the function; domain `code`. Raises UnusableRow."""
    code = _decode(line).get("prompt")
    if not isinstance(code, str):
        raise UnusableRow("no_prompt")
    return [{"role": "user", "content": HUMAN_EVAL_TEXT.format(code=code.strip("\n "))}], "code"


def parse_row(line: bytes) -> tuple[Messages, str | None]:
    """Messages and domain (if it has one) of a JSONL line with `messages` or `prompt`.

    Answers at the end of a conversation are left off: they are the verifier's to give.

    Raises:
        UnusableRow: with the reason: broken_utf8, broken_json, wrong_type, no_prompt, empty or nul.
    """
    entry = _decode(line)
    messages, prompt, domain = entry.get("messages"), entry.get("prompt"), entry.get("domain")
    if messages is None and prompt is None:
        raise UnusableRow("no_prompt")
    checked = _checked([{"role": "user", "content": prompt}] if messages is None else messages)
    if domain is not None and not isinstance(domain, str):
        raise UnusableRow("wrong_type")
    _check_text([checked, domain])
    return checked, (domain or "").strip() or None


PARSERS: dict[str | None, Callable[[bytes], tuple[Messages, str | None]]] = {
    None: parse_row,
    "human-eval": parse_human_eval,
}


def _decode(line: bytes) -> dict[str, Any]:
    try:
        entry = json.loads(line.decode())
    except UnicodeDecodeError:
        raise UnusableRow("broken_utf8") from None
    except (ValueError, RecursionError):
        raise UnusableRow("broken_json") from None
    if not isinstance(entry, dict):
        raise UnusableRow("wrong_type")
    return entry


def _checked(messages: Any) -> Messages:
    if not isinstance(messages, list):
        raise UnusableRow("wrong_type")
    checked = [_checked_message(message) for message in messages]
    while checked and checked[-1]["role"] == "assistant":
        checked.pop()
    if not checked:
        raise UnusableRow("empty")
    if checked[-1]["role"] in SYSTEM_ROLES:
        raise UnusableRow("no_prompt")
    return checked


def _checked_message(message: Any) -> dict[str, Any]:
    if not isinstance(message, dict) or message.get("role") not in _ROLES:
        raise UnusableRow("wrong_type")
    content = message.get("content")
    if message["role"] == "assistant" and content in (None, ""):
        # A call of a tool needs no text; an answer without either is dropped with its row below.
        if not message.get("tool_calls"):
            raise UnusableRow("empty")
    elif not isinstance(content, str):
        raise UnusableRow("wrong_type")
    elif not content.strip() and message["role"] != "tool":
        raise UnusableRow("empty")
    return {key: message[key] for key in _MESSAGE_KEYS if message.get(key) is not None}


def _check_text(value: Any) -> None:
    """JSON may hold what UTF-8 cannot (half a surrogate pair), NaN, or a NUL that breaks readers downstream."""
    try:
        canonical_json(value)
    except UnicodeEncodeError:
        raise UnusableRow("broken_utf8") from None
    except ValueError:
        raise UnusableRow("broken_json") from None
    if _holds_nul(value):
        raise UnusableRow("nul")


def _holds_nul(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_holds_nul(item) for pair in value.items() for item in pair)
    if isinstance(value, list):
        return any(_holds_nul(item) for item in value)
    return isinstance(value, str) and "\0" in value
