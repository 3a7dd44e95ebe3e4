"""The Prefect server of `draftsmith run` answers, its pages ask that server, and it ends with the run."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from flows.embedded_prefect import CLIENT_AUTH, PASSWORD_FILE, SERVER_AUTH, prefect_api
from infra.locations import project_home
from infra.processes import living, process_token

pytestmark = pytest.mark.e2e


def test_the_embedded_server_serves_its_ui_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PREFECT_API_URL", SERVER_AUTH, CLIENT_AUTH):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    meanwhile: list[str] = []
    with prefect_api(meanwhile=lambda: meanwhile.append(os.environ["PREFECT_API_URL"])) as url:
        assert [os.environ["PREFECT_API_URL"]] == [url] == meanwhile
        with urllib.request.urlopen(f"{url.removesuffix('/api')}/ui-settings", timeout=30) as answer:
            settings = json.load(answer)
        assert settings["api_url"] == url, "the pages would ask another server"
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{url}/admin/version", timeout=30)
        key = base64.b64encode(os.environ[CLIENT_AUTH].encode()).decode()
        asked = urllib.request.Request(f"{url}/admin/version", headers={"Authorization": f"Basic {key}"})
        with urllib.request.urlopen(asked, timeout=30) as answer:
            assert answer.status == 200
        password = tmp_path / PASSWORD_FILE
        assert (password.read_text(), password.stat().st_mode & 0o077) == (os.environ[CLIENT_AUTH], 0)
    assert not {"PREFECT_API_URL", CLIENT_AUTH} & set(os.environ)
    assert living(process_token("prefect", str(tmp_path))) == []


def test_a_server_that_is_named_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:1/api")
    with prefect_api() as url:
        assert url == "http://127.0.0.1:1/api"


def test_two_runs_may_start_on_one_new_database_at_the_same_time(tmp_path: Path) -> None:
    program = "from flows.embedded_prefect import prefect_api\nwith prefect_api():\n    pass"
    environment = {**os.environ, "PREFECT_HOME": str(tmp_path)}
    environment.pop("PREFECT_API_URL", None)
    started = [
        subprocess.Popen([sys.executable, "-c", program], cwd=project_home(), env=environment) for _ in range(2)
    ]
    assert [process.wait(300) for process in started] == [0, 0]
