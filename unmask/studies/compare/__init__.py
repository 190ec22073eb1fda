"""`unmask compare`: trains every method of a grid with every seed at the same budget, and reports the differences."""
