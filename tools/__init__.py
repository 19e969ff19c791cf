"""Tools of the project's developers. They are not part of the wheel."""
