"""Model files: GGUF, safetensors, hub folders."""
