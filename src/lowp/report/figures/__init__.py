"""Pictures of what `lowp figure` recorded, and their numbers in words: functions of the documents written as JSON."""
