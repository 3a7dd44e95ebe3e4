"""Has a pinned package a known vulnerability, and do the packages of each environment fit together?

    .venv/bin/python -m infra.dependency_audit

`make check` asks. The pins (deployments/environments/*.txt) are given to `uv audit` as they stand, as a lock file
made of them, so nothing is resolved and no package index is needed: only the service that knows the advisories.
Where that cannot be reached, one line says so, and nothing is refused. What deployments/environments/accepted.txt
names passes.

Exit codes: 0 nothing is wrong as far as could be asked, 1 something is, 2 the files here are wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from infra.errors import InfrastructureError, InputError
from infra.locations import project_home

ENVIRONMENTS = {"pipeline": ".venv", "vllm": ".venv-vllm"}
ASK_SECONDS = 60.0
EXIT_PROBLEMS, EXIT_WRONG = 1, 2
PYTHON = "==3.11.*"
_PIN = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[^\s;]+)")
_NEVER = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)\s*;\s*sys_platform == 'never'")
_ABSENT = re.compile(
    r"The package `[^`]+` requires `(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)[^`]*`, but it's not installed"
)
_ADVISORY = re.compile(r"(GHSA|CVE|PYSEC|OSV|MAL)-")
_ABOUT = re.compile(r"The package `(?P<name>[^`]+)`")
# What uv says where the service did not answer; anything else that goes wrong is told as a failure.
_AWAY = re.compile(
    r"error sending request|HTTP status server error|operation timed out|Connection refused|offline mode"
)
# Its version is pinned, so what is experimental in it does not change by itself.
_AUDIT = ("audit", "--frozen", "--preview-features", "audit-command,json-output", "--output-format", "json")


class Unreachable(InfrastructureError):
    """The service that knows the advisories did not answer."""


def pins(path: Path) -> dict[str, str]:
    """Version of each package of a constraints file.

    Raises:
        InputError: a line is no pin.
    """
    found = {}
    for line in _lines(path):
        pin = _PIN.fullmatch(line)
        if pin is None:
            raise InputError(path.name, f"{line!r} is no pin such as numpy==2.3.5")
        found[re.sub(r"[-_.]+", "-", pin["name"]).lower()] = pin["version"].partition("+")[
            0
        ]  # of a local build no advisory tells
    return found


def accepted(path: Path) -> dict[str, str]:
    """Reason for each advisory, and for each package that does not fit, that is let pass.

    Raises:
        InputError: one has no reason.
    """
    found = {}
    for line in _lines(path):
        name, _, reason = line.partition(" ")
        if not reason.strip():
            raise InputError(path.name, f"{name} has no reason; write it behind the name")
        found[name] = reason.strip()
    return found


def vulnerabilities(pinned: Mapping[str, str], uv: str, service: str | None = None) -> list[dict[str, Any]]:
    """Known vulnerabilities of these versions, as `uv audit` tells them.

    Args:
        service: URL of the service; uv's own default where not given.

    Raises:
        Unreachable: the service did not answer.
        InfrastructureError: uv failed otherwise.
    """
    command = [uv, *_AUDIT, *(["--service-url", service] if service else [])]
    environment = {**os.environ, "UV_HTTP_RETRIES": "1", "UV_HTTP_TIMEOUT": "10", "UV_NO_PROGRESS": "1"}
    with tempfile.TemporaryDirectory(prefix="draftsmith-audit-") as folder:
        Path(folder, "pyproject.toml").write_text(
            f'[project]\nname = "pins"\nversion = "0"\nrequires-python = "{PYTHON}"\n'
        )
        Path(folder, "uv.lock").write_text(_lock(pinned))
        try:
            done = subprocess.run(
                command,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=ASK_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise Unreachable(f"no answer in {ASK_SECONDS:.0f} s") from None
    if done.returncode in (0, 1) and done.stdout.startswith("{"):
        said = json.loads(done.stdout)
        if said["summary"]["audited_packages"] != len(pinned):
            raise InfrastructureError(f"uv audit looked at {said['summary']} of {len(pinned)} packages")
        return list(said["vulnerabilities"])
    if _AWAY.search(done.stderr):
        raise Unreachable(done.stderr.strip().splitlines()[-1].strip().removeprefix("cause: "))
    raise InfrastructureError(f"uv audit ended with {done.returncode}: {' '.join(done.stderr.split())[-500:]}")


def misfits(interpreter: Path, uv: str, never: set[str]) -> list[str]:
    """What `uv pip check` finds in an environment.

    Args:
        never: packages that are left out on purpose.
    """
    done = subprocess.run(
        [uv, "pip", "check", "--python", str(interpreter)], capture_output=True, text=True, check=False
    )
    lines = [line.strip() for line in done.stderr.splitlines() if line.startswith("The package ")]
    if done.returncode and not lines:
        raise InfrastructureError(f"uv pip check ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    absent = {line: found["name"].lower() for line in lines if (found := _ABSENT.fullmatch(line))}
    return [line for line in lines if absent.get(line) not in never]


def audit(home: Path, uv: str, service: str | None = None) -> tuple[list[str], list[str]]:
    """What is wrong, and what is to be known besides, each a line.

    Raises:
        InputError, InfrastructureError: as the functions above, but for `Unreachable`, which is a note.
    """
    folder = home / "deployments" / "environments"
    passes, problems, notes = accepted(folder / "accepted.txt"), list[str](), list[str]()
    never = {
        found["name"].lower() for line in _lines(folder / "overrides.txt") if (found := _NEVER.fullmatch(line))
    }
    used = set[str]()
    for environment in ENVIRONMENTS.values():
        interpreter = home / environment / "bin" / "python"
        if not interpreter.exists():
            notes.append(f"{environment} is not there, so whether its packages fit together was not checked")
            continue
        for line in misfits(interpreter, uv, never):
            about = _ABOUT.match(line)
            used |= {package := about["name"] if about else ""}
            if package not in passes:
                problems.append(f"{environment}: {line}")
    try:
        for name in ENVIRONMENTS:
            pinned = pins(folder / f"{name}.txt")
            known = vulnerabilities(pinned, uv, service)
            for one in known:
                ids = {one["id"], one["display_id"], *one["aliases"]}
                used |= ids
                if not ids & set(passes):
                    problems.append(_told(one, f"{name}.txt"))
            notes.append(f"{name}.txt: {len(pinned)} pins audited, {len(known)} with a known vulnerability")
        left = sorted(name for name in set(passes) - used if _ADVISORY.match(name))
        notes += [f"accepted.txt: {name} is not found any more; take it out" for name in left]
    except Unreachable as error:
        notes.append(f"NOTHING WAS AUDITED for known vulnerabilities: their service cannot be reached ({error})")
    return problems, notes


def _told(one: Mapping[str, Any], where: str) -> str:
    package, fixed = one["dependency"], ", ".join(one["fix_versions"] or ()) or "no version"
    return (
        f"{where}: {package['name']} {package['version']} has {one['display_id']} ({one['summary']}), mended in "
        f"{fixed}: {one['link']}. Pin another version, or accept it in accepted.txt with a reason"
    )


def _lock(pinned: Mapping[str, str]) -> str:
    """The pins as a lock file of uv's."""
    packages = [
        f'[[package]]\nname = "{name}"\nversion = "{version}"\nsource = {{ registry = "pins" }}\n'
        for name, version in pinned.items()
    ]
    needed = ", ".join(f'{{ name = "{name}" }}' for name in pinned)
    project = (
        f'[[package]]\nname = "pins"\nversion = "0"\nsource = {{ virtual = "." }}\ndependencies = [{needed}]\n'
    )
    return "\n".join([f'version = 1\nrequires-python = "{PYTHON}"\n', *packages, project])


def _lines(path: Path) -> Iterator[str]:
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.strip() and not line.startswith("#"):
            yield line.strip()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m infra.dependency_audit", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--service", metavar="URL", help="of a service with OSV's API, in place of uv's default")
    options = parser.parse_args(arguments)
    uv = Path(sys.executable).with_name("uv")
    try:
        problems, notes = audit(project_home(), str(uv), options.service)
    except (InputError, InfrastructureError) as error:
        print(f"audit: {error}", file=sys.stderr)
        return EXIT_WRONG if isinstance(error, InputError) else EXIT_PROBLEMS
    for line in notes:
        print(f"audit: {line}")
    for line in problems:
        print(f"audit: {line}", file=sys.stderr)
    return EXIT_PROBLEMS if problems else 0


if __name__ == "__main__":
    sys.exit(main())
