"""Everything that proposes candidate tokens."""
