"""What was measured, for readers: terminal tables, progress, pictures. All are functions of plain documents."""
