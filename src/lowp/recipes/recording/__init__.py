"""What `lowp figure` draws, recorded from real runs: a module a family of figures, each function gives one document."""
