"""Triton's and the backends' error texts, as they really come, and what a client sees of them."""

# ruff: noqa: E501 - a row of a table stays on its line

from __future__ import annotations

import re

import structlog
from structlog.testing import capture_logs

from tests.cases import every_case
from triton_openai.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    LoraNotLoaded,
    ModelCrashed,
    ModelNotFound,
    NotImplementedUpstream,
    Overloaded,
    PromptRefused,
    ProxyFailed,
    ProxyTimeout,
    RequestRefused,
    ServiceError,
    UpstreamError,
    UpstreamTimeout,
    UpstreamUnavailable,
)
from triton_openai.telemetry.logging import warn
from triton_openai.triton.status import (
    classify,
    cut_off_error,
    foreign_error,
    no_answer_error,
    public_reason,
    unreachable_error,
)

TRACEBACK = (
    "Traceback (most recent call last):\n"
    '  File "/opt/tritonserver/models/tensorrt_llm_bls/1/model.py", line 108, in execute\n'
    "    for res in self.decoder.decode(req):\n"
    "{error}\n"
)
JSON_TRACEBACK = (
    "Failed to process the request(s) for model 'vllm_model_0_0', message: JSONDecodeError: Expecting value: line 1"
    " column 1 (char 0)\n\nAt:\n  /usr/lib/python3.12/json/decoder.py(356): raw_decode\n"
    "  /opt/tritonserver/backends/vllm/model.py(412): execute\n"
)
TOO_LONG = (
    "Prompt length (2100) exceeds maximum input length (2048). Set log level to info and check TRTGptModel logs for how"
    " maximum input length is set"
)
STREAM = "Error generating stream: "
LORA_GONE = "LoRA task 7 not found in cache. Please send LoRA weights with request"

# text -> the line in the log
LINES = [
    (TRACEBACK.format(error=f"c_python_backend_utils.TritonModelException: {TOO_LONG}"), f"c_python_backend_utils.TritonModelException: {TOO_LONG}"),
    (f"in ensemble 'e', {TRACEBACK.format(error=f'ValueError: {TOO_LONG}')}", f"in ensemble 'e', ValueError: {TOO_LONG}"),
    (f"{TRACEBACK.format(error='KeyError: 1')}\nDuring handling of the above exception, another exception occurred:\n\n{TRACEBACK.format(error='ValueError: b')}", "ValueError: b"),
    (JSON_TRACEBACK, "Failed to process the request(s) for model 'vllm_model_0_0', message: JSONDecodeError: Expecting value: line 1 column 1 (char 0)"),
    (TOO_LONG, TOO_LONG),
]  # fmt: skip

# text -> the class of our error, and a part of what the client reads
TEXTS: list[tuple[str, type[ServiceError], str]] = [
    # Triton's core. A request that it refuses is a fault of ours, so it is no 400.
    ("[request id: a-1] unexpected inference input 'x' for model 'm'", UpstreamError, "unexpected inference input 'x'"),
    ("[request id: <id_unknown>] expected number of inputs between 2 and 9 but got 1 inputs for model 'm'. Got input(s)"
     " ['a'], but missing required input(s) ['b']. Please provide all required input(s).", UpstreamError, "missing required input(s) ['b']"),
    ("[request id: a] inference input 'x' data-type is 'INT32', but model 'm' expects 'FP32'", UpstreamError, "data-type is 'INT32'"),
    ("[request id: a] unexpected shape for input 'x' for model 'm'. Expected [-1,1], got [1]. NOTE: …", UpstreamError, "unexpected shape"),
    ("[request id: a] input byte size mismatch for input 'x' for model 'm'. Expected 4, got 8", UpstreamError, "byte size mismatch"),
    ("[request id: a] inference request batch-size must be <= 8 for 'm'", UpstreamError, "batch-size must be <= 8"),
    ("Request for unknown model: 'm' is not found", ModelNotFound, "The model 'm' does not exist."),
    ("Request for unknown model: 'm' has no available versions", ModelNotFound, "The model 'm' does not exist."),
    ("[request id: a] Exceeds maximum queue size", Overloaded, "queue is full"),
    ("in ensemble 'ensemble', [request id: a] Exceeds maximum queue size", Overloaded, "queue is full"),
    ("[request id: a] Request timeout expired", UpstreamTimeout, "queue"),
    ("GRPC server is shutting down and has stopped accepting new requests.", UpstreamUnavailable, "not available"),
    ("Request for model 'm' version 1 is not ready", UpstreamUnavailable, "not available"),
    ("Request for unknown model: 'm' version 1 is not at ready state", UpstreamUnavailable, "not available"),
    ("Server not ready", UpstreamUnavailable, "not available"),
    ("[request id: a] Server is stopping, scheduler for model has stopped accepting new inference requests", UpstreamUnavailable, "not available"),
    ("Stub process 'm_0_0' is not healthy.", ModelCrashed, "not available"),
    ("in ensemble 'ensemble', Failed to retrieve the response error.", ModelCrashed, "not available"),
    ("ModelInfer RPC doesn't support models with decoupled transaction policy", NotImplementedUpstream, "does not stream"),
    ("HTTP end point doesn't support models with decoupled transaction policy", NotImplementedUpstream, "does not stream"),
    ("generate expects model to produce exactly 1 response, use generate stream for model that generates various number of"
     " responses", UpstreamError, "exactly 1 response"),
    # TensorRT-LLM, through each of its wrappers.
    (TOO_LONG, ContextLengthExceeded, "2048"),
    (f"in ensemble 'ensemble', Executor failed process requestId 5 due to the following error: {TOO_LONG}", ContextLengthExceeded, "2100"),
    (f"An error occurred when processing the input values for request id a, the error was '{TOO_LONG}'", ContextLengthExceeded, "2048"),
    (TRACEBACK.format(error=f"c_python_backend_utils.TritonModelException: {TOO_LONG}"), ContextLengthExceeded, "2048"),
    ("Cannot process new request: Prompt length (5056) exceeds maximum sequence length (2048)", ContextLengthExceeded, "5056"),
    ("Encountered an error in forwardAsync function: [TensorRT-LLM][ERROR] Assertion failed: Input length (6973) + max new tokens"
     " (4095) + draft tokens (0) must be less than max sequence length (8192). (/src/decoder.cpp:444)\n1  0x7fa8df465992 /x.so(+0x1)",
     ContextLengthExceeded, "8192 tokens, but the request needs 6973 for its prompt and 4095"),
    ("Input length (9000) + max new tokens (5) must be less than max sequence length (8192).", ContextLengthExceeded, "9000"),
    ("Cannot process new request: [TensorRT-LLM][ERROR] Assertion failed: !mInputTokenIds.empty() (/src/requestImpl.h:53)", PromptRefused, "prompt is empty"),
    ("An error occurred when processing the input values for request id a, the error was '[TensorRT-LLM][ERROR] Assertion failed:"
     " !mInputTokenIds.empty() (/src/requestImpl.h:53)\n1  0x7fa8df465992 /x.so(+0x1)'", PromptRefused, "prompt is empty"),
    ("Executor failed process requestId 5 due to the following error: Encountered an error in forwardAsync", UpstreamError, "forwardAsync"),
    ("in ensemble 'ensemble', An error occurred when processing the input values for request id a, the error was 'Invalid"
     " value'", RequestRefused, "Invalid value"),
    ("Error encountered while populating response: output_ids tensor must be present in list of output tensors", UpstreamError, "output_ids"),
    (TRACEBACK.format(error="Exception: max_tokens must be a single value > 0"), RequestRefused, "max_tokens must be a single value > 0"),
    (TRACEBACK.format(error="ValueError: text_input is required"), PromptRefused, "prompt is empty"),
    (TRACEBACK.format(error="RuntimeError: CUDA error"), UpstreamError, "failed to answer"),
    ("Streaming is only supported in decoupled mode.", NotImplementedUpstream, "does not stream"),
    ("Streaming is only supported if model is deployed using decoupled mode.", NotImplementedUpstream, "does not stream"),
    ("Expected batch size doesn't match 1", UpstreamError, "Expected batch size"),
    # vLLM.
    (f"{STREAM}'NoneType' object has no attribute 'lora_name'", InvalidRequest, "sampling parameters"),
    (f"{STREAM}Unexpected keyword argument 'foo'", InvalidRequest, "sampling parameters"),
    (JSON_TRACEBACK, InvalidRequest, "sampling parameters"),
    (STREAM, UpstreamError, "failed"),
    (f"{STREAM}\n", UpstreamError, "failed"),
    (f"{STREAM}The decoder prompt (length 2101) is longer than the maximum model length of 2048. Make sure that"
     " `max_model_len` is no smaller than the number of text tokens.", ContextLengthExceeded, "2048"),
    (f"{STREAM}This model's maximum context length is 2048 tokens. However, you requested 2101 tokens.", ContextLengthExceeded, "2048"),
    (f"{STREAM}The prompt (total length 2101) is too long to fit into the model (context length 2048).", ContextLengthExceeded, "2048"),
    ("Error generating request: The sum of prompt length (2101.0), query length (0) should not exceed max_num_tokens (2048)",
     ContextLengthExceeded, "2048 tokens, but the request's prompt has 2101"),
    ("Error generating request: `default_max_tokens` (-53) must be greater than 0, `default_max_tokens` (-53) = max_seq_len (2048)"
     " - `splited_prompt_len` (2101) - `query_token_len` (0)", ContextLengthExceeded, "2048 tokens, but the request's prompt has 2101"),
    (f"{STREAM}You passed 2101 input tokens and requested 0 output tokens. However, the model's context length is only 2048 tokens,"
     " resulting in a maximum input length of 2048 tokens.", ContextLengthExceeded, "2048 tokens, but the request's prompt has 2101"),
    (f"{STREAM}Input prompt (2101 tokens) is too long and exceeds limit of 2048", ContextLengthExceeded, "2101"),
    (f"{STREAM}Prompt cannot be empty", PromptRefused, "prompt is empty"),
    (f"{STREAM}The decoder prompt cannot be empty", PromptRefused, "prompt is empty"),
    ("Error generating request: Prompt cannot be empty", PromptRefused, "prompt is empty"),
    ("Error generating request: The sum of prompt length (2000.0) and query length (0) max_tokens (90) should not exceed"
     " max_seq_len (2048)", ContextLengthExceeded, "2048 tokens, but the request needs 2000 for its prompt and 90"),
    # The LLM API's model wraps the faults of its engine in the same words.
    ("Error generating request: CUDA error: an illegal memory access was encountered", UpstreamError, "failed: CUDA error: an"),
    ("[request id: 7] Error generating request: Assertion failed: x (/src/a.cpp:3)", UpstreamError, "failed to answer"),
    ("Error generating request: ", UpstreamError, "failed to answer"),
    # A refusal that spans lines, and one that names a path: the sentence is what the client needs.
    (f"{STREAM}Failed to transform regex into a grammar: [10:11:12] /project/cpp/regex_converter.cc:65: Regex parsing error at"
     " position 3: unmatched ')'\n", RequestRefused, "a grammar: Regex parsing error at position 3: unmatched ')'"),
    (f'{STREAM}Model "/models/vllm/1/weights" only supports [32, 64] matryoshka dimensions, change output dimensions to 99 will'
     " lead to poor results.", RequestRefused, 'Model … only supports [32, 64] matryoshka dimensions'),
    (f"{STREAM}Dimensions must be greater than 0", RequestRefused, "Dimensions must be greater than 0"),
    (f"[request id: 7] {STREAM}Model 'e5' only supports [32, 64] matryoshka dimensions, use other output dimensions will lead to poor"
     " results.", RequestRefused, "refused the request: Model 'e5' only supports [32, 64]"),
    (f'{STREAM}Model "e5" does not support matryoshka representation, changing output dimensions will lead to poor results.',
     RequestRefused, "does not support matryoshka"),
    (f"{STREAM}dimensions must be at most 384, got 1000", RequestRefused, "at most 384"),
    (f"{STREAM}The size of tensor a (8) must match the size of tensor b (9) at dimensions 1 and 2", UpstreamError, "tensor a"),
    (f"{STREAM}shape mismatch: 3 dimensions", UpstreamError, "shape mismatch"),
    (f"{STREAM}1 validation error for StructuredOutputsParams\n  Value error, The JSON schema is not\n  supported", RequestRefused,
     "1 validation error for StructuredOutputsParams Value error, The JSON schema is not supported"),
    (f"{STREAM}Requested sample logprobs of 50, which is greater than max allowed: 20", RequestRefused, "max allowed: 20"),
    (f"{STREAM}cannot identify image file <_io.BytesIO object at 0x7f1d3c0a1b20>", InvalidRequest, "cannot read an image"),
    # What is not about the request, or might not be: clients try again.
    (f"{STREAM}CUDA out of memory. Tried to allocate 2.00 GiB for the prompt.", UpstreamError, "failed: CUDA out of memory"),
    (f"{STREAM}list index out of range", UpstreamError, "failed: list index out of range"),
    (f"{STREAM}out of luck", UpstreamError, "failed: out of luck"),
    (f"in ensemble 'e', [request id: a] {STREAM}too many values to unpack (expected 2)", UpstreamError, "failed: too many values"),
    (f"{STREAM}'NoneType' object has no attribute 'prompt_token_ids'", UpstreamError, "has no attribute"),
    ("Failed to process the request(s) for model 'text_0_0', message: RuntimeError: no prompt in cache", UpstreamError, "no prompt in cache"),
    (f"{STREAM}temperature must be non-negative, got -1.0.", RequestRefused, "got -1.0"),
    (f"{STREAM}token_id(s) [99999] in logit_bias contain out-of-vocab token ids. Vocabulary size: 512", RequestRefused, "99999"),
    (f"{STREAM}At most 1 image(s) may be provided in one prompt.", RequestRefused, "At most 1 image"),
    (f"in ensemble 'e', [request id: a] {STREAM}min_tokens must be less than or equal to max_tokens=5, got 6.", RequestRefused, "got 6"),
    (f"{STREAM}Incorrect padding", RequestRefused, "Incorrect padding"),
    (f"{STREAM}Model m does not support 'generate' request", RequestRefused, "does not support 'generate' request"),
    (f"{STREAM}Model m does not support 'embed' request", RequestRefused, "does not support 'embed' request"),
    ("LoRA x is not supported, we currently support ['alpha', 'beta']", LoraNotLoaded, "the LoRA adapter 'x'"),
    ("LoRA feature is not enabled.", LoraNotLoaded, "this LoRA adapter"),
    (f"{STREAM}LoRA x is not supported, we currently support ['alpha']", LoraNotLoaded, "the LoRA adapter 'x'"),
    (LORA_GONE, LoraNotLoaded, "or its weights"),
    (f"Executor failed process requestId 3 due to the following error: {LORA_GONE}", LoraNotLoaded, "LoRA adapter"),
    (f"Cannot process new request: [TensorRT-LLM][ERROR] Assertion failed: {LORA_GONE} (/src/cpp/peft.cpp:268)", LoraNotLoaded, "LoRA adapter"),
    (f"in ensemble 'ensemble', [request id: 7] {LORA_GONE}", LoraNotLoaded, "LoRA adapter"),
    (f"An error occurred when processing the input values for request id 7, the error was '{LORA_GONE}'", LoraNotLoaded, "LoRA adapter"),
    (TRACEBACK.format(error=f"c_python_backend_utils.TritonModelException: {LORA_GONE}"), LoraNotLoaded, "LoRA adapter"),
    ("PEFT Cache is full. Could not store taskId=7", Overloaded, "no room"),
    ("Cache is full. There are no done tasks to evict", Overloaded, "no room"),
    ("Model is unavailable due to unhealthy vLLM engine", ModelCrashed, "not available"),
    (f"{STREAM}EngineCore encountered an issue. See stack trace (above) for the root cause.", ModelCrashed, "not available"),
    ("Request was cancelled", UpstreamError, "cancelled"),
    # What nobody knows.
    ("", UpstreamError, "failed to answer"),
    ("something new", UpstreamError, "something new"),
    ("x" * 5000, UpstreamError, "xxx"),
]  # fmt: skip

LEAK = re.compile(r"Traceback|File \"|/opt/|/usr/|/models/|model\.py|0x[0-9a-f]{4}|\n|\[request id|in ensemble")


@every_case("text, kind, shown", TEXTS)
def test_every_known_text_has_its_class(text, kind, shown):
    """The text decides, whatever wraps it; the client reads a sentence, the log has it all."""
    error = classify(text, "m")

    assert kind is type(error)
    assert shown in error.message
    assert not LEAK.search(error.message)
    assert len(error.message) < 600
    assert text == error.detail or kind is ModelNotFound


def test_the_size_of_embeddings_is_named() -> None:
    """A size that a model cannot make is the request's fault, and its field is named."""
    about = [classify(text, "m") for text, kind, _ in TEXTS if "imensions" in text and kind is RequestRefused]
    assert 5 == len(about)
    assert {(400, "dimensions")} == {(error.status, error.param) for error in about}


@every_case("text, kind", [(text, kind) for text, kind, _ in TEXTS])
@every_case("status", ["400", "500", "INTERNAL", "INVALID_ARGUMENT", "UNKNOWN"])
def test_unreliable_statuses_change_nothing(text, kind, status):
    """The statuses that Triton gives such errors are not to be relied on."""
    assert kind is type(classify(text, "m", status))


@every_case(
    "status, kind",
    [
        ("UNAVAILABLE", UpstreamUnavailable),
        ("503", UpstreamUnavailable),
        ("DEADLINE_EXCEEDED", UpstreamTimeout),
        ("CANCELLED", UpstreamError),
        ("RESOURCE_EXHAUSTED", UpstreamError),
        ("UNIMPLEMENTED", NotImplementedUpstream),
        ("501", NotImplementedUpstream),
        ("INTERNAL", UpstreamError),
        ("404", UpstreamError),
        ("", UpstreamError),
    ],
)
def test_the_status_is_the_last_resort(status, kind):
    """A text that says nothing leaves the decision to the transport's status."""
    assert kind is type(classify("who knows", "m", status))


@every_case(
    "text, expected",
    [
        ("plain", "plain"),
        ("[request id: a-b] plain", "plain"),
        ("in ensemble 'x', [request id: <id_unknown>] plain", "plain"),
        ("a ratio of 1/2 and and/or", "a ratio of 1/2 and and/or"),
        ("", None),
        ("  ", None),
        ("in ensemble 'x', ", None),
        ("see /var/log/triton.log", "see …"),
        ("'/opt/my models/x' is no model", "… is no model"),
        ("/opt/models/x", None),
        ("cannot reach http://10.0.0.7:8000/v2/x: refused", "cannot reach … refused"),
        ("two\nlines", "two lines"),
        ("two\r\nlines", "two lines"),
        ("at 0xdeadbeef", "at …"),
        ("failed (/src/x.cpp:12)", "failed"),
        ("failed\n1       0x7f97df4697fd /opt/lib.so(+0x177fd) [0x7f97df4697fd]", "failed"),
        ("failed, message: no\n\nAt:\n  /usr/lib/decoder.py(356): decode\n", "failed, message: no"),
        ("first line\nTraceback (most recent call last):\n  secret", "first line"),
        ('File "x.py", line 3', None),
        ("x" * 501, "x" * 500),
    ],
)
def test_what_may_be_shown(text, expected):
    """Prefixes and stacks go, and what a server keeps to itself is taken out of the sentence."""
    assert expected == public_reason(text)


@every_case(
    "error", [no_answer_error("m"), cut_off_error(), unreachable_error("ConnectionRefusedError: ('127.0.0.1', 1)")]
)
def test_errors_without_a_text_give_nothing_away(error):
    """What the transports find out themselves names no address."""
    assert isinstance(error, UpstreamError)
    assert "127.0.0.1" not in error.message
    assert "'m'" not in error.message


@every_case("status, kind", [("500", ProxyFailed), ("502", ProxyFailed), ("599", ProxyFailed), ("504", ProxyTimeout)])
def test_a_proxy_that_fails_is_no_triton_that_ends(status: str, kind: type[ServiceError]) -> None:
    """Clients see the same as of a lost connection or of silence, and the kind says that it is of a proxy."""
    error = foreign_error(status, "<html>")
    same = UpstreamTimeout("") if status == "504" else cut_off_error()
    assert kind is type(error)
    assert isinstance(error, type(same))
    assert (same.status, same.code) == (error.status, error.code)


def test_a_long_name_of_a_model_is_cut():
    """A made-up name does not fill the answer."""
    assert len(ModelNotFound("x" * 10_000).message) < 300


@every_case("size", [10_000, 100_000])
def test_a_huge_text_is_no_work(size):
    """Patterns stay linear: a long text with many beginnings of a match is classified at once."""
    for piece in ("prompt (length 1) ", STREAM, f"{STREAM}prompt "):
        text = piece * (size // len(piece)) + "in ensemble '" * 10

        assert isinstance(classify(text, "m"), ServiceError)


@every_case("text, line", LINES)
def test_the_log_has_one_line(text: str, line: str) -> None:
    """Of a traceback the line has the exception; the frames are for the level "debug"."""
    error = UpstreamError("The model failed.", detail=text)

    assert line == error.reason
    assert error.trace == (text.strip() if "\n" in text else None)
    with capture_logs() as logs:
        warn(structlog.get_logger(), "request refused", error, request_id="1")
    first, *rest = logs
    assert {"event": "request refused", "log_level": "warning", "reason": line, "request_id": "1"} == first
    assert [("debug", error.trace)] * ("\n" in text) == [(entry["log_level"], entry["trace"]) for entry in rest]


def test_what_a_prompt_may_have() -> None:
    """The error tells the prompt's tokens, and how many fit in front of the answer, where the backend names both."""
    sums = "Input length (9000) + max new tokens (5) must be less than max sequence length (8192)."
    for text, numbers in ((TOO_LONG, (2100, 2048)), (sums, (9000, 8187)), ("The prompt is too long.", (None, None))):
        error = classify(text, "m")
        assert isinstance(error, ContextLengthExceeded)
        assert numbers == (error.tokens, error.limit)


def test_long_texts() -> None:
    """What matters is at their beginning or at their end, and the log gets the beginning."""
    for text in ("Exceeds maximum queue size " + "1" * 10**6, "\n" * 10**6 + " Exceeds maximum queue size"):
        error = classify(text, "m")
        assert isinstance(error, Overloaded)
        assert text.startswith(error.detail or "-")
        assert len(error.detail or "") < 300_000
    assert isinstance(classify("1" * 10**6, "m"), UpstreamError)
    assert public_reason("see https://internal:8000/x now") == "see … now"
