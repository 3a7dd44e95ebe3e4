"""A server that works, idles or hangs, told by its counters alone; the clock is the test's."""

from __future__ import annotations

from infra.serving.liveness import StallWatch
from infra.vllm_metrics import EngineWork


def engine(tokens: int, running: int = 0) -> EngineWork:
    return EngineWork(tokens, running)


class Looks:
    """One look at the server after another, ten seconds apart; a limit of 100 s."""

    def __init__(self) -> None:
        self.watch = StallWatch(100.0)
        self.now = 0.0

    def look(self, silent_seconds: float, **engines: EngineWork) -> str | None:
        self.now += 10.0
        return self.watch.problem(engines, silent_seconds=silent_seconds, now=self.now)

    def problems(self, count: int, *, asked: bool, **engines: EngineWork) -> list[str]:
        """Of that many looks at the same counters; `asked`: our requests are unanswered since ten seconds before."""
        found = [self.look(10.0 * number if asked else 0.0, **engines) for number in range(1, count + 1)]
        return [problem for problem in found if problem]


def test_a_server_that_moves_tokens_is_never_hung_however_long_its_answers_take() -> None:
    looks = Looks()
    assert not any(looks.look(10.0 * number, e0=engine(number, running=8)) for number in range(100))


def test_a_server_without_requests_is_never_hung() -> None:
    assert Looks().problems(100, asked=False, e0=engine(5)) == []


def test_requests_running_while_no_token_moves_is_a_hang() -> None:
    looks = Looks()
    assert looks.look(0.0, e0=engine(50, running=3)) is None
    problems = looks.problems(10, asked=True, e0=engine(50, running=3))
    assert len(problems) == 1, "not before the limit, at once after it"
    assert "no token has moved for 100 s" in problems[0]


def test_requests_that_the_engine_never_took_up_count_too() -> None:
    looks = Looks()
    assert looks.look(0.0, e0=engine(50)) is None
    assert len(looks.problems(12, asked=True, e0=engine(50))) > 0


def test_the_clock_begins_with_the_first_request_not_with_the_last_token() -> None:
    looks = Looks()
    looks.problems(100, asked=False, e0=engine(50))
    assert looks.problems(9, asked=True, e0=engine(50, running=1)) == []


def test_one_hung_engine_of_two_is_a_hang_though_requests_are_answered() -> None:
    looks = Looks()
    found = [looks.look(0.5, e0=engine(number, running=4), e1=engine(7, running=4)) for number in range(12)]
    assert next(problem for problem in found if problem).startswith("engine e1")


def test_metrics_that_stop_coming_are_a_hang_only_if_nothing_is_answered() -> None:
    looks = Looks()
    looks.look(5.0, e0=engine(50, running=3))
    assert looks.problems(30, asked=False) == []
    looks = Looks()
    looks.look(5.0, e0=engine(50, running=3))
    assert len(looks.problems(30, asked=True)) > 0


def test_a_server_without_metrics_is_not_judged() -> None:
    assert Looks().problems(100, asked=True) == []
