"""Draft heads: small layers over the target's own hidden states."""
