"""The models that are measured with, as a Triton model repository."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

# The byte that marks a token in whatever it is wrapped in: neither headers nor JSON nor ids contain it.
MARK = b"~"
TOKEN = " word~"
# The ends of a call as Hermes and Qwen write it; between them, tokens are the text of its one argument.
OPENING = '<tool_call>\n{"name": "note", "arguments": {"text~": "'
CLOSING = '~"}}\n</tool_call>'

PACED = "bench_paced"
FLOOD = "bench_flood"
SLOW = "bench_slow"
PACED_CALL = "bench_paced_call"
FLOOD_CALL = "bench_flood_call"
TICK_MS: Mapping[str, float] = MappingProxyType(
    {PACED: 20.0, FLOOD: 0.0, SLOW: 250.0, PACED_CALL: 20.0, FLOOD_CALL: 0.0}
)

# The tensors of Triton's vLLM backend (release 25.11) that text needs, under a backend that every Triton has.
_CONFIG = """name: "{name}"
backend: "python"
max_batch_size: 0
model_transaction_policy {{ decoupled: true }}
input {{ name: "text_input" data_type: TYPE_STRING dims: [ 1 ] }}
input {{ name: "stream" data_type: TYPE_BOOL dims: [ 1 ] optional: true }}
input {{ name: "sampling_parameters" data_type: TYPE_STRING dims: [ 1 ] optional: true }}
input {{ name: "exclude_input_in_output" data_type: TYPE_BOOL dims: [ 1 ] optional: true }}
input {{ name: "return_finish_reason" data_type: TYPE_BOOL dims: [ 1 ] optional: true }}
input {{ name: "return_num_input_tokens" data_type: TYPE_BOOL dims: [ 1 ] optional: true }}
input {{ name: "return_num_output_tokens" data_type: TYPE_BOOL dims: [ 1 ] optional: true }}
output {{ name: "text_output" data_type: TYPE_STRING dims: [ -1 ] }}
output {{ name: "finish_reason" data_type: TYPE_STRING dims: [ -1 ] }}
output {{ name: "num_input_tokens" data_type: TYPE_UINT32 dims: [ 1 ] }}
output {{ name: "num_output_tokens" data_type: TYPE_UINT32 dims: [ -1 ] }}
parameters {{ key: "tick_ms" value: {{ string_value: "{tick_ms:g}" }} }}
parameters {{ key: "opening" value: {{ string_value: {opening} }} }}
parameters {{ key: "token" value: {{ string_value: {token} }} }}
parameters {{ key: "closing" value: {{ string_value: {closing} }} }}
instance_group [ {{ count: 1 kind: KIND_CPU }} ]
"""


def build_repository(destination: Path) -> Path:
    """Write the models into *destination* and return it."""
    source = Path(__file__).with_name("model") / "model.py"
    for name, tick_ms in TICK_MS.items():
        version = destination / name / "1"
        version.mkdir(parents=True)
        if name in (PACED_CALL, FLOOD_CALL):
            ends = (OPENING, CLOSING)
        else:
            ends = (TOKEN, TOKEN)
        opening, token, closing = (json.dumps(text) for text in (ends[0], TOKEN, ends[1]))
        (version.parent / "config.pbtxt").write_text(
            _CONFIG.format(name=name, tick_ms=tick_ms, opening=opening, token=token, closing=closing)
        )
        shutil.copyfile(source, version / "model.py")
    return destination
