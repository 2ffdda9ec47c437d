"""The recipes' data: one module per family of sets, with readers of the published layout and offline defaults."""
