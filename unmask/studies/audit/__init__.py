"""`unmask audit`: how far each likelihood estimator is from the exact likelihood and gradient on a given model."""
