"""Paceline on Ray: `serve run paceline.ray:app model=default replicas=2`. The only package that imports ray."""

from paceline.ray.application import app
from paceline.ray.batch import Generate
from paceline.ray.scaling_policy import Headroom

__all__ = ["Generate", "Headroom", "app"]
