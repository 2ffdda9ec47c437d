"""Products of packed codes, as they are served: bytes, codes of few bits, signs."""
