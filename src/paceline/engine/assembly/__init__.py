"""Start-up: from options to an engine that is ready."""
