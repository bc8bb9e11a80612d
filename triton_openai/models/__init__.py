"""What is served: models, names, load and unload, LoRA adapters."""
