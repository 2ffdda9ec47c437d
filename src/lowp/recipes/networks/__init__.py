"""Networks of the literature in plain torch, without any precision, which is added from outside."""
