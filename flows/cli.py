"""`draftsmith run · plan · status · verify · export-states · serve-command · gc · automations`.

Exit codes: 0 done, 1 the run failed, 2 the input is wrong (one clear line, no traceback).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from infra.errors import DraftsmithError, InputError
from infra.redaction import redact_logs
from infra.schemas import STAGES

if TYPE_CHECKING:
    from flows.config import PipelineConfig

EXIT_DONE, EXIT_FAILED, EXIT_WRONG_INPUT = 0, 1, 2
EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_READER_LEFT = 128 + signal.SIGPIPE
UNWIND_SECONDS = 30.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the `draftsmith` command; returns its exit code."""
    options = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = options.command
    _log_to_stderr()
    _end_on_signals()
    try:
        code = command(options)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        if not _reader_left():
            raise
        return EXIT_READER_LEFT
    except InputError as error:
        print(f"draftsmith: {error}", file=sys.stderr)
        return EXIT_WRONG_INPUT
    except DraftsmithError as error:
        print(f"draftsmith: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        _leave()


def _config(options: argparse.Namespace) -> PipelineConfig:
    """The config, with the store's credentials in place and its store within reach."""
    from flows.config import load_config
    from infra.storage import check_answer

    config = load_config(options.config, options.set)
    if config.credentials_block is not None:
        if "PREFECT_API_URL" not in os.environ:
            raise InputError(
                "credentials_block", "a block lives in a Prefect server that stays; name it in PREFECT_API_URL"
            )
        from flows.credentials import use_credentials

        asyncio.run(use_credentials(config))
    check_answer(config.root)  # a mistyped address is told in seconds, where later ones are waited for
    return config


def _run(options: argparse.Namespace) -> int:
    from flows.early_checks import refuse_unfit
    from flows.embedded_prefect import prefect_api
    from flows.resolve import resolve
    from infra.storage import check_root

    config = _config(options)
    refuse_unfit(config, resolve(config), options.until)  # wrong input ends here, before anything is started
    check_root(config.root)
    with prefect_api(meanwhile=_import_flows):
        from prefect.exceptions import TerminationSignal

        from flows.pipeline import speculator_pipeline

        _leave_logs_to_prefect()
        try:
            outcome = asyncio.run(speculator_pipeline(config, options.until))
        except TerminationSignal:  # within a flow, Prefect's handler of SIGTERM replaces ours
            raise KeyboardInterrupt from None
        finally:
            _send_last_logs()
    if options.json:
        print(json.dumps(outcome))
        return EXIT_DONE
    for stage in outcome["stages"]:
        how = "reused" if stage["reused"] else "made"
        print(
            f"{stage['stage']:14} {stage['key']}  {how:6}  {stage['shards']} shards, {stage['totals']['rows']} rows"
        )
    if outcome["promotion"] is not None:
        print(outcome["promotion"])
    print(_headline(outcome) if "report" in outcome else f"run_report={outcome['run_report']}")
    return EXIT_DONE


def _import_flows() -> None:
    """Takes seconds, as the start of Prefect's server does."""
    import flows.pipeline  # noqa: F401


def _send_last_logs() -> None:
    """Hand what is still queued to the Prefect server, which may end with this run."""
    from prefect.logging.handlers import APILogHandler

    APILogHandler().flush()


def _headline(outcome: dict[str, Any]) -> str:
    def shown(value: float | None) -> str:
        return "none" if value is None else f"{value:.3f}"

    acceptance, speedup = shown(outcome["acceptance_length"]), shown(outcome["speedup_c1"])
    return f"acceptance_length={acceptance} speedup_c1={speedup} report={outcome['report']}"


def _plan(options: argparse.Namespace) -> int:
    from flows.early_checks import refuse_unfit
    from flows.forecast import estimate_said, forecast, total_said
    from flows.resolve import resolve

    config = _config(options)
    refuse_unfit(config, resolve(config))
    stages = forecast(config)
    if options.json:
        print(json.dumps({"stages": stages}))
        return EXIT_DONE
    currency = config.nodes.currency
    for stage in stages:
        said = f"{stage['detail']}{estimate_said(stage['estimate'], currency)}"
        print(f"{stage['stage']:14} {stage['key']}  {stage['will']:7} {said}")
    print(f"{'total':14} {total_said((stage['estimate'] for stage in stages), currency)}")
    return EXIT_DONE


def _status(options: argparse.Namespace) -> int:
    from flows.forecast import status

    stages = status(_config(options))
    if options.json:
        print(json.dumps({"stages": stages}))
        return EXIT_DONE
    print(f"{'stage':14} {'key':16}  {'done':>6} {'missing':>8} {'failed rows':>12}  state")
    for row in stages:
        counts = f"{row['done']:6} {row['missing']:8} {row['failed_rows']:12}"
        print(f"{row['stage']:14} {row['key']:16}  {counts}  {row['state']}")
    return EXIT_DONE


def _verify(options: argparse.Namespace) -> int:
    from infra.verify import verify

    findings = list(verify(options.uri))
    if not findings:
        raise InputError(options.uri, "holds no stage; give an artifact root, or one stage's folder below it")
    extra = [finding for finding in findings if finding.extra]
    problems = [finding for finding in findings if finding.problem and not finding.extra]
    checked = len(findings) - len(extra)
    if options.json:
        wrong, besides = (
            [{"where": one.where, "problem": one.problem} for one in some] for some in (problems, extra)
        )
        print(json.dumps({"checked": checked, "problems": wrong, "extra": besides}))
    else:
        for one in extra:
            print(f"EXTRA {one.where}: {one.problem}")
        for one in problems:
            print(f"PROBLEM {one.where}: {one.problem}")
        print(f"checked={checked} problems={len(problems)} extra={len(extra)}")
    return EXIT_FAILED if problems else EXIT_DONE


def _export_states(options: argparse.Namespace) -> int:
    from flows.interchange import export

    export(_config(options), options)
    return EXIT_DONE


def _serve_command(options: argparse.Namespace) -> int:
    from infra.evaluation.config import WRONG_SAMPLER, sampler_is_wrong
    from infra.promotion.serve_command import serve_command

    command = serve_command(options.uri, options.verifier)
    if sampler_is_wrong():
        print(f'{WRONG_SAMPLER}, and this machine has no GPU: ask with "temperature": 0 only', file=sys.stderr)
    said = {"draft": command.draft, "environment": command.environment, "arguments": command.arguments}
    print(json.dumps(said) if options.json else command)
    return EXIT_DONE


def _gc(options: argparse.Namespace) -> int:
    from flows.gc import collect_garbage

    collect_garbage(options)
    return EXIT_DONE


def _automations(options: argparse.Namespace) -> int:
    from flows.automations import install

    installed = install(notify=options.notify)
    if options.json:
        print(json.dumps({"automations": installed}))
        return EXIT_DONE
    for automation in installed:
        print(f"{automation['name']:28} {automation['done']}")
    return EXIT_DONE


def _uri(given: str) -> str:
    if given.endswith((".yaml", ".yml")):
        raise argparse.ArgumentTypeError(f"{given} is a config; give the artifact root that it names (`root:`)")
    return given


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="draftsmith", description="Train EAGLE-3 draft models for models served by vLLM."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, command: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(command=command)
        sub.add_argument("--json", action="store_true", help="print JSON")
        return sub

    run = add("run", _run, "run the pipeline here; the same command continues an interrupted run")
    known = f"the last stage to make: {', '.join(STAGES)}"
    run.add_argument("--until", choices=STAGES, default=STAGES[-1], metavar="STAGE", help=known)
    plan = add("plan", _plan, "say what a run would do, reuse and cost; starts nothing")
    status = add("status", _status, "show each stage's shards: done, missing, failed rows")
    export = add(
        "export-states", _export_states, "write the hidden states as a data folder that speculators trains on"
    )
    for sub in (run, plan, status, export):
        sub.add_argument("config", help="YAML file, such as deployments/smoke.yaml")
        sub.add_argument(
            "--set",
            action="append",
            default=[],
            metavar="A.B=VALUE",
            help="override one field; may be given several times",
        )
    export.add_argument("folder", metavar="FOLDER", help="a new folder on this machine")
    automations = add(
        "automations", _automations, "install what puts a deployment's run back after its node has died"
    )
    automations.add_argument(
        "--notify",
        metavar="TYPE/NAME",
        help="a notification block of the Prefect server, such as slack-webhook/team, to be told of failed runs, "
        "runs that crash twice, and promotions",
    )
    verify = add("verify", _verify, "reread every shard and compare it with its record")
    verify.add_argument("uri", type=_uri, help="an artifact root, or one stage's folder below it")
    serve = add("serve-command", _serve_command, "print the vLLM command that serves the promoted speculator")
    serve.add_argument("uri", type=_uri, help="an artifact root, or any draft's export: ROOT/drafts/KEY/export")
    serve.add_argument("--verifier", metavar="NAME", help="which one, where a root has speculators of several")
    gc = add("gc", _gc, "list what of a root nobody needs any more, and remove it when told so")
    gc.add_argument("uri", type=_uri, metavar="root", help="an artifact root")
    gc.add_argument("--delete", action="store_true", help="remove what is listed; without it nothing changes")
    gc.add_argument("--complete-stages", action="store_true", help="also complete stages that no run refers to")
    return parser


def _log_to_stderr() -> None:
    redact_logs()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S"))
    logger = logging.getLogger("draftsmith")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False  # Prefect, where it is imported, prints what comes to the root logger


def _leave_logs_to_prefect() -> None:
    """From here on Prefect prints our lines with its own, and sends them to its UI."""
    logger = logging.getLogger("draftsmith")
    logger.handlers.clear()
    logger.propagate = True


def _end_on_signals() -> None:
    """TERM and INT unwind what runs, once; a second one, or an unwinding that takes too long, ends at once."""
    asked = False

    def interrupt(_number: int, _frame: object) -> None:
        nonlocal asked
        if asked:
            _leave()
        asked = True
        limit = threading.Timer(UNWIND_SECONDS, _leave)
        limit.daemon = True
        limit.start()
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGINT, interrupt)


def _reader_left() -> bool:
    """Whether nobody reads what we print any more, as after `| head`; nothing more is then written there.

    The pipe itself is asked: unbuffered (PYTHONUNBUFFERED), nothing is left whose writing would tell.
    """
    pipe = select.poll()
    pipe.register(sys.stdout.fileno(), 0)  # that its other end is closed is told unasked
    if not pipe.poll(0):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def _leave() -> NoReturn:
    """End this process now. Not through the interpreter's own end, which waits for threads and coroutines that an
    interrupt has left half-way, some of them for ever; the guards end every child that still runs."""
    os.write(2, b"draftsmith: interrupted; the same command continues where this run stopped\n")
    os._exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
