"""The Prefect server of `draftsmith run` answers, its pages ask that server, and it ends with the run."""

from __future__ import annotations

import json
import os
import urllib.request
from pathlib import Path

import pytest

from flows.embedded_prefect import prefect_api
from infra.processes import living, process_token

pytestmark = pytest.mark.e2e


def test_the_embedded_server_serves_its_ui_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    with prefect_api() as url:
        assert os.environ["PREFECT_API_URL"] == url
        with urllib.request.urlopen(f"{url.removesuffix('/api')}/ui-settings", timeout=30) as answer:
            settings = json.load(answer)
        assert settings["api_url"] == url, "the pages would ask another server"
    assert "PREFECT_API_URL" not in os.environ
    assert living(process_token("prefect", str(tmp_path))) == []


def test_a_server_that_is_named_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:1/api")
    with prefect_api() as url:
        assert url == "http://127.0.0.1:1/api"
