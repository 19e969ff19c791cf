"""The target's forward pass: decoder, paged KV, weights, tokenizer, backends."""
