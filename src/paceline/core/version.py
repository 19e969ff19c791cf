"""Version of Paceline."""

VERSION = "0.1.0"
