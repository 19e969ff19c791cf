"""The commands `bench`, `pull` and `doctor`: each module has `add_arguments(parser)` and `run(args) -> int`."""
