"""Recorders of `lowp figure`: one module per family of figures, whose functions train and return a document each."""
