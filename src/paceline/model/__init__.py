"""Models as data: config and families, tokenizer, template, weights."""
