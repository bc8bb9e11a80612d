"""Writes a Triton model repository for a sentence embedding model in the ONNX format."""

import argparse
import shutil
from pathlib import Path

from huggingface_hub import hf_hub_download

CONFIG = """\
name: "text_embedding"
backend: "python"
max_batch_size: 32
input { name: "text" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "embedding" data_type: TYPE_FP32 dims: [ -1 ] }
instance_group { count: 1 kind: KIND_CPU }
dynamic_batching { }
"""


def main() -> None:
    """Read the command line and write the repository."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--source", default="sentence-transformers/all-MiniLM-L6-v2", help="model on the hub, or folder"
    )
    parser.add_argument("repository", type=Path)
    arguments = parser.parse_args()
    version = arguments.repository / "text_embedding" / "1"
    version.mkdir(parents=True, exist_ok=True)
    (version.parent / "config.pbtxt").write_text(CONFIG)
    shutil.copy(Path(__file__).with_name("model.py"), version)
    for name in ("onnx/model.onnx", "tokenizer.json"):
        folder = Path(arguments.source)
        file = folder / name if folder.is_dir() else Path(hf_hub_download(arguments.source, name))
        shutil.copy(file, version / file.name)
    print(f"Wrote {version.parent}")


if __name__ == "__main__":
    main()
