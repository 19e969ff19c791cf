"""What a model is: config and families, tokenizer, template, weights."""
