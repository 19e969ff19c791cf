"""The commands `serve`, `chat` and `generate`, each with `add_arguments(parser)` and `run(args) -> int`."""
