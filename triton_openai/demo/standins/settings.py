"""The settings of a stand-in: Triton's own arguments, and a file that Triton's API does not show."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Settings:
    """The settings of one model instance."""

    name: str
    config: dict[str, Any]
    record: str | None
    tokenizer: str
    folder: Path
    #: The socket of the language model, None for scripted answers.
    engine: str | None = None

    def parameter(self, key: str, default: str) -> str:
        """Return a parameter of config.pbtxt; empty and unfilled ones count as absent."""
        value = str(self.config.get("parameters", {}).get(key, {}).get("string_value", ""))
        if not value or value.startswith("${"):
            return default
        return value

    def flag(self, key: str, *, default: bool) -> bool:
        """Return a parameter of config.pbtxt as the backends read booleans."""
        return self.parameter(key, str(default)).lower() in ("true", "yes", "1", "t")

    @property
    def decoupled(self) -> bool:
        """Whether the model may send any number of responses."""
        return bool(self.config.get("model_transaction_policy", {}).get("decoupled", False))

    def inputs(self) -> set[str]:
        """Return the names of the declared inputs."""
        return {tensor["name"] for tensor in self.config["input"]}

    def outputs(self) -> set[str]:
        """Return the names of the declared outputs."""
        return {tensor["name"] for tensor in self.config["output"]}


def load(args: dict[str, Any]) -> Settings:
    """Read the settings from the arguments of ``initialize``."""
    folder = Path(args["model_repository"]) / str(args["model_version"])
    own = json.loads((folder / "standin.json").read_text())
    return Settings(
        name=args["model_name"],
        config=json.loads(args["model_config"]),
        record=own.get("record"),
        tokenizer=own["tokenizer"],
        folder=folder,
        engine=own.get("engine"),
    )
