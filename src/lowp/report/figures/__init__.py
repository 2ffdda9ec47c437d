"""Pictures of `lowp figure` and their numbers in words, as functions of the documents that are written as JSON."""
