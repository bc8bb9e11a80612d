"""
Schemathesis over the description, against the service as a process in front of the real Triton.

Whatever it makes up, right or wrong by the description, has an answer that the description knows, and never a 5xx; what
is wrong by the description is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests import described
from tests.clients.service import Service, serving, steered
from tests.extended import examples
from tests.triton_fixture import TestTriton
from triton_openai.api.routes import OPERATIONS as ROWS
from triton_openai.jobs import ClassificationJob, EmbeddingJob, JobType, ScoreJob

#: Who is asked: what is drawn for a model's name is hardly ever one.
_GENERATING = ("ensemble", "tensorrt_llm_bls", "tensorrt_llm", "tensorrt_llm_llmapi", "vllm_model", "text_embedding")
_DOING: Mapping[JobType, tuple[str, ...]] = {
    EmbeddingJob: ("text_embedding", "text_embedding", "ensemble"),
    ScoreJob: ("text_embedding", "text_rerank_pairs", "text_rerank_ids"),
    ClassificationJob: ("text_classification", "text_classification_ids"),
}
MODELS = {each.path: _DOING[each.jobs[0]] for each in ROWS if _DOING.keys() & each.jobs[:1]}
#: Requests that are made up for an operation; one for those that are another one under another path.
EXAMPLES = {"/v1/chat/completions": examples(50, few=20), "/v1/completions": examples(50, few=20)}
OTHERS = examples(15, few=5)
#: Of those that are wrong: ``make hostile`` sends many more.
WRONG = examples(8, few=2)

OPERATIONS = [
    (path, method, operation)
    for path, operations in described.document()["paths"].items()
    for method, operation in operations.items()
]
# Not needed by themselves: one of them, or two, is what a request is about.
_SUBSTANCE = {"prompt", "text_1", "text_2"}


@pytest.fixture(scope="module")
def service(triton: TestTriton, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """The service over both transports, with all that the models need; nothing goes wrong in it."""
    folder = tmp_path_factory.mktemp("service")
    file = folder / "settings.yaml"
    file.write_text(f"defaults: {{tokenizer: {triton.tokenizer}}}\nmodels: {{tensorrt_llm: {{adapter: trtllm}}}}")
    urls = ("--triton-url", triton.http_url, "--triton-url", triton.grpc_url)
    with serving(folder, *urls, "--config", str(file)) as running:
        yield running
        assert [] == running.complaints()


@cache
def schema() -> Any:
    """
    Return the description as Schemathesis takes it, without headers, and without keys, which nobody asks for here.

    They would be most of what it gets wrong, and those of time would end requests before they have begun.
    """
    document = copy.deepcopy(described.document())
    del document["components"]["securitySchemes"]
    for operations in document["paths"].values():
        for operation in operations.values():
            del operation["security"]
            operation["parameters"] = [each for each in operation["parameters"] if each["in"] == "path"]
    # Not at the top: each of pytest's processes collects this file, and one runs it.
    import schemathesis

    return schemathesis.openapi.from_dict(document)


def asking(path: str, method: str, *, right: bool) -> st.SearchStrategy[Any]:
    """Return requests for an operation; those that are *right* have few of the fields that may be left out."""
    operation = schema()[path][method]
    from schemathesis import GenerationMode

    mode = GenerationMode.POSITIVE if right else GenerationMode.NEGATIVE
    cases: st.SearchStrategy[Any] = operation.as_strategy(generation_mode=mode)
    models = st.sampled_from(MODELS.get(path, _GENERATING))
    if right:
        return st.builds(mended, cases, models, st.randoms(use_true_random=False), st.just(needed(path, method)))
    return st.builds(named, cases, models)


def needed(path: str, method: str) -> frozenset[str]:
    """Return the fields that an operation's body has to have."""
    body = described.document()["paths"][path][method].get("requestBody")
    if body is None:
        return frozenset()
    name = next(iter(body["content"].values()))["schema"]["$ref"].rpartition("/")[2]
    return frozenset({"model", *described.document()["components"]["schemas"][name].get("required", ())})


def named(case: Any, model: str) -> Any:
    """Return *case*, asking *model* if it asks anybody."""
    if isinstance(case.body, dict) and isinstance(case.body.get("model"), str) and case.body["model"]:
        case.body["model"] = model
    return case


def mended(case: Any, model: str, draw: Any, needed: frozenset[str]) -> Any:
    """Return *case* as a request that has a chance: a hundred optional fields have always one that is refused."""
    if isinstance(case.body, dict):
        optional = sorted(set(case.body) - needed - _SUBSTANCE)
        kept = {*needed, *_SUBSTANCE, *draw.sample(optional, min(3, len(optional)))}
        case.body = {name: value for name, value in case.body.items() if name in kept}
        for message in case.body.get("messages") or ():
            message["content"] = message.get("content") or steered(text="one two")
        # Without a name it is the default model, which there is none of here.
        case.body.setdefault("model", model)
        if case.path.endswith("/score"):
            # One of several pairs of fields has to be there, and no other.
            sides = {"queries", "documents", "items", "text_1", "text_2", "data_1", "data_2"}
            rest = {name: value for name, value in case.body.items() if name not in sides}
            case.body = {**rest, "text_1": "one", "text_2": ["one", "two"]}
    return named(case, model)


def ask(service: Service, path: str, method: str, count: int, *, right: bool) -> list[int]:
    """Ask for an operation and return the statuses of the answers."""
    statuses = []

    @settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(asking(path, method, right=right))
    def each(case: Any) -> None:
        # Its own limit is ten seconds.
        response = case.call(base_url=service.address, timeout=120)
        headers = {name.title(): values[0] for name, values in response.headers.items()}
        headers["x-request-id"] = headers["X-Request-Id"]
        described.check(method, path, response.status_code, headers, response.content)
        assert response.status_code < 500, (case.body, response.text)
        assert right or response.status_code >= 400, (case.body, response.text)
        statuses.append(response.status_code)

    each()
    return statuses


def is_alias(operation: Mapping[str, Any]) -> bool:
    """Return whether an operation is another one under another path."""
    return "The same as" in operation.get("description", "")


def parameters(path: str, method: str, operation: Mapping[str, Any], count: int) -> Any:
    """Return the arguments of a test that asks for an operation *count* times, or once if it is an alias."""
    name = f"{method} {path}"
    if is_alias(operation):
        return pytest.param(path, method, 1, marks=pytest.mark.extended, id=name)
    return pytest.param(path, method, count, id=name)


ALL = [parameters(path, method, operation, EXAMPLES.get(path, OTHERS)) for path, method, operation in OPERATIONS]
WITH_BODY = [
    parameters(path, method, operation, WRONG)
    for path, method, operation in OPERATIONS
    if "requestBody" in operation and path.startswith("/v1/")
]


@pytest.mark.sampled
@pytest.mark.parametrize("path, method, count", ALL)
def test_what_is_right(service: Service, path: str, method: str, count: int) -> None:
    """Requests that the description allows have an answer that it knows; some are refused by the models."""
    statuses = ask(service, path, method, count, right=True)

    # Where there are many, some ask for nothing that a model refuses.
    assert count < 20 or 200 in statuses


@pytest.mark.sampled
@pytest.mark.parametrize("path, method, count", WITH_BODY)
def test_what_is_wrong(service: Service, path: str, method: str, count: int) -> None:
    """Requests that the description does not allow are refused."""
    ask(service, path, method, count, right=False)
