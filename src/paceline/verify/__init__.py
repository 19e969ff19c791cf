"""The lossless law: which drafts are kept."""
