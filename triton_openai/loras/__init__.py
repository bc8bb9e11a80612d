"""LoRA adapters: which a model has, their files, and how their weights get to an engine that has to be sent them."""
