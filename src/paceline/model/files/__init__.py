"""Files that models come in: GGUF, safetensors, hub folders."""
