"""Verification laws: the rules that decide which drafts a step keeps."""
