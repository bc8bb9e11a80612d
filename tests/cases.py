"""Runs a test on a table of cases as one test, which costs a fraction of what a parametrized one does."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

Test = Callable[..., Any]


def every_case(names: str, cases: Iterable[Any], *, ids: Callable[[Any], str] = repr) -> Callable[[Test], Test]:
    """
    Run the decorated test on every one of *cases*, and fail with all of those that fail.

    It is used as `pytest.mark.parametrize` is: *names* are the arguments, separated by commas, and *ids* names a case.
    Fixtures are set up once for all cases, so it does not suit a test that changes them.
    """
    arguments = [name.strip() for name in names.split(",")]
    table = list(cases)
    if not table:
        raise ValueError("There are no cases.")

    def bound(case: Any) -> dict[str, Any]:
        return dict(zip(arguments, case if len(arguments) > 1 else (case,), strict=True))

    def decorate(test: Test) -> Test:
        signature = inspect.signature(test)
        rest = [parameter for name, parameter in signature.parameters.items() if name not in arguments]

        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            with _failures(len(table)) as failures:
                for case in table:
                    with _collected(failures, ids, case):
                        test(**fixtures, **bound(case))

        @functools.wraps(test)
        async def run_async(**fixtures: Any) -> None:
            with _failures(len(table)) as failures:
                for case in table:
                    with _collected(failures, ids, case):
                        await test(**fixtures, **bound(case))

        chosen: Any = run_async if inspect.iscoroutinefunction(test) else run
        chosen.__signature__ = signature.replace(parameters=rest)
        return chosen  # type: ignore[no-any-return]

    return decorate


@contextlib.contextmanager
def _failures(count: int) -> Iterator[list[Exception]]:
    failures: list[Exception] = []
    yield failures
    if failures:
        # A group shows only the first of many exceptions in full.
        names = "\n".join(failure.__notes__[-1] for failure in failures)
        raise ExceptionGroup(f"{len(failures)} of {count} cases failed\n{names}\n", failures)


@contextlib.contextmanager
def _collected(failures: list[Exception], ids: Callable[[Any], str], case: Any) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # noqa: BLE001 - they are raised together in the end
        failures.append(error)
    except pytest.fail.Exception as error:
        # No Exception, so no group takes it.
        failures.append(AssertionError(str(error)).with_traceback(error.__traceback__))
    else:
        return
    failures[-1].add_note(f"case: {ids(case)[:200]}")
