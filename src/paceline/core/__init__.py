"""The nouns, the error tree, the noise and the sampling transforms. Imports nothing of ours."""
