"""The configurations of the examples that need a GPU or a cluster fit together."""

from __future__ import annotations

import json
import re
import subprocess

import yaml
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from tests import deploy_files as files
from tests.programs import needs

EXAMPLES = files.ROOT / "examples"


def test_the_repository_for_vllm() -> None:
    """Triton can read the configuration, and vLLM's arguments name a model."""
    folder = EXAMPLES / "vllm/models/smollm2"
    config = text_format.Parse((folder / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())

    assert "vllm" == config.backend
    assert {"model", "max_model_len"} <= json.loads((folder / "1/model.json").read_text()).keys()


def test_the_configuration_of_the_llm_api() -> None:
    """The configuration of the LLM API says what the README changes, and streams."""
    config = yaml.safe_load((EXAMPLES / "tensorrt-llm-llmapi/model.yaml").read_text())
    readme = (EXAMPLES / "tensorrt-llm-llmapi/README.md").read_text()

    assert f"tensorrt_llm={config['model']} " in readme
    assert config["triton_config"]["decoupled"] is True


def test_the_values_for_kubernetes() -> None:
    """The chart takes them, the model is in the ConfigMap that the README makes, and traces go to the Service."""
    values = yaml.safe_load((EXAMPLES / "kubernetes/values.yaml").read_text())
    deployment, service = yaml.safe_load_all((EXAMPLES / "kubernetes/jaeger.yaml").read_text())
    made = files.documents(files.render(values)["templates/deployment.yaml"])[0]
    (volume,) = (one for one in made["spec"]["template"]["spec"]["volumes"] if one["name"] == "models")
    readme = (EXAMPLES / "kubernetes/README.md").read_text()

    assert f"create configmap {volume['configMap']['name']} " in readme
    for item in volume["configMap"]["items"]:
        (path,) = re.findall(rf"--from-file=(\S+/{re.escape(item['key'])})", readme)
        assert path.endswith(item["path"])
        assert (files.ROOT / path).is_file()
    assert service["spec"]["selector"] == deployment["spec"]["template"]["metadata"]["labels"]
    model = json.loads((EXAMPLES / "vllm/models/smollm2/1/model.json").read_text())["model"]
    assert [model] == [one["tokenizer"] for one in values["settings"]["models"].values()]
    for url in values["tracing"].values():
        assert url.startswith(f"http://{service['metadata']['name']}:{service['spec']['ports'][1]['port']}")


@needs("Node.js")
def test_the_program_for_node() -> None:
    """The program for Node.js is JavaScript."""
    subprocess.run(["node", "--check", str(EXAMPLES / "openai-js/chat.js")], check=True, timeout=120)
