"""For all tests: no example of a property has a deadline, as machines are shared and stall."""

from hypothesis import settings

settings.register_profile("paceline", deadline=None)
settings.load_profile("paceline")
