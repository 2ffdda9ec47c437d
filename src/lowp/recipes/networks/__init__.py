"""Networks of the literature in plain torch, without a word of precision: that is added from outside."""
