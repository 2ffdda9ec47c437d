"""Terminal tables, progress bars, pictures and HTML pages of measurements, as functions of plain documents."""
