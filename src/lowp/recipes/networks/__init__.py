"""Networks of the literature in plain torch; the precision is applied from outside."""
