"""`unmask compare`: methods against each other, every cell of a grid trained with every seed at the same budget."""
