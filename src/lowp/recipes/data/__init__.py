"""The recipes' data: a module a family of sets, with readers of the published layout and defaults without download."""
