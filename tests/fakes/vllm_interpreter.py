"""Stands where vLLM's interpreter would: tells its version, or serves the fake OpenAI server as vLLM does.

Each start appends a line to `starts` beside it: the sequence limit and the GPUs that it was given.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.fakes.openai_server import Reply

SCRIPT = """#!{python}
import asyncio, os, sys
if "-c" in sys.argv:
    print("0.32.0")
    sys.exit()
sys.path.insert(0, {checkout!r})
from tests.fakes.openai_server import FakeOpenAIServer, Reply
options = dict(zip(sys.argv[3:], sys.argv[4:]))
with open(os.path.join(os.path.dirname(__file__), "starts"), "a") as starts:
    starts.write(" ".join([options["--max-model-len"], os.environ.get("CUDA_VISIBLE_DEVICES", "")]) + "\\n")

async def main():
    served = dict(model=options["--served-model-name"], api_key=os.environ["VLLM_API_KEY"])
    async with FakeOpenAIServer(lambda _p, _n: {reply}, port=int(options["--port"]), **served):
        await asyncio.Event().wait()

asyncio.run(main())
"""


def fake_interpreter(folder: Path, latency_seconds: float) -> Path:
    """Writes one whose every answer takes so long, as `folder/python`."""
    path = folder / "python"
    reply = f"{Reply.__name__}(latency_seconds={latency_seconds})"
    path.write_text(SCRIPT.format(python=sys.executable, checkout=str(Path(__file__).parents[2]), reply=reply))
    path.chmod(0o755)
    return path
